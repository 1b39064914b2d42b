"""FP8: E4M3 numbers of one byte, with scales per block, output or tensor. Does not import torch.

A matrix ``name`` of dtype F8_E4M3 has its scales in ``name_scale_inv`` (one for each block of 128 × 128, as DeepSeek
and Qwen store them) or ``name_scale``. In spite of the first name, a weight is ``scale × number`` with both.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm.errors import ModelError
from swarm.stage.quantization.formats import Codes, WeightFormat
from swarm.stage.quantization.parts import SCALES, Shape, TensorPool, count_blocks, kernel_group
from swarm.stage.quantization.settings import Settings, read_block, read_text
from swarm.stage.quantization.stored import StoredWeight

DTYPE = "F8_E4M3"
DEFAULT_BLOCK = (128, 128)
_MX_BLOCK = (1, 32)
_SCALES = ("_scale_inv", "_scale")
_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".activation_scale_inv",
)


def find_fp8(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    """Take the quantized matrices of an FP8 checkpoint from the pool. Raises ``ModelError``."""
    if read_text(settings, "expert_dtype", "fp8") != "fp8":
        raise ModelError("FP8 files with experts of 4 bits are not supported; use files with FP8 experts")
    if read_text(settings, "fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"FP8 {settings['fmt']} is not supported; use files in E4M3, or the original")
    default = _MX_BLOCK if read_text(settings, "quant_method", "") == "mxfp8" else DEFAULT_BLOCK
    block = read_block(settings, "weight_block_size", default)
    for name in [name for name, tensor in pool.rest.items() if tensor.dtype == DTYPE]:
        yield describe_fp8(name, block, "FP8", pool)


def describe_fp8(name: str, block: tuple[int, int], format_name: str, pool: TensorPool) -> StoredWeight:
    """Take one matrix of E4M3 numbers. ``block`` is the outputs and inputs of a scale where there is one per block."""
    codes = pool.take_matrix(name, [DTYPE], 2, 3)
    *experts, outputs, inputs = codes.shape
    scale_name = next((name + ending for ending in _SCALES if name + ending in pool.rest), name + _SCALES[0])
    choices = _scale_shapes(tuple(experts), outputs, inputs, block)
    scales = pool.take(scale_name, SCALES, *choices, beside=codes)
    drop_activation_scales(name.removesuffix(".weight"), pool)
    used = choices[scales.shape]
    return StoredWeight(
        name=name,
        format=WeightFormat(
            name=format_name,
            codes=Codes.FP8,
            group=kernel_group(used[1], inputs, name),
            scales=SCALES[scales.dtype],
        ),
        shape=codes.shape,
        encoding="fp8",
        parts={"codes": codes, "scales": scales},
        block=used,
    )


def drop_activation_scales(module: str, pool: TensorPool) -> None:
    """Remove the scales of a module's activations, which stay as they are."""
    for ending in _ACTIVATIONS:
        pool.discard(module + ending)


def _scale_shapes(experts: Shape, outputs: int, inputs: int, block: tuple[int, int]) -> dict[Shape, tuple[int, int]]:
    """Return the shapes that the scales may have, with the outputs and inputs that share one; 0 means all."""
    per_tensor, per_output = (0, 0), (1, 0)
    shapes = {(*experts, outputs): per_output, (*experts, outputs, 1): per_output}
    shapes |= {(*experts, 1): per_tensor, (*experts, 1, 1): per_tensor, experts: per_tensor}
    shapes[(*experts, count_blocks(outputs, block[0]), count_blocks(inputs, block[1]))] = block
    return shapes

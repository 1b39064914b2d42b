"""compressed-tensors: packed int4 and int8, plain int8, FP8 and MXFP4. Does not import torch.

For a module with ``inputs`` and ``outputs``; ``groups`` is 1 with one scale per output:

==================  =====  ===================  ========================================================
tensor              dtype  shape                contents
==================  =====  ===================  ========================================================
weight_packed       I32    [outputs, inputs/8]  8 int4 or 4 int8 codes, plus 8 or 128, the first lowest
weight_packed       U8     [outputs, inputs/2]  2 codes of MXFP4, the first in the low half
weight              I8     [outputs, inputs]    codes
weight              F8     [outputs, inputs]    E4M3 numbers
weight_scale        float  [outputs, groups]    one for each block of a matrix, or of a whole matrix, also occur
weight_zero_point   I32    [outputs/8, groups]  of weight_packed, packed along the outputs; older files have I8
weight_zero_point   I8     [outputs, groups]    of weight
weight_g_idx        I32    [inputs]             group of each input
weight_shape        I64    [2]                  outputs and inputs of weight_packed
==================  =====  ===================  ========================================================

A weight is ``scale × (code - zero point)``. What the configuration plans for activations is not done: they stay as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.formats import Codes, Minima, WeightFormat
from swarm.stage.quantization.fp8 import DEFAULT_BLOCK, describe_fp8, drop_activation_scales
from swarm.stage.quantization.fp8 import DTYPE as FP8
from swarm.stage.quantization.gptq import CODES
from swarm.stage.quantization.mxfp4 import GROUP as MXFP4_GROUP
from swarm.stage.quantization.mxfp4 import describe_mxfp4
from swarm.stage.quantization.parts import FLOAT_SCALES, SCALES, Shape, TensorPool, count_blocks, kernel_group
from swarm.stage.quantization.patterns import is_match
from swarm.stage.quantization.settings import (
    Settings,
    read_block,
    read_flag,
    read_group_size,
    read_integer,
    read_section,
    read_text,
    read_texts,
)
from swarm.stage.quantization.stored import StoredWeight

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
)
_PACKED, _SCALE, _ZEROS, _ORDER, _SHAPE = (
    f".weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
)
_NAMES = {Codes.INT4: "compressed-tensors int4", Codes.INT8: "compressed-tensors int8"}


def find_compressed(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    """Take the quantized matrices of a compressed-tensors checkpoint from the pool. Raises ``ModelError``."""
    _check_supported(settings)
    groups = [read_section(read_section(settings, "config_groups"), name) for name in settings["config_groups"]]
    for module in pool.modules(_PACKED):
        yield _describe_packed(module, _choose_weights(groups, module), pool)
    for module in pool.modules(_SCALE):
        yield _describe_plain(module, _choose_weights(groups, module), pool)


def _check_supported(settings: Settings) -> None:
    """Raise ``ModelError`` for formats that need more than scales and zero points."""
    groups = read_section(settings, "config_groups")
    if not groups:
        raise ModelError("quantization_config of compressed-tensors has no config_groups; download config.json again")
    formats = {read_text(settings, "format", "dense")}
    for name in groups:
        formats.add(read_text(read_section(groups, name), "format", "dense"))
    for unknown in sorted(formats - set(_FORMATS)):
        raise ModelError(
            f"compressed-tensors {unknown} is not supported; use pack-quantized, int-quantized or float-quantized files"
        )
    sparsity = read_text(read_section(settings, "sparsity_config"), "format", "dense")
    if sparsity != "dense":
        raise ModelError(f"compressed-tensors {sparsity} is not supported; use files without sparsity")
    if read_section(read_section(settings, "transform_config"), "config_groups"):
        raise ModelError("compressed-tensors with transform_config is not supported; use files without transforms")
    if settings.get("kv_cache_scheme"):
        raise ModelError("compressed-tensors with kv_cache_scheme is not supported; use files without it")


def _choose_weights(groups: list[Settings], module: str) -> Settings:
    """Return the settings of a module's weights: a target that names it precedes a pattern, and that a class."""
    best: tuple[int, Settings] | None = None
    for group in groups:
        for target in read_texts(group, "targets"):
            rank = _match(target, module)
            if rank and (best is None or rank > best[0]):
                best = rank, group
    if best is None:
        raise ModelError(f"{module} is quantized, but no config_groups of quantization_config targets it")
    weights = read_section(best[1], "weights")
    if not weights:
        raise ModelError(f"{module} is quantized, but its config_groups in quantization_config have no weights")
    return weights


def _match(target: str, module: str) -> int:
    """Return how closely a target names a module: 0 if it does not."""
    if target == module:
        return 3
    if target.startswith("re:"):
        return 2 if is_match(target.removeprefix("re:"), module) else 0
    if "." in target or not target[:1].isupper():
        return 0
    return 1 if (target == "Embedding") == ("embed" in module.rpartition(".")[2]) else 0


def _describe_packed(module: str, weights: Settings, pool: TensorPool) -> StoredWeight:
    packed = pool.rest[module + _PACKED]
    if f"{module}.weight_global_scale" in pool.rest:
        raise ModelError(f"{packed.path} has {module} in NVFP4, which is not supported; use MXFP4, int4 or FP8 files")
    drop_activation_scales(module, pool)
    bits = read_integer(weights, "num_bits", 8)
    if read_text(weights, "type", "int") == "float":
        if bits != 4 or read_group_size(weights) != MXFP4_GROUP:
            raise ModelError(f"{module} has packed numbers of {bits} bits that are not MXFP4; use MXFP4 or int4 files")
        codes = pool.take_matrix(packed.name, ["U8"], 2)
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        scales = pool.take(module + _SCALE, ["U8"], (outputs, count_blocks(inputs, MXFP4_GROUP)), beside=codes)
        return describe_mxfp4(f"{module}.weight", (outputs, inputs), codes, scales)
    if bits not in CODES:
        raise ModelError(f"{module} is packed with {bits} bits, which is not supported; use files with 4 or 8 bits")
    codes = pool.take_matrix(packed.name, ["I32"], 2)
    return _describe_integers(module, weights, codes, CODES[bits], pool)


def _describe_plain(module: str, weights: Settings, pool: TensorPool) -> StoredWeight:
    codes = pool.rest.get(f"{module}.weight")
    if codes is None:
        raise ModelError(f"{pool.rest[module + _SCALE].path} has {module}{_SCALE}, but no weights with it")
    if codes.dtype == FP8:
        pool.discard(module + _ZEROS)  # of symmetric numbers, which some versions store
        return describe_fp8(codes.name, _block(weights), "compressed-tensors FP8", pool)
    drop_activation_scales(module, pool)
    codes = pool.take_matrix(codes.name, ["I8"], 2)
    return _describe_integers(module, weights, codes, Codes.INT8, pool)


def _describe_integers(
    module: str, weights: Settings, codes: StoredTensor, kind: Codes, pool: TensorPool
) -> StoredWeight:
    """Take the parts of an integer matrix, of which ``codes`` is packed in words or not."""
    is_packed = codes.dtype == "I32"
    per_word = 8 if kind is Codes.INT4 else 4
    outputs, inputs = codes.shape[0], codes.shape[1] * (per_word if is_packed else 1)
    block = _block(weights)
    blocks = (count_blocks(outputs, block[0]), count_blocks(inputs, block[1]))
    shapes: list[Shape] = [blocks] if blocks[1] > 1 else [blocks, blocks[:1]]
    if blocks == (1, 1):
        shapes.append(())
    parts = {"codes": codes, "scales": pool.take(module + _SCALE, FLOAT_SCALES, *shapes, beside=codes)}
    symmetric = read_flag(weights, "symmetric", default=True)
    if symmetric and module + _ZEROS not in pool.rest:
        pass
    elif pool.dtype(module + _ZEROS) == "I32":
        parts["zeros"] = pool.take(module + _ZEROS, ["I32"], (count_blocks(blocks[0], per_word), blocks[1]))
    else:
        parts["zeros"] = pool.take(module + _ZEROS, ["I8"], *shapes, beside=codes)
    if module + _ORDER in pool.rest:
        parts["order"] = pool.take(module + _ORDER, ["I32", "I64"], (inputs,))
    if is_packed:
        parts["shape"] = pool.take(module + _SHAPE, ["I64", "I32"], (2,), beside=codes)
    return StoredWeight(
        name=f"{module}.weight",
        format=WeightFormat(
            name=_NAMES[kind],
            codes=kind,
            group=kernel_group(block[1], inputs, module),
            scales=SCALES[parts["scales"].dtype],
            minima=Minima.NONE if symmetric else Minima.ZERO_POINTS,
            offset=8 if kind is Codes.INT4 else 128,
        ),
        shape=(outputs, inputs),
        encoding="compressed_packed" if is_packed else "compressed_int8",
        parts=parts,
        block=block,
        is_reordered="order" in parts and weights.get("actorder") in ("group", True),
    )


def _block(weights: Settings) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale; 0 means all of them."""
    strategy = read_text(weights, "strategy", "")
    if strategy in ("group", "") and weights.get("group_size"):
        return 1, read_group_size(weights)
    match strategy:
        case "channel":
            return 1, 0
        case "tensor" | "":
            return 0, 0
        case "block":
            return read_block(weights, "block_structure", DEFAULT_BLOCK)
        case other:
            raise ModelError(f"compressed-tensors with one scale per {other} is not supported; use group or channel")

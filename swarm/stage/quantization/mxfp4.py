"""MXFP4: 4-bit floating-point codes (E2M1), with a power of two for each 32 inputs. Does not import torch.

gpt-oss stores the matrices of all experts of a layer together, as ``NAME_blocks``, U8 ``[experts, outputs, groups,
16]``, and ``NAME_scales``, U8 ``[experts, outputs, groups]``. A byte holds two inputs, the first one in its low half.
The outputs of ``gate_up_proj`` alternate between gate and up, as in the plain model, which holds the matrices
transposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.formats import E2M1, Codes, Scales, WeightFormat
from swarm.stage.quantization.parts import TensorPool, contradiction, count_blocks
from swarm.stage.quantization.settings import Settings
from swarm.stage.quantization.stored import StoredWeight

GROUP = 32
BLOCKS = "_blocks"


def find_mxfp4(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    """Take the quantized matrices of an MXFP4 checkpoint from the pool. Raises ``ModelError``."""
    for name in pool.modules(BLOCKS):
        codes = pool.take_matrix(name + BLOCKS, ["U8"], 4, 3)
        inputs = 2 * codes.num_elements // (codes.shape[0] * codes.shape[1])
        shape = (codes.shape[0], codes.shape[1], inputs)
        scales = pool.take(f"{name}_scales", ["U8"], (*shape[:-1], count_blocks(inputs, GROUP)), beside=codes)
        if len(codes.shape) == 4 and codes.shape[-1] != GROUP // 2:
            raise contradiction(codes, (*shape[:-1], inputs // GROUP, GROUP // 2))
        yield describe_mxfp4(name, shape, codes, scales)


def describe_mxfp4(name: str, shape: tuple[int, ...], codes: StoredTensor, scales: StoredTensor) -> StoredWeight:
    """Return the description of a matrix of E2M1 codes with E8M0 scales. Raises ``ModelError``."""
    if shape[-1] % GROUP:
        raise ModelError(
            f"{codes.path} stores {codes.name} with {shape[-1]} inputs, but MXFP4 has blocks of {GROUP}; download it "
            "again"
        )
    return StoredWeight(
        name=name,
        format=WeightFormat(name="MXFP4", codes=Codes.INT4, group=GROUP, scales=Scales.BFLOAT16, table=E2M1),
        shape=shape,
        encoding="mxfp4",
        parts={"codes": codes, "scales": scales},
        block=(1, GROUP),
    )

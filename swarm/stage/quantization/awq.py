"""AWQ: int4 codes in 32-bit words along the outputs, in the layout "gemm". Does not import torch.

For a module with ``inputs`` and ``outputs``:

=========  =====  ===================  ===================================================================
tensor     dtype  shape                contents
=========  =====  ===================  ===================================================================
qweight    I32    [inputs, outputs/8]  word ``c`` holds outputs 8c + 0, 2, 4, 6, 1, 3, 5 and 7, the first lowest
qzeros     I32    [groups, outputs/8]  zero points, in the same order
scales     float  [groups, outputs]
=========  =====  ===================  ===================================================================

A weight is ``scale × (code - zero point)``.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm.errors import ModelError
from swarm.stage.quantization.formats import Codes, Minima, WeightFormat
from swarm.stage.quantization.parts import FLOAT_SCALES, SCALES, TensorPool, count_blocks, kernel_group
from swarm.stage.quantization.settings import Settings, read_group_size, read_integer, read_text
from swarm.stage.quantization.stored import StoredWeight

_LAYOUT = "gemm"
_PER_WORD = 8


def find_awq(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    """Take the quantized matrices of an AWQ checkpoint from the pool. Raises ``ModelError``."""
    layout = read_text(settings, "version", read_text(settings, "format", _LAYOUT))
    if layout != _LAYOUT:
        raise ModelError(f"AWQ files in the layout {layout!r} are not supported; use files in the layout gemm")
    bits = read_integer(settings, "bits", read_integer(settings, "w_bit", 4))
    if bits != 4:
        raise ModelError(f"AWQ with {bits} bits is not supported; use files with 4 bits")
    group_size = read_group_size(settings, "group_size", read_integer(settings, "q_group_size", 128))
    for module in pool.modules(".qweight"):
        yield _describe(module, group_size, pool)


def _describe(module: str, group_size: int, pool: TensorPool) -> StoredWeight:
    codes = pool.take_matrix(f"{module}.qweight", ["I32"], 2)
    inputs, words = codes.shape
    groups, outputs = count_blocks(inputs, group_size), _PER_WORD * words
    scales = pool.take(f"{module}.scales", FLOAT_SCALES, (groups, outputs), beside=codes)
    zeros = pool.take(f"{module}.qzeros", ["I32"], (groups, words), beside=codes)
    return StoredWeight(
        name=f"{module}.weight",
        format=WeightFormat(
            name="AWQ int4",
            codes=Codes.INT4,
            group=kernel_group(group_size, inputs, module),
            scales=SCALES[scales.dtype],
            minima=Minima.ZERO_POINTS,
            offset=8,
        ),
        shape=(outputs, inputs),
        encoding="awq",
        parts={"codes": codes, "scales": scales, "zeros": zeros},
        block=(1, group_size),
    )

"""GPTQ: int4 or int8 codes in 32-bit words along the inputs. Does not import torch.

For a module with ``inputs`` and ``outputs``, and with 8 (int4) or 4 (int8) codes per word:

=========  =====  ===================  ================================================
tensor     dtype  shape                contents
=========  =====  ===================  ================================================
qweight    I32    [inputs/8, outputs]  word ``r`` holds inputs 8r up to 8r + 7, the first lowest
qzeros     I32    [groups, outputs/8]  word ``c`` holds zero points of outputs 8c up to 8c + 7
scales     float  [groups, outputs]
g_idx      I32    [inputs]             group of each input; ``desc_act`` scatters the groups
=========  =====  ===================  ================================================

A weight is ``scale × (code - zero point)``. Files of the first version store each zero point less one: the word less
0x11111111, which borrows from the next code where the zero point is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from swarm.errors import ModelError
from swarm.stage.quantization.formats import Codes, Minima, WeightFormat
from swarm.stage.quantization.parts import FLOAT_SCALES, SCALES, TensorPool, count_blocks, kernel_group
from swarm.stage.quantization.patterns import is_match
from swarm.stage.quantization.settings import (
    Settings,
    read_flag,
    read_group_size,
    read_integer,
    read_section,
    read_text,
)
from swarm.stage.quantization.stored import StoredWeight

_EMBEDDING = re.compile(r"(?:^|\.)(?:wte|embed\w*)$")
FIRST_VERSION, SECOND_VERSION = "gptq", "gptq_v2"
CODES = {4: Codes.INT4, 8: Codes.INT8}


def find_gptq(settings: Settings, pool: TensorPool) -> Iterator[StoredWeight]:
    """Take the quantized matrices of a GPTQ checkpoint from the pool. Raises ``ModelError``."""
    version = read_text(settings, "checkpoint_format", read_text(settings, "format", FIRST_VERSION))
    if version not in (FIRST_VERSION, SECOND_VERSION):
        raise ModelError(f"GPTQ files in the layout {version!r} are not supported; use files in the layout gptq")
    if settings.get("rotation"):
        raise ModelError("GPTQ files with rotated inputs are not supported; use files without rotation")
    for module in pool.modules(".qweight"):
        yield _describe(module, {**settings, **_overrides(settings, module)}, version, pool)


def _overrides(settings: Settings, module: str) -> Settings:
    """Return the settings of one module that differ from the others'."""
    for pattern, changed in read_section(settings, "dynamic").items():
        if not pattern.startswith("-:") and is_match(pattern.removeprefix("+:"), module):
            return read_section({pattern: changed}, pattern)
    return {}


def _describe(module: str, settings: Settings, version: str, pool: TensorPool) -> StoredWeight:
    if _EMBEDDING.search(module):
        raise ModelError(f"{module} is a GPTQ embedding, which is not supported; use files with a plain embedding")
    bits, group_size = read_integer(settings, "bits"), read_group_size(settings)
    if bits not in CODES:
        raise ModelError(f"{module} is GPTQ with {bits} bits, which is not supported; use files with 4 or 8 bits")
    per_word = 32 // bits
    codes = pool.take_matrix(f"{module}.qweight", ["I32"], 2)
    rows, outputs = codes.shape
    order = pool.rest.get(f"{module}.g_idx")
    inputs = order.num_elements if order else rows * per_word
    if count_blocks(inputs, per_word) != rows:
        raise ModelError(
            f"{codes.path} stores {codes.name} with {rows} rows of {per_word} inputs, but {module}.g_idx with {inputs}"
        )
    groups = count_blocks(inputs, group_size)
    symmetric = read_flag(settings, "sym", default=False)
    parts = {
        "codes": codes,
        "scales": pool.take(f"{module}.scales", FLOAT_SCALES, (groups, outputs), beside=codes),
        "zeros": pool.take(f"{module}.qzeros", ["I32"], (groups, count_blocks(outputs, per_word)), beside=codes),
    }
    if order:
        parts["order"] = pool.take(order.name, ["I32", "I64"], (inputs,))
    return StoredWeight(
        name=f"{module}.weight",
        format=WeightFormat(
            name=f"GPTQ int{bits}",
            codes=CODES[bits],
            group=kernel_group(group_size, inputs, module),
            scales=SCALES[parts["scales"].dtype],
            minima=Minima.NONE if symmetric else Minima.ZERO_POINTS,
            offset=1 << (bits - 1),
        ),
        shape=(outputs, inputs),
        encoding=version,
        parts=parts,
        block=(1, group_size),
        is_reordered=order is not None and read_flag(settings, "desc_act", default=False),
    )

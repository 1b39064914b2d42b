"""Description of quantized weight matrices, common to all file formats. Does not import torch.

Every matrix is ``[outputs, inputs]``, or ``[experts, outputs, inputs]``. A weight is

    scale × value(code) - minimum

with one scale, and optionally one minimum, for each output and group of inputs. A code's value is ``table[code]`` if
the format has a table, the number that its bits encode for FP8, and ``code - offset`` otherwise. All of these values
are exact in bfloat16, which is what our kernels rely on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SUPER_GROUP = 256  # inputs that share one pair of nested scales, as in the K formats of GGUF
GROUPS = (16, 32, 64, 128)  # group sizes that our kernels have
_BLOCK = 64  # outputs of a block of a packed matrix
BLOCK_INPUTS = 128  # inputs of a block of a matrix that is packed for a GPU


class Codes(enum.StrEnum):
    """Kinds of codes."""

    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8 = "int8"
    FP8 = "fp8"  # E4M3 without infinities


class Scales(enum.StrEnum):
    """Encodings of the scales."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    NESTED = "nested"  # a float16 for 256 inputs, times an int8 for each group


class Minima(enum.StrEnum):
    """Encodings of the minima."""

    NONE = "none"
    FLOAT16 = "float16"
    ZERO_POINTS = "zero points"  # minimum = scale × (zero point - offset), the zero point a uint8
    NESTED = "nested"  # a float16 for 256 inputs, times a uint8 for each group


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the numbers of a matrix are encoded. ``name`` is for people, such as "Q4_K" or "GPTQ int4"."""

    name: str
    codes: Codes
    group: int  # inputs that share a scale; one of ``GROUPS``
    scales: Scales = Scales.FLOAT16
    minima: Minima = Minima.NONE
    offset: int = 0  # subtracted from each code
    table: tuple[float, ...] = ()  # values of the sixteen 4-bit codes


NUM_BITS = {Codes.INT4: 4, Codes.INT5: 5, Codes.INT6: 6, Codes.INT8: 8, Codes.FP8: 8}  # of a code

# Values of FP4 (E2M1), the codes of MXFP4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Bytes of 64 codes, and of the numbers of 64 outputs; kernels.h describes the layout.
_CODE_BYTES = {Codes.INT4: 32, Codes.INT5: 40, Codes.INT6: 48, Codes.INT8: 64, Codes.FP8: 64}
_SCALE_BYTES = {Scales.FLOAT16: 128, Scales.BFLOAT16: 128, Scales.FLOAT32: 256, Scales.NESTED: 64}
_MINIMUM_BYTES = {Minima.NONE: 0, Minima.FLOAT16: 128, Minima.ZERO_POINTS: 64, Minima.NESTED: 64}


def packed_bytes(form: WeightFormat, outputs: int, inputs: int) -> int:
    """Return the size of a packed matrix in memory."""
    num_groups, num_super = -(-inputs // form.group), -(-inputs // SUPER_GROUP)
    nested = 128 * ((form.scales is Scales.NESTED) + (form.minima is Minima.NESTED))
    group = form.group * _CODE_BYTES[form.codes] + _SCALE_BYTES[form.scales] + _MINIMUM_BYTES[form.minima]
    return -(-outputs // _BLOCK) * (num_super * nested + num_groups * group)


def gpu_bytes(form: WeightFormat, outputs: int, inputs: int) -> int:
    """Return the size of a matrix that is packed for a GPU: codes of more than 4 bits have a byte each."""
    blocks, num_groups, num_super = -(-inputs // BLOCK_INPUTS), -(-inputs // form.group), -(-inputs // SUPER_GROUP)
    nested = 2 * num_super * ((form.scales is Scales.NESTED) + (form.minima is Minima.NESTED))
    numbers = (_SCALE_BYTES[form.scales] + _MINIMUM_BYTES[form.minima]) // _BLOCK
    codes = blocks * BLOCK_INPUTS // (2 if form.codes is Codes.INT4 else 1)
    return outputs * (codes + num_groups * numbers + nested)


def supports_int8(form: WeightFormat) -> bool:
    """Whether the values of a format's codes can be multiplied as whole numbers, as ``worker.activations = "int8"``
    does.

    FP8 codes can't. The values of a table are doubled and must then be whole numbers that an int8 holds, as MXFP4's
    are.
    """
    doubled = [2 * value for value in form.table]
    return form.codes is not Codes.FP8 and all(value.is_integer() and -128 <= value <= 127 for value in doubled)

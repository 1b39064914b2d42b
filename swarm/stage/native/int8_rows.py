"""Products of quantized weights with rows that are rounded to int8: the setting ``worker.activations``.

One scale for each row and group of inputs, and whole-number sums: all variants of the kernels have the same bits. It is
a faster and less exact way to compute prompts; which formats have it, :func:`supports_int8` decides.
"""

from __future__ import annotations

from swarm.stage.quantization.formats import Codes, WeightFormat


def supports_int8(form: WeightFormat) -> bool:
    """Whether the values of a format's codes can be multiplied as whole numbers.

    FP8 codes can't. The values of a table are doubled and must then be whole numbers that an int8 holds, as MXFP4's
    are.
    """
    doubled = [2 * value for value in form.table]
    return form.codes is not Codes.FP8 and all(value.is_integer() and -128 <= value <= 127 for value in doubled)

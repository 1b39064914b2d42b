"""Products with rows rounded to int8, computed once more with numpy, operation by operation.

Every operation is rounded once, so the kernels must give the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarm.stage.quantization.formats import Codes
from swarm.stage.quantization.tensors import QuantizedTensor, code_values, group_minima, group_scales

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def round_rows(rows: Floats, group: int) -> tuple[Floats, Integers]:
    """Return the scale of each row's groups, and the whole numbers of all its inputs."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % group))).reshape(len(rows), -1, group)
    top = np.abs(padded).max(2)
    scales = np.where(np.isfinite(top), top, np.float32(np.nan)) / np.float32(127)
    usable = scales > 0
    divided = np.divide(padded, scales[..., None], where=usable[..., None], out=np.zeros_like(padded))
    return scales, np.clip(np.rint(divided), -127, 127).astype(np.int64)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return ``a × b + c``, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it to float32 is as if there had
    been one rounding.
    """
    product, other = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    is_even = total.view(np.int64) % 2 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    inexact = (error != 0) & np.isfinite(error) & is_even
    return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def product(tensor: QuantizedTensor, rows: Floats) -> Floats:
    """Return the sums ``[row, output]``, before bias, function and rounding to the rows' dtype."""
    form = tensor.format
    if tensor.order is not None:
        rows = rows[:, tensor.order.numpy()]
    row_scales, wholes = round_rows(rows, form.group)
    scales, minima = group_scales(tensor).numpy(), group_minima(tensor)
    values = code_values(form).double().numpy()[tensor.codes.numpy()]
    doubled = bool(form.table)
    assert form.codes is not Codes.FP8, "it has no such products"
    values = (values * (2 if doubled else 1)).astype(np.int64)
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % form.group))).reshape(len(values), -1, form.group)
    sums = np.zeros((len(rows), len(values)), np.float32)
    with np.errstate(invalid="ignore"):
        for group in range(values.shape[1]):
            dots = (wholes[:, group] @ values[:, group].T).astype(np.float32)
            scale = row_scales[:, group, None]
            sums = fused(dots, (scale * np.float32(0.5) if doubled else scale) * scales[:, group], sums)
            if minima is not None:
                total = scale * wholes[:, group].sum(1, dtype=np.int64)[:, None].astype(np.float32)
                sums = fused(-minima[:, group].numpy(), total, sums)
    return sums

"""Quantization of plain weights at load by our own kernels: the same bits as ``quantization.quantize``, much sooner."""

from __future__ import annotations

import ctypes

import torch

from swarm.stage import native
from swarm.stage.quantization import quantize as reference
from swarm.stage.quantization.formats import WeightFormat
from swarm.stage.quantization.tensors import QuantizedTensor

_PIECE = 1 << 22  # weights that are converted at a time, if the kernel can't read their dtype


class _Job(ctypes.Structure):
    """Weights to quantize: ``SwarmQuantization`` of kernels.h."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "rows", "inputs", "group")),
        *((name, ctypes.c_void_p) for name in ("values", "grid", "trials")),
        ("num_trials", ctypes.c_int64),
        ("step", ctypes.c_float),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    ]


def quantize(weights: torch.Tensor, form: WeightFormat) -> QuantizedTensor:
    """Return plain weights ``[..., outputs, inputs]`` as codes and scales, in one of the formats of ``own_format``."""
    library = native.library()
    if library is None:
        return reference.quantize(weights, form)
    inputs, num_groups = weights.shape[-1], -(-weights.shape[-1] // form.group)
    rows = weights.reshape(-1, inputs)
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    scales = torch.empty(len(rows), num_groups, dtype=torch.float16)
    grid = reference.make_grid(form)
    trials = torch.tensor(grid.trials)
    num_rows = len(rows) if rows.dtype in native.KINDS else max(1, _PIECE // inputs)
    for first in range(0, len(rows), max(1, num_rows)):
        some = rows[first : first + num_rows].contiguous()
        if some.dtype not in native.KINDS:
            some = some.float()
        job = _Job(
            some.data_ptr(),
            native.KINDS[some.dtype],
            len(some),
            inputs,
            form.group,
            grid.values.data_ptr(),
            grid.codes.data_ptr(),
            trials.data_ptr(),
            len(trials),
            grid.step,
            codes[first:].data_ptr(),
            scales[first:].data_ptr(),
        )
        library.swarm_quantize(ctypes.byref(job), torch.get_num_threads())
    return QuantizedTensor(form, codes.view(weights.shape), scales.view(*weights.shape[:-1], num_groups))

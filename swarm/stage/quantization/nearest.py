"""Quantization of weights to any format, each to the nearest code: for self-checks and tests, which have no file.

Scales and minima cover each group's range. They are encoded first, and the codes are chosen for the encoded ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from swarm.stage.quantization.formats import NUM_BITS, SUPER_GROUP, Codes, Minima, Scales, WeightFormat
from swarm.stage.quantization.tensors import QuantizedTensor, code_values, group_minima, group_scales

_DTYPES = {Scales.FLOAT16: torch.float16, Scales.BFLOAT16: torch.bfloat16, Scales.FLOAT32: torch.float32}
_MOST = 63  # largest multiple of a super-group's number: six bits, as in GGUF


def quantize_nearest(weights: torch.Tensor, form: WeightFormat) -> QuantizedTensor:
    """Return weights ``[..., outputs, inputs]`` in this format."""
    inputs = weights.shape[-1]
    groups = _split(weights.float(), form.group)
    values = code_values(form)[: 1 << NUM_BITS[form.codes]].nan_to_num(0.0)
    lowest, highest = float(values.min()), float(values.max())
    tensor = QuantizedTensor(form, torch.zeros(weights.shape, dtype=torch.uint8), torch.empty(0))
    if form.minima is Minima.NONE:
        tensor = _with_scales(tensor, groups.abs().amax(-1) / min(highest, -lowest))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        tensor = _with_scales(tensor, (high - low) / (highest - lowest))
        tensor = _with_minima(tensor, group_scales(tensor) * lowest - low)
    minima, scales = group_minima(tensor), group_scales(tensor).unsqueeze(-1)
    raised = groups if minima is None else groups + minima.unsqueeze(-1)
    codes = _nearest_codes(torch.where(scales == 0, 0.0, raised / scales), form, values)
    return replace(tensor, codes=codes.flatten(-2)[..., :inputs].contiguous())


def _split(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return numbers ``[..., inputs]`` as ``[..., groups, size]``, with 0 where the last group is not full."""
    padded = functional.pad(numbers, (0, -numbers.shape[-1] % size))
    return padded.view(*numbers.shape[:-1], -1, size)


def _with_scales(tensor: QuantizedTensor, wanted: torch.Tensor) -> QuantizedTensor:
    if tensor.format.scales is not Scales.NESTED:
        return replace(tensor, scales=wanted.to(_DTYPES[tensor.format.scales]))
    scales, multiples = _nest(wanted, tensor.format.group)
    return replace(tensor, scales=scales, group_scales=multiples.to(torch.int8))


def _with_minima(tensor: QuantizedTensor, wanted: torch.Tensor) -> QuantizedTensor:
    form = tensor.format
    if form.minima is Minima.FLOAT16:
        return replace(tensor, minima=wanted.half())
    if form.minima is Minima.NESTED:
        minima, multiples = _nest(wanted.clamp(min=0), form.group)
        return replace(tensor, minima=minima, group_minima=multiples.to(torch.uint8))
    scales = group_scales(tensor)
    points = torch.where(scales == 0, 0.0, wanted / scales).round() + form.offset
    return replace(tensor, minima=points.clamp(0, (1 << NUM_BITS[form.codes]) - 1).to(torch.uint8))


def _nest(wanted: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers ``[..., groups]`` as one float16 for each super-group, and a multiple of it for each group."""
    together = _split(wanted, SUPER_GROUP // group)
    units = (together.amax(-1) / _MOST).half()
    wide = units.float().unsqueeze(-1)
    multiples = torch.where(wide == 0, 0.0, together / wide).round().clamp(0, _MOST)
    return units, multiples.flatten(-2)[..., : wanted.shape[-1]].contiguous()


def _nearest_codes(wanted: torch.Tensor, form: WeightFormat, values: torch.Tensor) -> torch.Tensor:
    if form.codes is Codes.FP8:
        return wanted.clamp(values.min(), values.max()).to(torch.float8_e4m3fn).view(torch.uint8)
    if form.table:
        return (wanted.unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8)
    return (wanted + form.offset).round().clamp(0, len(values) - 1).to(torch.uint8)

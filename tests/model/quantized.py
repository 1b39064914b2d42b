"""Quantized weights for tests: random or structured numbers in every format that the kernels have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from swarm.stage.quantization.formats import GROUPS, SUPER_GROUP, Codes, Minima, Scales, WeightFormat
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight

# E2M1, the codes of MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
COUNTS = {Codes.INT4: 16, Codes.INT5: 32, Codes.INT6: 64, Codes.INT8: 256, Codes.FP8: 256}
_SCALE_DTYPES = {Scales.FLOAT16: torch.float16, Scales.BFLOAT16: torch.bfloat16, Scales.FLOAT32: torch.float32}


def weight_format(
    codes: Codes, scales: Scales, minima: Minima, group: int, table: tuple[float, ...] = ()
) -> WeightFormat:
    offset = 0 if table or codes is Codes.FP8 or minima in (Minima.FLOAT16, Minima.NESTED) else COUNTS[codes] // 2
    return WeightFormat(f"{codes} {scales} {minima} {group}", codes, group, scales, minima, offset, table)


def all_formats() -> list[WeightFormat]:
    """Every kind of codes with every encoding of scales and minima, and every size of a group."""
    kinds = list(itertools.product(Codes, Scales, Minima))
    found = [weight_format(*kind, GROUPS[at % 4]) for at, kind in enumerate(kinds)]
    found += [weight_format(codes, Scales.FLOAT16, Minima.FLOAT16, group) for codes in Codes for group in GROUPS]
    found.append(weight_format(Codes.INT4, Scales.FLOAT32, Minima.NONE, 32, E2M1))
    return list({(each.name, each.table): each for each in found}.values())


def random_tensor(form: WeightFormat, *shape: int, seed: int = 1, ordered: bool = False) -> QuantizedTensor:
    """Return a matrix of random codes, and scales that make its weights about 1."""
    chance = torch.Generator().manual_seed(seed)
    groups, supers = -(-shape[-1] // form.group), -(-shape[-1] // SUPER_GROUP)
    codes = torch.randint(0, COUNTS[form.codes], shape, generator=chance, dtype=torch.int32).to(torch.uint8)
    if form.codes is Codes.FP8:
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # not NaN
    most = {Codes.INT4: 8, Codes.INT5: 16, Codes.INT6: 32, Codes.INT8: 128, Codes.FP8: 448}[form.codes]

    def positive(columns: int, most: float) -> torch.Tensor:
        return (torch.rand(*shape[:-1], columns, generator=chance) + 0.2) / most

    tensor = QuantizedTensor(form, codes, torch.empty(0))
    if form.scales is Scales.NESTED:
        multiples = torch.randint(-128, 128, (*shape[:-1], groups), generator=chance, dtype=torch.int32).to(torch.int8)
        tensor = replace(tensor, scales=positive(supers, 64 * most).half(), group_scales=multiples)
    else:
        signs = torch.where(torch.rand(*shape[:-1], groups, generator=chance) < 0.5, -1.0, 1.0)
        tensor = replace(tensor, scales=(positive(groups, most) * signs).to(_SCALE_DTYPES[form.scales]))
    if form.minima is Minima.FLOAT16:
        tensor = replace(tensor, minima=positive(groups, 1.0).half())
    elif form.minima is Minima.ZERO_POINTS:
        numbers = torch.randint(0, COUNTS[form.codes], (*shape[:-1], groups), generator=chance, dtype=torch.int32)
        tensor = replace(tensor, minima=numbers.to(torch.uint8))
    elif form.minima is Minima.NESTED:
        numbers = torch.randint(0, 256, (*shape[:-1], groups), generator=chance, dtype=torch.int32).to(torch.uint8)
        tensor = replace(tensor, minima=positive(supers, 128.0).half(), group_minima=numbers)
    order = torch.randperm(shape[-1], generator=chance).to(torch.int32) if ordered else None
    return replace(tensor, order=order)


def weight_of(tensor: QuantizedTensor, key: str = "") -> QuantizedWeight:
    return QuantizedWeight(tensor.format, tensor.shape, key, lambda: tensor, "" if tensor.order is None else "order")


def exact_weights(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the weights in float64, in the order of the rows' inputs, without any rounding."""
    scaled, minima = exact_terms(tensor)
    return scaled - minima


def exact_terms(tensor: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled values of the codes, and the minima that are subtracted from them, as ``exact_weights``."""
    form, inputs = tensor.format, tensor.shape[-1]
    if form.codes is Codes.FP8:
        values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
    elif form.table:
        values = torch.tensor((*form.table, *([0.0] * 240)), dtype=torch.float64)
    else:
        values = torch.arange(256, dtype=torch.float64) - form.offset

    def each_input(numbers: torch.Tensor, group: int) -> torch.Tensor:
        return numbers.double().repeat_interleave(group, dim=-1)[..., :inputs]

    scales = each_input(tensor.scales, SUPER_GROUP if form.scales is Scales.NESTED else form.group)
    if tensor.group_scales is not None:
        scales = scales * each_input(tensor.group_scales, form.group)
    minima = torch.zeros_like(scales)
    if form.minima is Minima.FLOAT16:
        minima = each_input(tensor.minima, form.group)
    elif form.minima is Minima.ZERO_POINTS:
        minima = scales * (each_input(tensor.minima, form.group) - form.offset)
    elif form.minima is Minima.NESTED:
        minima = each_input(tensor.minima, SUPER_GROUP) * each_input(tensor.group_minima, form.group)
    terms = values[tensor.codes.long()] * scales, minima
    if tensor.order is None:
        return terms
    ordered = torch.empty_like(terms[0]), torch.empty_like(terms[1])
    for term, target in zip(terms, ordered, strict=True):
        target[..., tensor.order.long()] = term
    return ordered

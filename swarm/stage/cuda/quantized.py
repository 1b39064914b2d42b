"""Quantized matrices in the memory of a GPU: codes as stored, two in a byte if they have 4 bits, and their scales.

A row of 4-bit codes has blocks of 128 inputs in 64 bytes: the low halves are the first 64 inputs, the high halves the
other 64. So a byte's two codes belong to two consecutive products, and no code has to change its place. Codes of 5 and
6 bits take a byte. Weights are decoded as :meth:`QuantizedTensor.dequantize` does, with the same roundings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from swarm.stage.quantization.formats import BLOCK_INPUTS, Codes, Minima, Scales, WeightFormat
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight

# Encodings in the kernel's constants.
PLAIN, BYTES, NIBBLES = 0, 1, 2
WHOLE, TABLE, FP8 = 0, 1, 2  # codes minus an offset, codes of a table, numbers
_MINIMA = {Minima.NONE: 0, Minima.FLOAT16: 1, Minima.ZERO_POINTS: 2, Minima.NESTED: 3}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantized matrix ``[outputs, inputs]`` on a device, or one for each expert, with the rows of all experts one
    after the other."""

    format: WeightFormat
    outputs: int  # of one expert
    inputs: int
    numbers: torch.Tensor  # the codes: uint8 [rows, bytes]
    scales: torch.Tensor  # [rows, groups], or [rows, super groups]
    minima: torch.Tensor | None
    group_scales: torch.Tensor | None  # int8 [rows, groups]
    group_minima: torch.Tensor | None  # uint8 [rows, groups]
    order: torch.Tensor | None  # int64 [inputs]: which input each column multiplies

    @property
    def num_experts(self) -> int:
        return len(self.numbers) // self.outputs

    @property
    def description(self) -> str:
        """What decides the bits of a product, beside shape and dtype."""
        form = self.format
        return f"{form.codes} {form.group} {form.scales} {form.minima} {bool(form.table)}"

    def expert(self, index: int) -> PackedMatrix:
        """Return the matrix of one expert."""

        def some(array: torch.Tensor | None) -> torch.Tensor | None:
            return None if array is None else array[index * self.outputs : (index + 1) * self.outputs]

        numbers, scales = some(self.numbers), some(self.scales)
        assert numbers is not None
        assert scales is not None
        rest = some(self.minima), some(self.group_scales), some(self.group_minima)
        return PackedMatrix(self.format, self.outputs, self.inputs, numbers, scales, *rest, self.order)

    def with_numbers(self, numbers: torch.Tensor) -> PackedMatrix:
        """Return a matrix of this kind with other codes."""
        return replace(self, numbers=numbers)

    @property
    def encoding(self) -> int:
        return NIBBLES if self.format.codes is Codes.INT4 else BYTES

    @property
    def value_kind(self) -> int:
        if self.format.codes is Codes.FP8:
            return FP8
        return TABLE if self.format.table else WHOLE

    @property
    def table(self) -> tuple[int, int]:
        """The doubled values of codes 0 to 7 and 8 to 15, a byte each; zeros without a table."""
        values = [int(2 * value) for value in self.format.table] or [0] * 16
        halves = (np.array(half, np.int8).view(np.int64) for half in (values[:8], values[8:]))
        low, high = (int(half[0]) for half in halves)
        return low, high

    @property
    def minimum_kind(self) -> int:
        return _MINIMA[self.format.minima]

    @property
    def is_nested(self) -> bool:
        return self.format.scales is Scales.NESTED


def pack(weight: QuantizedWeight, device: torch.device) -> PackedMatrix:
    """Read a weight ``[outputs, inputs]`` or ``[experts, outputs, inputs]`` and copy its numbers to the device."""
    parts = [_flatten(part) for part in weight.read_experts()]
    form, first = weight.format, parts[0]
    outputs, inputs = weight.shape[-2:]
    if any(part.shape != (outputs, inputs) for part in parts):
        raise ValueError(f"codes of shape {tuple(first.shape)} were read where {tuple(weight.shape)} was described")

    def stack(arrays: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        present = [array.to(device) for array in arrays if array is not None]
        return torch.cat(present) if present else None

    codes, scales = stack(_pack_codes(part) for part in parts), stack(part.scales for part in parts)
    assert codes is not None
    assert scales is not None
    return PackedMatrix(
        form,
        outputs,
        inputs,
        codes,
        scales,
        stack(part.minima for part in parts),
        stack(part.group_scales for part in parts),
        stack(part.group_minima for part in parts),
        None if first.order is None else first.order.long().to(device),
    )


def _flatten(part: QuantizedTensor) -> QuantizedTensor:
    return part.map_rows(lambda each: each.contiguous())


def _pack_codes(part: QuantizedTensor) -> torch.Tensor:
    """Return the codes with whole blocks of inputs; padding codes have the scale 0 or multiply a 0."""
    outputs, inputs = part.shape
    codes = torch.nn.functional.pad(part.codes, (0, -inputs % BLOCK_INPUTS))
    if part.format.codes is not Codes.INT4:
        return codes
    halves = codes.view(outputs, -1, 2, BLOCK_INPUTS // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(outputs, -1)


@triton.jit
def load_codes(codes, line, num_bytes, at, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Load bytes ``[outputs, groups, inputs of a group]`` of these lines, from byte ``at`` on."""
    group, inner = tl.arange(0, GROUPS), tl.arange(0, BLOCK // GROUPS)
    offset = at + group[:, None] * (BLOCK // GROUPS) + inner[None, :]
    return tl.load(codes + (line * num_bytes)[:, None, None] + offset[None, :, :])


@triton.jit
def decode(
    codes,
    line,
    at,
    scales,
    minima,
    group_scales,
    group_minima,
    num_groups,
    num_super,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMA: tl.constexpr,
    NESTED: tl.constexpr,
    VALUES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the weights ``[outputs, BLOCK]`` of codes ``[outputs, groups, inputs of a group]``; ``at`` is the block's
    first input. float32."""
    if VALUES == 0:
        values = codes.to(tl.float32) - OFFSET
    if VALUES == 1:  # a table in memory would take the place of weights that are on their way
        place = (codes & 7).to(tl.int64) * 8
        values = (tl.where(codes < 8, LOW, HIGH) >> place).to(tl.int8).to(tl.float32) * 0.5
    if VALUES == 2:
        size = (codes & 127).to(tl.int32)
        values = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        values = tl.where(size < 8, size.to(tl.float32) * 0.001953125, values)  # not normal: multiples of 2 ** -9
        values = tl.where(size == 127, float("nan"), values)
        values = tl.where(codes < 128, values, -values)
    group = at // GROUP + tl.arange(0, GROUPS)
    place = (line * num_groups)[:, None] + group[None, :]
    # groups behind the last input have the scale 0
    mask = (group < num_groups)[None, :] & (line >= 0)[:, None]
    if NESTED:
        outer = line * num_super + tl.minimum(at // SUPER, num_super - 1)
        scale = tl.load(group_scales + place, mask=mask, other=0).to(tl.float32)
        scale = tl.load(scales + outer).to(tl.float32)[:, None] * scale
    else:
        scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    if MINIMA == 0:
        weights = values * scale[:, :, None]
    else:
        if MINIMA == 1:
            minimum = tl.load(minima + place, mask=mask, other=0.0).to(tl.float32)
        if MINIMA == 2:
            minimum = scale * (tl.load(minima + place, mask=mask, other=0).to(tl.float32) - OFFSET)
        if MINIMA == 3:
            outer = line * num_super + tl.minimum(at // SUPER, num_super - 1)
            minimum = tl.load(group_minima + place, mask=mask, other=0).to(tl.float32)
            minimum = tl.load(minima + outer).to(tl.float32)[:, None] * minimum
        # one rounding, as on a CPU
        weights = tl.fma(values, tl.broadcast_to(scale[:, :, None], values.shape), -minimum[:, :, None])
    return tl.reshape(weights, (OUTS, BLOCK))

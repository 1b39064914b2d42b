"""Quantization of plain weights at load, with a search for the scales.

Several scales are tried for each group of weights. A scale gives codes, and the codes give the scale that fits them
best; the trial with the least squared error wins. The group is then coded with the winner, rounded to float16.

Workers with unlike processors must get the same bits. Every number therefore comes from an operation that is exact or
that IEEE 754 rounds in one way, and sums over a group have one order: the second half is added to the first, until one
number is left. So that these operations have long rows, a piece of the matrix is transposed first: a row holds one
weight of each group.

This is the reference, and what quantizes where our kernels can't be used. ``native/quantizing`` does the same much
faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from swarm.stage.quantization.at_load import TRANSPOSED
from swarm.stage.quantization.formats import NUM_BITS, Codes, WeightFormat
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.tensors import QuantizedTensor, code_values

_PIECE = 1 << 18  # weights that are quantized at a time, so that intermediate results stay in the processor's cache
_LEAST = 2.0**-64  # a group of smaller weights becomes zeros, as it would by its float16 scale
_MIDDLE = 256  # index of the number 0 in the tables of a grid, which are twice as long

# What the largest weight of a group becomes in each trial, in steps of the format's grid.
_TRIALS = {
    Codes.INT4: (-134.0, -125.0, -116.0, 120.0, 112.0, 104.0),
    Codes.INT6: (-32.7, -32.2, -31.7, -31.2),
    Codes.INT8: (-128.0, -127.0),
}


# Quantizes plain weights in one of the formats of ``own_format``.
Quantize = Callable[[torch.Tensor, WeightFormat], QuantizedTensor]


@dataclass(frozen=True, slots=True)
class Grid:
    """A format's values as whole numbers of steps, with tables that give the nearest one to each whole number."""

    step: float  # a power of two
    values: torch.Tensor  # float32: the nearest value, in steps
    codes: torch.Tensor  # uint8: its code
    trials: tuple[float, ...]


@cache
def make_grid(form: WeightFormat) -> Grid:
    """Return the values of one of the formats of ``own_format``."""
    step = 0.5 if form.table else 1.0
    values = code_values(form)[: 1 << NUM_BITS[form.codes]] / step
    numbers = torch.arange(2 * _MIDDLE) - _MIDDLE
    codes = (numbers.unsqueeze(1) - values).abs().argmin(dim=1)
    return Grid(step, values[codes], codes.to(torch.uint8), _TRIALS[form.codes])


def quantize(weights: torch.Tensor, form: WeightFormat) -> QuantizedTensor:
    """Return plain weights ``[..., outputs, inputs]`` as codes and scales, in one of the formats of ``own_format``."""
    inputs = weights.shape[-1]
    num_groups = -(-inputs // form.group)
    rows = weights.reshape(-1, inputs)
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    scales = torch.empty(len(rows), num_groups, dtype=torch.float16)
    num_rows = min(len(rows), max(1, _PIECE // (num_groups * form.group)))
    quantizer = _Quantizer(make_grid(form), form.group, num_rows * num_groups)
    for first in range(0, len(rows), num_rows):
        some = rows[first : first + num_rows]
        if inputs % form.group:
            some = torch.nn.functional.pad(some, (0, num_groups * form.group - inputs))
        some_codes, some_scales = quantizer.quantize(some.reshape(-1, form.group))
        codes[first : first + num_rows] = some_codes.reshape(len(some), -1)[:, :inputs]
        scales[first : first + num_rows] = some_scales.view(len(some), -1)
    return QuantizedTensor(form, codes.view(weights.shape), scales.view(*weights.shape[:-1], num_groups))


def read_and_quantize(weight: StoredWeight, quantize: Quantize = quantize) -> QuantizedTensor:
    """Read a plain tensor and quantize it. Raises ``ModelError``."""
    tensor = read_tensor(weight.parts["weight"])
    return quantize(tensor.transpose(-1, -2) if weight.encoding == TRANSPOSED else tensor, weight.format)


class _Quantizer:
    """Quantizer of up to ``capacity`` groups at a time, in memory of its own.

    The arrays have a column for each group. Memory for intermediate results that came from the system each time would
    cost as much as computing them.
    """

    def __init__(self, grid: Grid, group: int, capacity: int) -> None:
        self._grid = grid
        self._weights = torch.empty(group * capacity)
        self._numbers = torch.empty(group * capacity)
        self._values = torch.empty(group * capacity)
        self._indices = torch.empty(group * capacity, dtype=torch.int32)
        self._codes = torch.empty(group * capacity, dtype=torch.uint8)

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes ``[groups, weights]`` and scales of groups; the next call overwrites the codes."""
        shape = groups.shape[1], groups.shape[0]
        weights = self._weights[: groups.numel()].view(shape).copy_(groups.t())
        high, low = weights.amax(dim=0), weights.amin(dim=0)
        largest = torch.where(high >= -low, high, low)
        is_finite = torch.isfinite(largest)
        if not bool(is_finite.all()):  # such a group gets the scale NaN, which shows in whatever it is multiplied with
            largest = torch.where(is_finite, largest, torch.zeros(()))
            weights.copy_(torch.where(is_finite, weights, torch.zeros(())))
        largest = torch.where(largest.abs() >= _LEAST, largest, torch.zeros(()))
        scales = self._search_scales(weights, largest)
        stored = torch.where(is_finite, scales / self._grid.step, torch.full((), torch.nan)).half()
        nearest = self._round(weights, _reciprocal(stored.float() * self._grid.step))
        codes = torch.index_select(self._grid.codes, 0, nearest, out=self._codes[: len(nearest)])
        return codes.view(shape).t(), stored

    def _search_scales(self, weights: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return the scale for each group that gives the least squared error, among those of the trials."""
        scales, best = torch.zeros_like(largest), torch.zeros_like(largest)
        unit = _reciprocal(largest)
        products, values = (array[: weights.numel()] for array in (self._numbers, self._values))
        for trial in self._grid.trials:
            torch.index_select(self._grid.values, 0, self._round(weights, unit * trial), out=values)
            torch.mul(values.view(weights.shape), weights, out=products.view(weights.shape))
            along = _sum_columns(products.view(weights.shape))
            length = _sum_columns(values.mul_(values).view(weights.shape))
            scale = along * _reciprocal(length)
            gain = along * scale  # what this trial's error is less than the sum of the weights' squares
            is_better = gain > best
            scales, best = torch.where(is_better, scale, scales), torch.where(is_better, gain, best)
        return scales

    def _round(self, weights: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the indices in the grid's tables of weights times their group's factor."""
        numbers, indices = self._numbers[: weights.numel()], self._indices[: weights.numel()]
        torch.mul(weights, factors, out=numbers.view(weights.shape))
        return indices.copy_(numbers.add_(_MIDDLE + 0.5).clamp_(0, 2 * _MIDDLE - 1))


def _reciprocal(numbers: torch.Tensor) -> torch.Tensor:
    """Return 1 / numbers; 0 for numbers whose reciprocal is not finite, and for NaN."""
    result = torch.ones(()) / numbers
    return torch.where(torch.isfinite(result), result, torch.zeros(()))


def _sum_columns(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of each column, whose length is a power of two. Overwrites the numbers."""
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = numbers[:half].add_(numbers[half:])
    return numbers[0].clone()

"""The numbers of quantized matrices, as tensors, and the operations that models need on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from swarm.stage.quantization.formats import SUPER_GROUP, Codes, Minima, Scales, WeightFormat


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The numbers of a quantized matrix, unpacked.

    A last group that is not full is shorter: there are ``ceil(inputs / group)`` groups. Column ``j`` of the codes
    multiplies the input ``order[j]``.
    """

    format: WeightFormat
    codes: torch.Tensor  # uint8 [..., outputs, inputs], one code per byte
    scales: torch.Tensor  # [..., outputs, groups] in the format's dtype; nested: float16 [..., outputs, super groups]
    minima: torch.Tensor | None = None  # float16 or uint8 [..., outputs, groups]; nested: float16, as the scales
    group_scales: torch.Tensor | None = None  # nested: int8 [..., outputs, groups]
    group_minima: torch.Tensor | None = None  # nested: uint8 [..., outputs, groups]
    order: torch.Tensor | None = None  # int32 [inputs], a permutation; None: the inputs' own order

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def map_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        """Return the matrix with a function applied to each of its tensors that have a row per output."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            minima=None if self.minima is None else change(self.minima),
            group_scales=None if self.group_scales is None else change(self.group_scales),
            group_minima=None if self.group_minima is None else change(self.group_minima),
        )

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights ``[..., outputs, inputs]`` in their own input order, rounded once to ``dtype``."""
        form, inputs = self.format, self.codes.shape[-1]
        values = code_values(form).to(torch.float32)[self.codes.int()]
        scales = group_scales(self)
        weights = values * _per_input(scales, form.group, inputs)
        minima = group_minima(self)
        if minima is not None:
            weights = torch.addcmul(
                -_per_input(minima, form.group, inputs), values, _per_input(scales, form.group, inputs)
            )
        if self.order is not None:
            result = torch.empty_like(weights)
            result[..., self.order.long()] = weights
            weights = result
        return weights.to(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix that is described and not read yet.

    ``key`` identifies its contents: the file's digest, the tensor's name and everything that was done to it. Two
    weights with the same key have the same bits. It is empty if the contents have no identity. ``order_key`` identifies
    the order of the inputs; it is empty for their own order.

    A weight that is made of others keeps them, so that a part of it is read alone.
    """

    format: WeightFormat
    shape: torch.Size
    key: str
    read: Callable[[], QuantizedTensor]
    order_key: str = ""
    joined: tuple[QuantizedWeight, ...] = ()  # whose outputs these are, one after the other
    experts: tuple[QuantizedWeight, ...] = ()  # one matrix each

    def read_experts(self) -> Iterator[QuantizedTensor]:
        """Read the matrices of the experts one after the other; a single matrix is one expert."""
        if self.experts:
            yield from (expert.read() for expert in self.experts)
            return
        whole = self.read()
        if whole.codes.ndim == 2:
            yield whole
            return
        for index in range(len(whole.codes)):
            yield whole.map_rows(lambda each, index=index: each[index])  # type: ignore[misc]

    def changed(
        self, how: str, shape: torch.Size, change: Callable[[QuantizedTensor], QuantizedTensor]
    ) -> QuantizedWeight:
        """Return a weight that is derived from this one by ``change``; ``how`` names the change in its key."""
        read, key = self.read, self.key and f"{self.key} {how}"
        return replace(self, shape=shape, key=key, read=lambda: change(read()), joined=(), experts=())

    def rows(self, first: int, stop: int, step: int = 1) -> QuantizedWeight:
        """Return some of the outputs: ``[first:stop:step]``."""
        if self.experts:
            return stack_experts([expert.rows(first, stop, step) for expert in self.experts])
        ends = tuple(accumulate((weight.shape[-2] for weight in self.joined), initial=0))
        if step == 1 and first < stop and first in ends and stop in ends:
            return join_rows(self.joined[ends.index(first) : ends.index(stop)])
        part = slice(first, stop, step)
        count = len(range(*part.indices(self.shape[-2])))
        shape = torch.Size((*self.shape[:-2], count, self.shape[-1]))
        return self.changed(
            f"rows {first}:{stop}:{step}", shape, lambda whole: whole.map_rows(lambda each: each[..., part, :])
        )

    def reordered(self, how: str, index: torch.Tensor) -> QuantizedWeight:
        """Return the outputs in another order: output ``i`` is ``index[i]`` of this one."""
        if self.experts:
            return stack_experts([expert.reordered(how, index) for expert in self.experts])
        return self.changed(
            how, self.shape, lambda whole: whole.map_rows(lambda rows: rows.index_select(rows.ndim - 2, index))
        )

    def expert(self, index: int) -> QuantizedWeight:
        """Return one matrix of a weight ``[experts, outputs, inputs]``."""
        if self.experts:
            return self.experts[index]
        return self.changed(f"expert {index}", self.shape[1:], lambda whole: whole.map_rows(lambda each: each[index]))


def can_join(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether these matrices can become one: they have the same format, inputs and order of inputs."""
    return len({(weight.format, weight.shape[:-2], weight.shape[-1], weight.order_key) for weight in weights}) == 1


def join_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one matrix with the outputs of all of these, which :func:`can_join`."""
    assert can_join(weights), "the caller has checked"
    first = weights[0]
    if len(weights) == 1:
        return first
    if all(weight.experts for weight in weights):
        return stack_experts([join_rows(parts) for parts in zip(*(weight.experts for weight in weights), strict=True)])
    shape = torch.Size((*first.shape[:-2], sum(weight.shape[-2] for weight in weights), first.shape[-1]))
    return replace(
        first,
        shape=shape,
        key=join_keys("rows of", weights),
        read=lambda: _combine([weight.read() for weight in weights], lambda parts: torch.cat(parts, dim=-2)),
        joined=tuple(weights),
        experts=(),
    )


def stack_experts(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight ``[experts, outputs, inputs]`` of these matrices, which :func:`can_join` and have one shape."""
    assert can_join(weights), "the caller has checked"
    first = weights[0]
    return replace(
        first,
        shape=torch.Size((len(weights), *first.shape)),
        key=join_keys("experts", weights),
        read=lambda: _combine([weight.read() for weight in weights], torch.stack),
        joined=(),
        experts=tuple(weights),
    )


def join_keys(how: str, weights: Sequence[QuantizedWeight]) -> str:
    """Return the key of something made of these weights; empty if one of them has none."""
    return f"{how} ({', '.join(weight.key for weight in weights)})" if all(weight.key for weight in weights) else ""


def _combine(
    parts: Sequence[QuantizedTensor], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> QuantizedTensor:
    def combined(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else combine(tensors)

    return replace(
        parts[0],
        codes=combine([part.codes for part in parts]),
        scales=combine([part.scales for part in parts]),
        minima=combined("minima"),
        group_scales=combined("group_scales"),
        group_minima=combined("group_minima"),
    )


def code_values(form: WeightFormat) -> torch.Tensor:
    """Return the values of all 256 codes as float32; codes that the format does not have are 0."""
    if form.codes is Codes.FP8:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.arange(256, dtype=torch.float32) - form.offset
    if form.table:
        values = torch.zeros(256)
        values[: len(form.table)] = torch.tensor(form.table)
    return values


def group_scales(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the scales as float32 ``[..., outputs, groups]``. They are exact: nested ones have at most 19 bits."""
    scales = tensor.scales.float()
    if tensor.format.scales is not Scales.NESTED:
        return scales
    assert tensor.group_scales is not None, "nested scales have it"
    return _per_group(scales, tensor.format.group, tensor.group_scales.shape[-1]) * tensor.group_scales.float()


def group_minima(tensor: QuantizedTensor) -> torch.Tensor | None:
    """Return the minima as float32 ``[..., outputs, groups]``; None if the format has none."""
    minima = tensor.minima
    if minima is None:
        return None
    if tensor.format.minima is Minima.ZERO_POINTS:
        return group_scales(tensor) * (minima.float() - tensor.format.offset)
    if tensor.format.minima is Minima.NESTED:
        assert tensor.group_minima is not None, "nested minima have it"
        return (
            _per_group(minima.float(), tensor.format.group, tensor.group_minima.shape[-1]) * tensor.group_minima.float()
        )
    return minima.float()


def _per_input(numbers: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    return numbers.repeat_interleave(group, dim=-1)[..., :inputs]


def _per_group(numbers: torch.Tensor, group: int, num_groups: int) -> torch.Tensor:
    return numbers.repeat_interleave(SUPER_GROUP // group, dim=-1)[..., :num_groups]

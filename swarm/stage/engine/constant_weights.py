"""Weights of one value, in the formats of a model's: to measure speeds before anything is loaded."""

from __future__ import annotations

import math

import torch

from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.conversion import transposed_names
from swarm.stage.model.weight_formats import WeightFormats
from swarm.stage.quantization.formats import WeightFormat, packed_bytes
from swarm.stage.quantization.nearest import quantize_nearest
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight

VALUE = 0.01  # speed does not depend on it


class ConstantSource:
    """Source of a model's weights that have one value."""

    def __init__(self, skeleton: ModelSkeleton, formats: WeightFormats) -> None:
        self._formats = formats.by_name(skeleton.parts.layers)
        self._shapes = _shapes(skeleton)

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, VALUE)

    def weight_format(self, name: str) -> WeightFormat | None:
        return self._formats.get(name)

    def quantized(self, name: str) -> QuantizedWeight | None:
        form = self._formats.get(name)
        return None if form is None else constant_weight(form, *self._shapes[name])


def constant_weight(form: WeightFormat, *shape: int) -> QuantizedWeight:
    """Return a quantized matrix, or one for each expert, of one value."""

    def read() -> QuantizedTensor:
        tensor = quantize_nearest(torch.full((1, shape[-1]), VALUE), form)
        return tensor.map_rows(lambda row: row.expand(*shape[:-1], row.shape[-1]))

    return QuantizedWeight(form, torch.Size(shape), "", read)


class WeightSizes:
    """Sizes in memory of a model's layers and of the whole model, in bytes."""

    def __init__(self, skeleton: ModelSkeleton, formats: WeightFormats) -> None:
        by_name = formats.by_name(skeleton.parts.layers)
        self._sizes = {
            name: _num_bytes(shape, by_name.get(name), skeleton.dtype) for name, shape in _shapes(skeleton).items()
        }
        self.total = sum(self._sizes.values())
        self.layers = [self._size_of(f"{skeleton.parts.layers}.{index}.") for index in range(skeleton.num_layers)]

    def _size_of(self, prefix: str) -> int:
        return sum(size for name, size in self._sizes.items() if name.startswith(prefix))


def _shapes(skeleton: ModelSkeleton) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights by name; those of experts are ``[experts, outputs, inputs]``."""
    shapes = {name: tuple(part.shape) for name, part in skeleton.model.named_parameters()}
    turned = {name: (shapes[name][0], shapes[name][2], shapes[name][1]) for name in transposed_names(skeleton.model)}
    return shapes | turned


def _num_bytes(shape: tuple[int, ...], form: WeightFormat | None, dtype: torch.dtype) -> int:
    if form is None:
        return math.prod(shape) * dtype.itemsize
    return math.prod(shape[:-2]) * packed_bytes(form, *shape[-2:])

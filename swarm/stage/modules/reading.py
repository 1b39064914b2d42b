"""Reading of a module's weights: tensors, or quantized matrices where our own kernels multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from swarm.stage.quantization.tensors import QuantizedWeight

Matrix = torch.Tensor | QuantizedWeight


def _no_quantized(name: str, like: torch.Tensor) -> QuantizedWeight | None:
    return None


@dataclass(frozen=True, slots=True)
class RowKind:
    """What the rows of a stage are: numbers of ``dtype``, rounded to int8 before quantized products if ``int8``."""

    dtype: torch.dtype
    int8: bool = False


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reader of one module's weights, under names relative to the module.

    The existing tensor, ``like``, gives a weight's shape. ``read_quantized`` returns None for weights that are not
    quantized, or are to be read as tensors.
    """

    read_tensor: Callable[[str, torch.Tensor], torch.Tensor]
    rows: RowKind  # what the module computes; tensors have its dtype
    read_quantized: Callable[[str, torch.Tensor], QuantizedWeight | None] = _no_quantized
    prefix: str = ""

    def under(self, name: str) -> WeightReader:
        """Return a reader for a part of the module."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.read_tensor(self.prefix + name, like)

    def quantized(self, name: str, like: torch.Tensor) -> QuantizedWeight | None:
        return self.read_quantized(self.prefix + name, like)

    def matrix(self, name: str, like: torch.Tensor) -> Matrix:
        quantized = self.quantized(name, like)
        return self.tensor(name, like) if quantized is None else quantized

"""Quantized matrices in a model's files: what they are, and where their parts lie. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.formats import WeightFormat, packed_bytes


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized matrix of a file, under the name that a plain checkpoint would give it.

    ``encoding`` names the decoder of its parts (``decoding``), such as "Q4_K", "gptq" or "awq".
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]  # [outputs, inputs] or [experts, outputs, inputs]
    encoding: str
    # by the part's role: "codes", "scales", "zeros", "order" and "shape", or "weight" of a plain tensor
    parts: Mapping[str, StoredTensor]
    block: tuple[int, int] = (1, 0)  # outputs and inputs that share a scale in the file; 0: all of them
    is_reordered: bool = False  # by the configuration, the groups of inputs are scattered (``desc_act``)

    @property
    def packed_bytes(self) -> int:
        """Size in memory of the packed matrix, or of all the experts' matrices."""
        return math.prod(self.shape[:-2]) * packed_bytes(self.format, *self.shape[-2:])

"""Embeddings with quantized tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import same_code
from swarm.stage.native.linears import NativeModule
from swarm.stage.native.quantized import QuantizedEmbedding


class ScaledEmbedding(NativeModule):
    """Embedding whose rows are multiplied by a number, which is rounded to their dtype."""

    def __init__(self, table: QuantizedEmbedding, scale: float) -> None:
        super().__init__()
        self.table, self._scale = table, torch.tensor(scale, dtype=table.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids)
        return rows.mul_(self._scale)


def replace_embedding(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our embedding with the same table, if that is quantized; else None."""
    is_scaled = isinstance(part, nn.Embedding) and same_code(part, Gemma3TextScaledWordEmbedding)
    if type(part) is not nn.Embedding and not is_scaled:
        return None
    weight = read.quantized("weight", part.weight)
    if weight is None:
        return None
    table = QuantizedEmbedding(weight, read.rows.dtype)
    return ScaledEmbedding(table, float(part.scalar_embed_scale)) if is_scaled else table

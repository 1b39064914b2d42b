"""Stages with adapters, and the logits of rows that name some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import LayerRange, Row
from tests.model.cutting import MANY, never, nothing

Part = tuple[int, int, Sequence[int], str]  # sequence, start, tokens, adapter
ALL = LayerRange(0, 8)


def ready(
    model: Path,
    adapters: Mapping[str, str],
    layers: LayerRange = ALL,
    dtype: str = "float32",
    quantization: Quantization = AS_STORED,
) -> TorchExecutor:
    executor = TorchExecutor(str(model), dtype=dtype, memory_limit=MANY, adapters=adapters, quantization=quantization)
    executor.prepare(layers, (), 8, nothing)
    executor.activate(layers)
    return executor


def logits(line: Sequence[TorchExecutor], *parts: Part) -> list[torch.Tensor]:
    """Logits after every token of the parts, each through a line of stages."""
    rows = tuple(Row(sequence, start, len(tokens), False) for sequence, start, tokens, _ in parts)
    tokens = np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens, _ in parts])
    names = tuple(name for *_, name in parts)
    hidden = None
    for stage in line[:-1]:
        hidden = stage.forward(Batch(rows, tokens, hidden, (), adapters=names), never, nothing).hidden
    result = line[-1].logits(Batch(rows, tokens, hidden, (), adapters=names))
    return list(torch.split(result, [row.count for row in rows]))


def alone(line: Sequence[TorchExecutor], tokens: Sequence[int], adapter: str) -> torch.Tensor:
    """Logits after every token of a sequence that no other shares a batch with."""
    for stage in line:
        stage.open(1, 128)
    (result,) = logits(line, (1, 0, tokens, adapter))
    for stage in line:
        stage.release(1)
    return result

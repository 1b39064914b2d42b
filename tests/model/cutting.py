"""Pipelines of executors without any wire between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from swarm.params import SamplingParams
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, SampleJob
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import LayerRange, Row, Sampled

LIMIT = 512
MANY = 1 << 30


def never() -> bool:
    return False


def nothing(*_: object) -> None:
    return None


def ready(
    folder: Path, layers: LayerRange, dtype: str = "float32", quantization: Quantization = AS_STORED
) -> TorchExecutor:
    executor = TorchExecutor(str(folder), dtype=dtype, memory_limit=MANY, quantization=quantization)
    executor.prepare(layers, (), 8, nothing)
    executor.activate(layers)
    return executor


class Pipeline:
    """Stages that a batch goes through, one after the other."""

    def __init__(self, stages: Sequence[TorchExecutor]) -> None:
        self.stages = stages
        for stage in stages:
            stage.reset()

    def open(self, *sequences: int, limit: int = LIMIT) -> None:
        for stage, sequence in itertools.product(self.stages, sequences):
            stage.open(sequence, limit)

    def truncate(self, sequence: int, position: int) -> None:
        for stage in self.stages:
            stage.truncate(sequence, position)

    def release(self, sequence: int) -> None:
        for stage in self.stages:
            stage.release(sequence)

    @staticmethod
    def batch(*parts: tuple[int, int, Sequence[int]], alone: bool = True) -> Batch:
        """Parts (sequence, start, tokens) for a first stage, with nothing to sample."""
        rows = tuple(Row(sequence, start, len(tokens), False) for sequence, start, tokens in parts)
        return Batch(rows, np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens in parts]), None, (), alone)

    def logits(self, *parts: tuple[int, int, Sequence[int]]) -> list[torch.Tensor]:
        """Logits after every token of the parts (sequence, start, tokens)."""
        rows = tuple(Row(sequence, start, len(tokens), False) for sequence, start, tokens in parts)
        tokens = np.concatenate([np.asarray(tokens, np.int64) for _, _, tokens in parts])
        hidden = None
        for stage in self.stages[:-1]:
            hidden = stage.forward(Batch(rows, tokens, hidden, ()), never, nothing).hidden
        result = self.stages[-1].logits(Batch(rows, tokens, hidden, ()))
        return list(torch.split(result, [row.count for row in rows]))

    def sample(self, sequence: int, history: Sequence[int], start: int, params: SamplingParams, seed: int) -> Sampled:
        """Feed ``history`` from ``start`` on and draw what follows it."""
        tokens = np.asarray(history[start:], np.int64)
        rows = (Row(sequence, start, len(tokens), True),)
        hidden = None
        for stage in self.stages:
            last = stage is self.stages[-1]
            jobs = (SampleJob(0, params, seed, history, len(history)),) if last else ()
            done = stage.forward(Batch(rows, tokens, hidden, jobs), never, nothing)
            hidden = done.hidden
        return done.sampled[0]


class Cutter:
    """Makes pipelines; an executor of a range of layers is loaded once and used by one pipeline at a time."""

    def __init__(self) -> None:
        self._ready: dict[tuple[Path, str, Quantization, LayerRange], TorchExecutor] = {}

    def cut(
        self, folder: Path, lines: Sequence[int], dtype: str = "float32", quantization: Quantization = AS_STORED
    ) -> Pipeline:
        """A pipeline whose stages begin and end at these layers."""
        ranges = [LayerRange(*pair) for pair in itertools.pairwise(lines)]
        return Pipeline([self._stage(folder, dtype, quantization, layers) for layers in ranges])

    def _stage(self, folder: Path, dtype: str, quantization: Quantization, layers: LayerRange) -> TorchExecutor:
        key = (folder, dtype, quantization, layers)
        if key not in self._ready:
            self._ready[key] = ready(folder, layers, dtype, quantization)
        return self._ready[key]


def cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut the layers into this many stages."""
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def random_tokens(count: int, seed: int, vocabulary: int = 500) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

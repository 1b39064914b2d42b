"""Run a stage with all of a model's layers in this process, for benchmarks of what it computes."""

from __future__ import annotations

import time

import numpy as np

from swarm.params import SamplingParams
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch, SampleJob
from swarm.wire.messages import LayerRange, Row

MARGIN = 64  # positions of a sequence beyond those of its step


def loaded(executor: TorchExecutor, num_sequences: int = MARGIN) -> str:
    """Have an executor load all layers and serve them; return which kernels it took."""
    layers = LayerRange(0, executor.manifest.num_layers)
    prepared = executor.prepare(layers, (), num_sequences, lambda *_: None)
    executor.activate(layers)
    return prepared.kernels


def whole_stage(model: str, threads: int | None) -> TorchExecutor:
    executor = TorchExecutor(model, threads=threads or None, threads_alone=threads or None)
    loaded(executor)
    return executor


def fill(executor: TorchExecutor, num: int, context: int, count: int) -> None:
    """Open ``num`` sequences with ``context`` positions each, and room for ``count`` more."""
    executor.reset()
    executor.open(0, context + count + MARGIN)
    if context:
        step(executor, 1, 0, context)
    for sequence in range(1, num):  # keys and values of its own, whatever they say
        executor.fork(sequence, 0, context, context + count + MARGIN)


def step(executor: TorchExecutor, num: int, start: int, count: int) -> float:
    """Time ``count`` positions of each sequence, with the last one's logits. The same again overwrites them."""
    batch = _batch(executor, num, start, count, drawn=False)
    began = time.perf_counter()
    executor.last_logits(batch)
    return time.perf_counter() - began


def served_step(executor: TorchExecutor, num: int, start: int, count: int) -> float:
    """Time the same as a stage does it: with a greedy token of each, and counted in its statistics."""
    batch = _batch(executor, num, start, count, drawn=True)
    began = time.perf_counter()
    executor.forward(batch, lambda: False, lambda: None)
    return time.perf_counter() - began


def _batch(executor: TorchExecutor, num: int, start: int, count: int, *, drawn: bool) -> Batch:
    rows = tuple(Row(sequence, start, count, drawn) for sequence in range(num))
    tokens = np.random.default_rng(start).integers(3, executor.manifest.vocab_size, num * count)
    seen = [3] * (start + count)  # whatever they were: greedy tokens don't depend on it
    jobs = tuple(SampleJob(row, SamplingParams(), 0, seen, 1) for row in range(num)) if drawn else ()
    return Batch(rows, tokens, None, jobs)

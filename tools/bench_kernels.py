#!/usr/bin/env python3
"""Where a stage's time goes: every kernel it can choose, the memory's own speed, and the parts of a whole step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from swarm.stage.waiting import wait_passively

wait_passively()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from swarm.stage import attention, joined, linears  # noqa: E402
from swarm.stage.executor import Batch  # noqa: E402
from swarm.stage.model import DTYPES  # noqa: E402
from swarm.stage.native import norms  # noqa: E402
from swarm.stage.torch_executor import TorchExecutor  # noqa: E402
from swarm.wire.messages import LayerRange, Row  # noqa: E402

CASES = ((1, 8, 1), (4, 8, 1), (10, 8, 1), (16, 8, 1), (16, 1000, 1), (1, 0, 128), (1, 0, 512))
ROWS = (1, 4, 12, 16, 64, 256)


def best_s(run: Callable[[], object], runs: int) -> float:
    run()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def memory_speed(runs: int) -> float:
    """Bytes per second that a sum over 256 MiB reads."""
    block = torch.ones(1 << 25, dtype=torch.int64)
    return block.nbytes / best_s(block.sum, runs)


def kernels(shape: tuple[int, int], dtype: torch.dtype, runs: int) -> Iterator[dict[str, object]]:
    """Milliseconds for one of several equal matrices in turn, so that none stays in the caches."""
    weights = [torch.randn(shape).to(dtype) for _ in range(max(2, (128 << 20) // (shape[0] * shape[1] * 2)))]
    for kind in (each for each in linears.KERNELS if each.serves(torch.device("cpu"), dtype, shape[1:])):
        modules = [kind(weight, None) for weight in weights]
        for count in ROWS:
            rows = torch.randn(count, shape[1]).to(dtype)
            spent = best_s(lambda modules=modules, rows=rows: [module(rows) for module in modules], runs)  # type: ignore[misc]
            yield {"kernel": kind.__name__, "shape": shape, "rows": count, "ms": round(spent / len(modules) * 1e3, 3)}


class Clock:
    """Time inside of functions, by kind; the innermost one counts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, kind: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.spent[kind] += spent - self._inner.pop()
                self._inner[-1] += spent

        return run


def parts(executor: TorchExecutor, num: int, context: int, count: int, runs: int) -> dict[str, object]:
    """Milliseconds per step: as a whole, and inside of its parts."""
    executor.reset()
    executor.open(0, context + count)
    if context:
        step(executor, 1, 0, context)
    for sequence in range(1, num):
        executor.fork(sequence, 0, context, context + count)
    whole = best_s(lambda: step(executor, num, context, count), runs)
    clock = Clock()
    kinds: dict[type[nn.Module], str] = {
        **dict.fromkeys(linears.KERNELS, "linears"),
        joined.RmsNorm: "norms",
        norms.NativeRmsNorm: "norms",
    }
    patches: list[Any] = [mock.patch.object(attention, "attend_rows", clock.timed("attention", attention.attend_rows))]
    for kind, name in kinds.items():
        for method in ("forward", "activated", "times"):
            if hasattr(kind, method):
                patches.append(mock.patch.object(kind, method, clock.timed(name, getattr(kind, method))))
    for patch in patches:
        patch.start()
    try:
        for _ in range(runs):
            step(executor, num, context, count)
    finally:
        for patch in patches:
            patch.stop()
    inside = {name: round(clock.spent[name] / runs * 1e3, 1) for name in ("linears", "attention", "norms")}
    return {"sequences": num, "context": context, "tokens_each": count, "whole_ms": round(whole * 1e3, 1), **inside}


def step(executor: TorchExecutor, num: int, start: int, count: int) -> None:
    rows = tuple(Row(sequence, start, count, False) for sequence in range(num))
    tokens = np.random.default_rng(start).integers(3, executor.manifest.vocab_size, num * count)
    executor.logits_of_last(Batch(rows, tokens, None, ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    executor = TorchExecutor(options.model, threads=options.threads, threads_alone=options.threads)
    layers = LayerRange(0, executor.manifest.num_layers)
    executor.prepare(layers, (), 64, lambda *_: None)
    executor.activate(layers)
    speed = memory_speed(options.runs)
    floor_ms = executor.weight_bytes / speed * 1e3
    hidden = executor.manifest.hidden_size
    with torch.inference_mode():
        table = list(kernels((2 * hidden, hidden), DTYPES[executor.dtype], options.runs))
    steps = [parts(executor, *case, max(2, options.runs // (1 if case[2] == 1 else 4))) for case in CASES]
    share = floor_ms / float(str(steps[0]["whole_ms"]))
    result = {"memory_gb_s": round(speed / 1e9, 1), "floor_ms": round(floor_ms, 1), "share_of_floor": round(share, 2)}
    if options.json:
        print(json.dumps(result | {"kernels": table, "steps": steps}))
        return
    for line in (result, *table, *steps):
        print("  ".join(f"{name} {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()

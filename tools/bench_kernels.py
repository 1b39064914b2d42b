#!/usr/bin/env python3
"""Measure where a stage's time goes: every kernel it can choose, the memory's own speed, the parts of a step."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import inf
from typing import Any
from unittest import mock

import torch
from bench_lib import tell_lines, wait_passively
from bench_stage import fill, step, whole_stage
from torch import nn

from swarm.stage.attention import function as attention
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.matmul import linears
from swarm.stage.model.build import DTYPES
from swarm.stage.modules import fused, norms

CASES = ((1, 8, 1), (4, 8, 1), (10, 8, 1), (16, 8, 1), (16, 1000, 1), (1, 0, 128), (1, 0, 512))
ROWS = (1, 4, 12, 16, 64, 256, 512)


def best_s(run: Callable[[], object], runs: int) -> float:
    run()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def memory_speed(runs: int) -> float:
    """Measure the bytes per second that a sum over 256 MiB reads."""
    block = torch.ones(1 << 25, dtype=torch.int64)
    return block.nbytes / best_s(block.sum, runs)


def kernels(shape: tuple[int, int], dtype: torch.dtype, runs: int) -> Iterator[dict[str, object]]:
    """Time one of several equal matrices in turn, so that none stays in the caches; kernels in turns."""
    weights = [torch.randn(shape).to(dtype) for _ in range(max(2, (128 << 20) // (shape[0] * shape[1] * 2)))]
    kinds = [each for each in linears.KERNELS if each.supports(torch.device("cpu"), dtype, shape[1:])]
    modules = {kind: [kind(weight, None) for weight in weights] for kind in kinds}
    for count in ROWS:
        rows, best = torch.randn(count, shape[1]).to(dtype), dict.fromkeys(kinds, inf)
        for _ in range(runs):
            for kind in kinds:
                spent = best_s(lambda kind=kind, rows=rows: [module(rows) for module in modules[kind]], 1)  # type: ignore[misc]
                best[kind] = min(best[kind], spent)
        for kind in kinds:
            ms = round(best[kind] / len(weights) * 1e3, 3)
            yield {"kernel": kind.__name__, "shape": shape, "rows": count, "ms": ms}


class Clock:
    """Count the time inside of functions, by kind; the innermost one counts."""

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
    """Time a step, in milliseconds: as a whole, and inside of its parts."""
    fill(executor, num, context, count)
    whole = best_s(lambda: step(executor, num, context, count), runs)
    clock = Clock()
    kinds: dict[type[nn.Module], str] = {
        **dict.fromkeys(linears.KERNELS, "linears"),
        fused.RmsNorm: "norms",
        norms.NativeRmsNorm: "norms",
    }
    patches: list[Any] = [mock.patch.object(attention, "attend_rows", clock.timed("attention", attention.attend_rows))]
    for kind, name in kinds.items():
        for method in ("forward", "apply_activated", "apply_times"):
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


def whole(options: argparse.Namespace) -> tuple[dict[str, object], list[dict[str, object]], list[dict[str, object]]]:
    """Measure the floor, the kernels for one of the model's matrices, and its steps."""
    executor = whole_stage(options.model, options.threads)
    speed = memory_speed(options.runs)
    floor_ms = executor.weight_bytes / speed * 1e3
    hidden = executor.manifest.hidden_size
    with torch.inference_mode():
        table = list(kernels((2 * hidden, hidden), DTYPES[executor.dtype], options.runs))
    steps = [parts(executor, *case, max(2, options.runs // (1 if case[2] == 1 else 4))) for case in CASES]
    share = floor_ms / float(str(steps[0]["whole_ms"]))
    facts = {"memory_gb_s": round(speed / 1e9, 1), "floor_ms": round(floor_ms, 1), "share_of_floor": round(share, 2)}
    return facts, table, steps


def product(text: str) -> tuple[int, int]:
    outputs, inputs = (int(part) for part in text.split("x"))
    return outputs, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder of a model")
    parser.add_argument(
        "--product", type=product, metavar="4096x2048", help="only a matrix of so many outputs and inputs"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of that matrix")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wait_passively()
    if (options.model is None) == (options.product is None):
        parser.error("give a model's folder, or --product")
    facts: dict[str, object] = {"dtype": options.dtype}
    steps: list[dict[str, object]] = []
    if options.model is None:
        torch.set_num_threads(options.threads or torch.get_num_threads())
        with torch.inference_mode():
            table = list(kernels(options.product, DTYPES[options.dtype], options.runs))
    else:
        facts, table, steps = whole(options)
    tell_lines("kernels", [*table, *steps], facts, as_json=options.json)


if __name__ == "__main__":
    main()

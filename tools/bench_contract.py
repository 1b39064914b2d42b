#!/usr/bin/env python3
"""What does it cost that a sequence's bits depend on nothing around it?

The same code with and without what the contract asks for (products in tiles of fixed numbers of rows, keys up to the
end of their cell), step by step in turn. Swarm's own kernels ask for neither: --torch measures torch's. Prints
milliseconds and the cost; the aim is at most 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
from swarm.stage.shell.waiting import wait_passively

wait_passively()

import numpy as np  # noqa: E402

from swarm.stage import native  # noqa: E402
from swarm.stage.attention import function as attention  # noqa: E402
from swarm.stage.attention import tiles  # noqa: E402
from swarm.stage.engine.torch_executor import TorchExecutor  # noqa: E402
from swarm.stage.executor import Batch  # noqa: E402
from swarm.stage.products import fixed  # noqa: E402
from swarm.wire.messages import LayerRange, Row  # noqa: E402

CASES = ((1, 8, 1), (4, 8, 1), (16, 8, 1), (1, 1000, 1), (16, 1000, 1), (1, 0, 128), (1, 0, 512))


@contextlib.contextmanager
def without() -> Iterator[None]:
    """No tiles of fixed numbers of rows, no key beyond the last one that is needed."""
    with (
        mock.patch.object(fixed, "in_tiles", lambda product, rows, _: product(*rows)),
        mock.patch.object(tiles, "keys_end", lambda tile: tile.start + tile.count),
        mock.patch.object(attention, "_in_tiles", lambda product, rows, others, _: product(rows, others)),
    ):
        yield


def step(executor: TorchExecutor, num: int, start: int, count: int) -> float:
    rows = tuple(Row(sequence, start, count, False) for sequence in range(num))
    tokens = np.random.default_rng(start).integers(3, executor.manifest.vocab_size, num * count)
    began = time.perf_counter()
    executor.logits_of_last(Batch(rows, tokens, None, ()))
    return (time.perf_counter() - began) * 1e3


def filled(executor: TorchExecutor, num: int, context: int, room: int) -> None:
    executor.reset()
    executor.open(0, context + room)
    if context:
        step(executor, 1, 0, context)
    for sequence in range(1, num):
        executor.fork(sequence, 0, context, context + room)


def compare(executor: TorchExecutor, num: int, context: int, count: int, runs: int) -> dict[str, float]:
    filled(executor, num, context, count + 64)
    pairs = []
    for _ in range(runs):
        ours = step(executor, num, context, count)
        with without():
            pairs.append((ours, step(executor, num, context, count)))
    best_with, best_without = (min(column) for column in zip(*pairs, strict=True))
    return {
        "sequences": num,
        "context": context,
        "tokens_each": count,
        "with_ms": round(best_with, 1),
        "without_ms": round(best_without, 1),
        "cost_percent": round(100 * (statistics.median(a / b for a, b in pairs) - 1), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--torch", action="store_true", help="torch's kernels, not Swarm's own")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.torch:
        native.do_without("--torch")
    executor = TorchExecutor(options.model, threads=options.threads, threads_alone=options.threads)
    layers = LayerRange(0, executor.manifest.num_layers)
    executor.prepare(layers, (), 64, lambda *_: None)
    executor.activate(layers)
    table = []
    for num, context, count in CASES:
        table.append(compare(executor, num, context, count, max(3, options.runs // (1 if count == 1 else 5))))
        if not options.json:
            print("  ".join(f"{name} {value}" for name, value in table[-1].items()), flush=True)
    if options.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()

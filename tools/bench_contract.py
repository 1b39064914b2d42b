#!/usr/bin/env python3
"""Measure what it costs that a sequence's bits depend on nothing around it.

The same code with and without what the contract asks for (products in tiles of fixed numbers of rows, keys up to the
end of their cell), step by step in turn. Swarm's own kernels ask for neither: --torch measures torch's. Prints
milliseconds and the cost; the aim is at most 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from unittest import mock

from bench_lib import note, tell_lines, wait_passively
from bench_stage import fill, step, whole_stage

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention import tiles
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.matmul import tiled

CASES = ((1, 8, 1), (4, 8, 1), (16, 8, 1), (1, 1000, 1), (16, 1000, 1), (1, 0, 128), (1, 0, 512))


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Compute without tiles of fixed numbers of rows, and without keys beyond the last one that is needed."""
    with (
        mock.patch.object(tiled, "multiply_in_tiles", lambda product, rows, _: product(*rows)),
        mock.patch.object(tiles, "keys_end", lambda tile: tile.start + tile.count),
        mock.patch.object(attention, "_multiply_in_tiles", lambda product, rows, others, _: product(rows, others)),
    ):
        yield


def compare(executor: TorchExecutor, num: int, context: int, count: int, runs: int) -> dict[str, object]:
    fill(executor, num, context, count)
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
        "with_ms": round(best_with * 1e3, 1),
        "without_ms": round(best_without * 1e3, 1),
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
    wait_passively()
    if options.torch:
        native.disable("--torch")
    executor, lines = whole_stage(options.model, options.threads), []
    for num, context, count in CASES:
        note(f"{num} × {count} behind {context} …")
        lines.append(compare(executor, num, context, count, max(3, options.runs // (1 if count == 1 else 5))))
    tell_lines("what the contract costs", lines, as_json=options.json)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measure what the tables of rotary positions and masks save: a step with them, and with what they hold made anew.

    cached       as a stage computes: sines and cosines looked up, who attends to what made once per step for all layers
    rope anew    the model's own module computes the step's sines and cosines, as transformers does in every step
    masks anew   every layer makes masks and groups for itself
    both anew

Swarm's own kernels need no masks; --torch measures what the table saves torch's.

One executor with all layers, in one process; single steps in turns (A B C D, D C B A, …). Ratios are medians over
neighbouring turns, above 1 where tables save time. The stage's own counters say what was found and what was made.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from bench_lib import Row, add_model_options, model_of, note, tell, turns, wait_passively
from bench_stage import fill, served_step, whole_stage

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention.passes import ForwardPass, current_pass
from swarm.stage.attention.tiles import AttentionPlan
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model.rope import RopeTable

CACHED = "cached"
CASES = {  # sequences, positions before the step, positions of it
    "1 sequence, 16 before": (1, 16, 1),
    "16 sequences, 16 before": (16, 16, 1),
    "16 sequences, 1,000 before": (16, 1000, 1),
    "a prompt of 512": (1, 0, 512),
}
COUNTERS = ("rope_hits", "rope_misses", "mask_hits", "mask_misses")


def rope_anew() -> AbstractContextManager[object]:
    def computed(
        self: RopeTable, like: torch.Tensor, position_ids: torch.Tensor, *which: object
    ) -> tuple[torch.Tensor, ...]:
        current_pass().cache_stats.rope_misses += 1
        made: tuple[torch.Tensor, ...] = self.inner(like, position_ids, *which)
        return made

    return mock.patch.object(RopeTable, "forward", computed)


def masks_anew() -> AbstractContextManager[object]:
    plain = attention._pass_groups

    def made(this: ForwardPass, window: int | None, device: torch.device) -> AttentionPlan:
        this.groups_by_reach.clear()
        return plain(this, window, device)

    return mock.patch.object(attention, "_pass_groups", made)


@contextmanager
def both_anew() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(rope_anew())
        stack.enter_context(masks_anew())
        yield


VARIANTS = {CACHED: nullcontext, "rope anew": rope_anew, "masks anew": masks_anew, "both anew": both_anew}


def measure(executor: TorchExecutor, case: str, rounds: int, counted: dict[str, dict[str, int]]) -> Row:
    """Time a step by variant, in milliseconds. Each step overwrites the last one's keys. ``counted`` is added to."""
    num, context, count = CASES[case]
    fill(executor, num, context, count)
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for name, counts in turns(VARIANTS, rounds):
        before = executor.stats()
        with VARIANTS[name]():
            spent = 1000 * served_step(executor, num, context, count)
        after = executor.stats()
        for counter in COUNTERS:
            counted[name][counter] += int(after[counter] - before[counter])
        if counts:
            samples[name].append(spent)
    return Row(case, "ms", samples, subject=CACHED)


def told(counts: dict[str, int]) -> str:
    """Tell how many were found of all that were asked for."""
    shares = []
    for what in ("rope", "mask"):
        hits, misses = counts[f"{what}_hits"], counts[f"{what}_misses"]
        share = f"{100 * hits / (hits + misses):.1f} %" if hits + misses else "not asked for"
        shares.append(f"{what} {hits:,} hits, {misses:,} misses ({share})")
    return "; ".join(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=20, help="that count; one more warms up")
    parser.add_argument("--torch", action="store_true", help="torch's kernels, not Swarm's own")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    wait_passively()
    if arguments.torch:
        native.disable("--torch")
    folder = model_of(arguments)
    executor = whole_stage(str(folder), arguments.threads)
    counted = {name: dict.fromkeys(COUNTERS, 0) for name in VARIANTS}
    rows = []
    for case in CASES:
        note(f"{case} …")
        rows.append(measure(executor, case, arguments.rounds, counted))
    facts: dict[str, object] = {name: told(counts) for name, counts in counted.items()}
    facts |= {"model": str(folder), "threads": torch.get_num_threads()}
    facts["kernels"] = native.unavailable_reason() or "Swarm's own, where the dtype allows"
    tell(rows, "tables", facts, as_json=arguments.json)


if __name__ == "__main__":
    main()

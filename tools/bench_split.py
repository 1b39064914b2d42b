#!/usr/bin/env python3
"""Compare the planned split with the even one, on workers made unequal: is the gain what was predicted?

Two swarms of two workers each, in turns: one as the plan cuts it, from what the workers measured; one with even shares,
pinned by hand. Worker ``quick`` has a core of its own, worker ``slow`` a part of another one (--way quota, by a control
group, for which one must be root), or ``quick`` has two cores and ``slow`` one (--way threads, from three cores on).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench_lib import (
    PASSIVE,
    BenchError,
    Row,
    add_model_options,
    in_turns,
    model_of,
    note,
    random_prompt,
    run,
    tell,
    vocabulary_of,
)
from bench_swarm import Processes

PERIOD_US = 10_000  # short, so that a stage is not held still for the length of several steps
WITHIN = 0.15  # of the predicted gain: what was asked for
NAMES = ("quick", "slow")


class Group:
    """A control group that limits processor time, of either version."""

    def __init__(self, name: str, share: float) -> None:
        one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
        is_one = (one / "cpu.cfs_quota_us").exists()
        self._folder = (one if is_one else two) / f"swarm-bench-{os.getpid()}-{name}"
        quota = int(share * PERIOD_US)
        try:
            self._folder.mkdir()
            if is_one:
                (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError as error:
            self.close()
            raise BenchError(f"no control group can be made here ({error}); try --way threads") from None

    def enter(self) -> None:
        """Put this process, and those that it starts, into the group."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        with suppress(OSError):
            self._folder.rmdir()


class UnequalSwarm(Processes):
    """A broker and two workers."""

    def __init__(self, model: Path, arguments: argparse.Namespace, pins: dict[str, str]) -> None:
        settings = {
            "SWARM_BROKER__MODE": "overlapped",
            "SWARM_PLAN__ROWS": str(max(1, arguments.sequences // 2)),  # each of two micro-batches has half of them
            "SWARM_PLAN__CONTEXT": str(arguments.prompt + arguments.tokens // 2),
            "SWARM_PLAN__PROMPT": str(arguments.prompt / arguments.tokens),
            "SWARM_PLAN__PINS": json.dumps(pins),
            "SWARM_PLAN__MARGIN": "10",  # what is compared must stay as it is
        }
        super().__init__(PASSIVE | settings)
        self._model, self._arguments = model, arguments
        self._group: Group | None = None

    async def begin(self) -> None:
        self.launch_broker("--min-workers", str(len(NAMES)))
        if self._arguments.way == "quota":
            self._group = Group(str(self.port), self._arguments.share)
        for name in NAMES:
            self._start_worker(name)
        await self.until_serving(len(NAMES))

    def _start_worker(self, name: str) -> None:
        by_threads = self._arguments.way == "threads"
        threads = 2 if by_threads and name == "quick" else 1
        cores = sorted(os.sched_getaffinity(0))
        own = cores[:threads] if name == "quick" else cores[-1:]
        group = self._group if name == "slow" else None

        def limited() -> None:
            os.sched_setaffinity(0, own)
            if group is not None:
                group.enter()

        self.launch_worker(name, self._model, threads, before=limited)

    async def stop(self) -> None:
        await super().stop()
        if self._group is not None:
            self._group.close()

    async def rate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Measure tokens per second of all together."""
        began = time.perf_counter()
        done = await asyncio.gather(
            *(self.client.generate(prompt, max_tokens=num_tokens, ignore_eos=True) for prompt in prompts)
        )
        return sum(len(each.tokens) for each in done) / (time.perf_counter() - began)


async def compare(model: Path, arguments: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    """Run both splits in turns; tell what the plan had said."""
    vocabulary = vocabulary_of(model)
    half = int(json.loads((model / "config.json").read_text())["num_hidden_layers"]) // 2

    def prompts() -> list[list[int]]:
        return [random_prompt(arguments.prompt, vocabulary) for _ in range(arguments.sequences)]

    async with UnequalSwarm(model, arguments, {}) as planned:
        plan: dict[str, Any] = await planned.client.query("plan")
        order = [stage["worker"] for stage in plan["stages"]]
        note(f"the plan: {_cut(plan)}")
        async with UnequalSwarm(model, arguments, _even(order, half, plan)) as even:
            note(f"even: {_cut(await even.client.query('plan'))}")
            samples = await in_turns(
                {
                    "planned": lambda: planned.rate(prompts(), arguments.tokens),
                    "even": lambda: even.rate(prompts(), arguments.tokens),
                },
                arguments.rounds,
            )
        plan = await planned.client.query("plan")
    row = Row(f"{arguments.sequences} sequences", "tokens/s", samples, baseline="even")
    return [row], _outcome(plan, samples)


def _even(order: list[str], half: int, plan: dict[str, Any]) -> dict[str, str]:
    """Pin the same workers in the same order with as many layers each."""
    num = plan["stages"][-1]["layers"][1]
    first = num - half  # the first has one more where they can't be the same
    return {order[0]: f"0-{first - 1}", order[1]: f"{first}-{num - 1}"}


def _cut(plan: dict[str, Any]) -> str:
    return ", ".join(f"{s['worker']} {s['layers'][0]}–{s['layers'][1] - 1}" for s in plan["stages"])


def _outcome(plan: dict[str, Any], samples: dict[str, list[float]]) -> dict[str, object]:
    forecast = plan["forecast"]
    predicted = forecast["even_s"] / forecast["step_s"] if forecast["even_s"] else 1.0
    measured = median(p / e for p, e in zip(samples["planned"], samples["even"], strict=True))
    stages = {s["worker"]: (s.get("expected_s"), s.get("seen_s")) for s in plan["stages"]}
    return {
        "split": _cut(plan),
        "predicted": f"{predicted:.3f}× the even split",
        "measured": f"{measured:.3f}× the even split",
        "difference": f"{measured / predicted - 1:+.1%}, asked for: within {WITHIN:.0%}",
        "is_within": abs(measured / predicted - 1) <= WITHIN,
        "tokens_per_second": f"predicted {forecast['tokens_per_second']}, measured {median(samples['planned']):.1f}",
        "stage_seconds": {name: f"expected {e:.5f}, measured {m:.5f}" for name, (e, m) in stages.items() if e and m},
    }


def way_of(wanted: str) -> str:
    """Choose a way of making workers unequal that can be gone here."""
    if wanted != "auto":
        return wanted
    return "threads" if len(os.sched_getaffinity(0)) > 2 and os.geteuid() != 0 else "quota"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--way", choices=("auto", "quota", "threads"), default="auto", help="how they are made unequal")
    parser.add_argument("--share", type=float, default=0.5, help="with quota: the slow one's part of a core")
    parser.add_argument("--sequences", type=int, default=8, help="at a time")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each split")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    arguments.way = way_of(arguments.way)
    if arguments.way == "threads" and len(os.sched_getaffinity(0)) < 3:
        raise SystemExit("bench_split: --way threads needs three cores; try --way quota as root")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("bench_split: two workers that compute at the same time need two cores")
    rows, facts = run(compare(model_of(arguments), arguments))
    facts |= {
        "way": arguments.way,
        "slow_has": f"{arguments.share:g} of a core" if arguments.way == "quota" else "1 of 3",
    }
    tell(rows, "Unequal workers: the planned split against the even one", facts, as_json=arguments.json)


if __name__ == "__main__":
    main()

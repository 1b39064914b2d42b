#!/usr/bin/env python3
"""Compare mode ``overlapped`` with mode ``batch``, or several stages with one process, every stage held to one core.

In ``batch`` one step is in flight, so one stage computes at a time; in ``overlapped`` there is one per stage. As each
stage has one core and no more in both, as it would have one machine, overlapping can win as many times as there are
stages that have a core of their own; 0.8 times that is the target, from as many sequences as there are stages. Both
swarms are loaded at once and take turns within one run (A B, B A, …); who is not on turn sleeps.

With ``--against one`` the baseline is the whole model in one process on one core, and prompts are measured too: how
much of other machines' cores the swarm makes use of. 0.85 of what there is to win is the target for decoding,
0.9 for prompts.

A worker is started bound to one core, so it counts one core and computes with one thread. Where there are more stages
than cores, workers may move between all of them afterwards, still with one thread each.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from bench_cases import Bench, Case, swarm_turn
from bench_contestants import Peers
from bench_lib import (
    BenchError,
    Row,
    add_model_options,
    in_turns,
    model_of,
    note,
    numbers,
    run,
    tell,
    vocabulary_of,
)
from bench_swarm import Processes

MODES = ("batch", "overlapped")
SEQUENCES = (1, 2, 4, 8, 16, 32)
PART = 0.8  # of what overlapping could win
ONE = "one process"
PARTS_OF_CORES = {"decode": 0.85, "prompt": 0.9}
PROMPT = 1536  # many chunks, so that each stage has one in hand


class Pinned(Processes):
    """A broker and workers in processes of their own, each worker with one core."""

    def __init__(self, model: Path, num_stages: int, mode: str) -> None:
        super().__init__()
        self._num_stages = num_stages
        self._model, self._mode = model, mode

    async def begin(self) -> None:
        options = ("--mode", self._mode, "--min-workers", str(self._num_stages))
        self.launch_broker(*options, environment={"SWARM_STATE_DIR": str(self.folder / "broker")})
        await self.launch_workers()

    async def launch_workers(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        names = [f"w{number}" for number in range(self._num_stages)]
        for number, name in enumerate(names):
            own = partial(os.sched_setaffinity, 0, {cores[number % len(cores)]})
            self.launch_worker(name, self._model, 1, {"SWARM_STATE_DIR": str(self.folder / name)}, own)
        await self.until_serving(self._num_stages)
        if self._num_stages > len(cores):
            for name in names:
                _let_move(self.processes[name].pid, set(cores))


def _let_move(pid: int, cores: set[int]) -> None:
    """Let all threads of a process use these cores from now on."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), cores)


async def against_one(
    bench: Bench,
    stages: tuple[int, ...],
    sequences: tuple[int, ...],
    make: Callable[[Path, int, str], Pinned] = Pinned,
) -> tuple[list[Row], dict[str, object]]:
    """Start the whole model in one process, and in stages, for each number of these."""
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    for num_stages in stages:
        many = f"{num_stages} stages"
        async with AsyncExitStack() as stack:
            swarms = {
                ONE: await stack.enter_async_context(make(bench.model, 1, "batch")),
                many: await stack.enter_async_context(make(bench.model, num_stages, "overlapped")),
            }
            cases = [Case(f"{many}, decode-{count}", "decode", count) for count in sequences]
            for case in [*cases, Case(f"{many}, prompt-{PROMPT}", "prompt", 1, PROMPT)]:
                note(f"{case.name} …")
                turns = {name: swarm_turn(bench, swarm.client, case) for name, swarm in swarms.items()}
                could_win = case.kind == "prompt" or case.sequences >= num_stages
                target = PARTS_OF_CORES[case.kind] * min(num_stages, cores) if could_win else None
                rows.append(Row(case.name, "tok/s", await in_turns(turns, bench.rounds), ONE, target=target))
    return rows, {"cores": cores}


async def overlap(
    bench: Bench, stages: tuple[int, ...], sequences: tuple[int, ...]
) -> tuple[list[Row], dict[str, object]]:
    """Start one swarm per mode for each number of stages; ``batch`` is the baseline."""
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    for num_stages in stages:
        async with AsyncExitStack() as stack:
            swarms = {mode: await stack.enter_async_context(Pinned(bench.model, num_stages, mode)) for mode in MODES}
            await _check_modes(swarms)
            for count in sequences:
                name = f"{num_stages} stages, {count} sequence{'s' if count > 1 else ''}"
                note(f"{name} …")
                case = Case(name, "decode", count)
                turns = {mode: swarm_turn(bench, swarm.client, case) for mode, swarm in swarms.items()}
                target = PART * min(num_stages, cores) if count >= num_stages else None
                rows.append(Row(name, "tok/s", await in_turns(turns, bench.rounds), "batch", target=target))
    return rows, {"cores": cores}


async def _check_modes(swarms: dict[str, Pinned]) -> None:
    """Check that both do what they are said to do."""
    for mode, swarm in swarms.items():
        await swarm.client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
        stats = await swarm.client.query("stats")
        found = stats["scheduler"]["mode"]  # type: ignore[index]
        if found != mode:
            raise BenchError(f"a swarm of mode {mode} works in mode {found}")


def bench_of(model: Path, arguments: argparse.Namespace) -> Bench:
    rounds, new = (1, 8) if arguments.quick else (arguments.rounds, arguments.new_tokens)
    return Bench(model, vocabulary_of(model), 0, 1, rounds, new, (), arguments.quick, Peers(model, (), 1, False, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--stages", type=numbers, default=(2, 3), metavar="N,N")
    parser.add_argument("--sequences", type=numbers, default=SEQUENCES, metavar="N,N")
    parser.add_argument("--against", choices=["batch", "one"], default="batch")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--new-tokens", type=int, default=32, help="per sequence")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens: to see whether it works")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    model = model_of(arguments)
    bench = bench_of(model, arguments)
    measured = overlap if arguments.against == "batch" else against_one
    rows, facts = run(measured(bench, arguments.stages, arguments.sequences))
    tell(rows, f"overlapped against {arguments.against}", {"model": str(model), **facts}, as_json=arguments.json)


if __name__ == "__main__":
    main()

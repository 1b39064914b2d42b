#!/usr/bin/env python3
"""Mode ``overlapped`` against mode ``batch``, with every stage held to one core.

In ``batch`` one step is in flight, so one stage computes at a time; in ``overlapped`` there is one per stage. As each
stage has one core and no more in both, as it would have one machine, overlapping can win as many times as there are
stages that have a core of their own; 0.8 times that is the target, from as many sequences as there are stages. Both
swarms are loaded at once and take turns within one run (A B, B A, …); who is not on turn sleeps.

A worker is started bound to one core, so it counts one core and computes with one thread. Where there are more stages
than cores, workers may move between all of them afterwards, still with one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bench_contestants import Peers
from bench_decode import Bench, Case, swarm_turn
from bench_lib import (
    ROOT,
    START_S,
    STOP_S,
    BenchError,
    Row,
    add_model_options,
    free_port,
    in_turns,
    model_of,
    note,
    run,
    tell,
    vocabulary_of,
)

from swarm import AsyncClient
from swarm.errors import Unavailable

MODES = ("batch", "overlapped")
SEQUENCES = (1, 2, 4, 8, 16, 32)
PART = 0.8  # of what overlapping could win


class Pinned:
    """A broker and workers in processes of their own, each worker with one core. Use it with ``async with``."""

    def __init__(self, model: Path, num_stages: int, mode: str) -> None:
        self._num_stages = num_stages
        self._directory = Path(tempfile.mkdtemp(prefix="swarm-overlap-"))
        self._port = free_port()
        self._url = f"tcp://127.0.0.1:{self._port}"
        self._model, self._mode = model, mode
        self._processes: list[subprocess.Popen[bytes]] = []
        self.client = AsyncClient(self._url, connect_timeout_s=START_S)

    async def __aenter__(self) -> Self:
        cores = sorted(os.sched_getaffinity(0))
        try:
            broker = ["broker", "--port", str(self._port), "--mode", self._mode]
            self._start("broker", [*broker, "--min-workers", str(self._num_stages)], [])
            for number in range(self._num_stages):
                worker = ["worker", "--url", self._url, "--model", str(self._model), "--name", f"w{number}"]
                pin = ["taskset", "-c", str(cores[number % len(cores)])]
                self._start(f"w{number}", [*worker, "--threads", "1"], pin)
            await self._until_serving()
            if self._num_stages > len(cores):
                for process in self._processes[1:]:
                    _let_move(process.pid, set(cores))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def _start(self, name: str, arguments: list[str], before: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "SWARM_STATE_DIR": str(self._directory / name)}
        command = [*before, sys.executable, "-P", "-m", "swarm", *arguments]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    async def _until_serving(self) -> None:
        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at and all(process.poll() is None for process in self._processes):
            with suppress(Unavailable, TimeoutError):
                status = await asyncio.wait_for(self.client.query("status"), 2.0)
                if status["state"] == "serving" and status["num_stages"] == self._num_stages:
                    return
            await asyncio.sleep(0.05)
        said = "\n".join(log.read_text(errors="replace")[-1000:] for log in sorted(self._directory.glob("*.log")))
        raise BenchError(f"the swarm with {self._num_stages} stages did not start; its processes said:\n{said}")

    async def _stop(self) -> None:
        await self.client.aclose()
        for process in reversed(self._processes):  # the workers first
            process.terminate()
        for process in self._processes:
            try:
                await asyncio.to_thread(process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _let_move(pid: int, cores: set[int]) -> None:
    """All threads of a process may use these cores from now on."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), cores)


async def overlap(
    bench: Bench, stages: tuple[int, ...], sequences: tuple[int, ...]
) -> tuple[list[Row], dict[str, object]]:
    """One swarm per mode for each number of stages; ``batch`` is the baseline."""
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
    """Both do what they are said to do."""
    for mode, swarm in swarms.items():
        await swarm.client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
        stats = await swarm.client.query("stats")
        found = stats["scheduler"]["mode"]  # type: ignore[index]
        if found != mode:
            raise BenchError(f"a swarm of mode {mode} works in mode {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--stages", type=_numbers, default=(2, 3), metavar="N,N")
    parser.add_argument("--sequences", type=_numbers, default=SEQUENCES, metavar="N,N")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--new-tokens", type=int, default=32, help="per sequence")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens: to see whether it works")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    model = model_of(arguments)
    rounds, new = (1, 8) if arguments.quick else (arguments.rounds, arguments.new_tokens)
    bench = Bench(model, vocabulary_of(model), 0, 1, rounds, new, (), arguments.quick, Peers(model, (), 1, False, ""))
    rows, facts = run(overlap(bench, arguments.stages, arguments.sequences))
    tell(rows, "overlapped against batch", {"model": str(model), **facts}, as_json=arguments.json)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()

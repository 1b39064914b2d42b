#!/usr/bin/env python3
"""Measure what ``swarm up`` takes to begin, and to replace a worker that died: this checkout and another, in turns.

``first token``: from the command to the first token of the demo model, asked for by a client that is there already.
``back``: from a worker's SIGKILL until the broker knows its replacement. ``own``: MiB that a worker has to itself.
The other checkout (``--against DIR``) is run by the same Python. With ``--rolling``: all workers of this one are
started anew, one after the other, while answers are streamed; told is the longest wait for a token, a request's first
one included, before and during it. With ``--idle``: what each process of a swarm that has nothing to do takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from bench_lib import free_port, note, tell_lines, turns

from swarm import AsyncClient, Client
from swarm.ctl.upgrade import RollingRestart
from swarm.errors import SwarmError

HERE = Path(__file__).resolve().parents[1]
WITHIN_S = 90.0
NUM_STREAMS = 4
QUIET_S = 5.0
IDLE_S = 30.0


async def one_start(checkout: Path, num_workers: int) -> dict[str, float]:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = _up(port, num_workers)
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        up = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=folder, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(WITHIN_S), AsyncClient(f"tcp://127.0.0.1:{port}") as client:
                first_s = await _first_token(client) - began
                before = await _workers(client)
                own = [psutil.Process(worker["pid"]).memory_full_info().uss / 2**20 for worker in before.values()]
                name, victim = sorted(before.items())[0]
                psutil.Process(victim["pid"]).kill()
                killed = time.perf_counter()
                while (await _workers(client)).get(name, victim)["pid"] == victim["pid"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                return {"first token": first_s, "back": time.perf_counter() - killed, "own": max(own)}
        finally:
            up.terminate()
            await up.wait()


async def one_upgrade(num_workers: int) -> dict[str, float]:
    port = free_port()
    command = _up(port, num_workers)
    with TemporaryDirectory() as folder:
        up = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.DEVNULL)
        try:
            url = f"tcp://127.0.0.1:{port}"
            async with asyncio.timeout(WITHIN_S), AsyncClient(url) as client:
                await _first_token(client)
                gaps: list[float] = []
                streams = [asyncio.create_task(_stream(client, gaps)) for _ in range(NUM_STREAMS)]
                await asyncio.sleep(QUIET_S)
                usual, num_usual = max(gaps), len(gaps)
                began = time.perf_counter()
                done = await asyncio.to_thread(lambda: list(_rolled(url)))
                took = time.perf_counter() - began
                for stream in streams:
                    stream.cancel()
                failed = [
                    each
                    for each in await asyncio.gather(*streams, return_exceptions=True)
                    if isinstance(each, SwarmError)
                ]
                return {
                    "longest gap before": usual,
                    "during": max(gaps[num_usual:]),
                    "took": took,
                    "workers": len(done),
                    "failed": len(failed),
                }
        finally:
            up.terminate()
            await up.wait()


async def one_idle(num_workers: int) -> list[dict[str, object]]:
    """Percent of a core, wake-ups a second and memory of each process, over half a minute without requests."""
    port = free_port()
    command = _up(port, num_workers)
    with TemporaryDirectory() as folder:
        up = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(WITHIN_S), AsyncClient(f"tcp://127.0.0.1:{port}") as client:
                await _first_token(client)
            await asyncio.sleep(QUIET_S)
            processes = {_called(each): each for each in (psutil.Process(up.pid), *psutil.Process(up.pid).children())}
            before = {name: _taken(each) for name, each in processes.items()}
            await asyncio.sleep(IDLE_S)
            lines: list[dict[str, object]] = []
            for name, each in processes.items():
                (cpu, wakes), (cpu_0, wakes_0), memory = _taken(each), before[name], each.memory_full_info()
                lines.append(
                    {
                        "process": name,
                        "percent of a core": round(100 * (cpu - cpu_0) / IDLE_S, 2),
                        "wake-ups a second": round((wakes - wakes_0) / IDLE_S, 1),
                        "own MiB": memory.uss >> 20,
                        "with its share MiB": memory.pss >> 20,
                    }
                )
            return lines
        finally:
            up.terminate()
            await up.wait()


def _up(port: int, num_workers: int) -> list[str]:
    """With its gateway, as everybody starts it."""
    ports = ["--port", str(port), "--http", str(free_port())]
    return [sys.executable, "-m", "swarm", "up", *ports, "--workers", str(num_workers)]


def _called(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()).split()
    if "--name" in words:
        return words[words.index("--name") + 1]
    return next((name for name in ("nursery", "broker", "gateway") if name in words), "up")


def _taken(process: psutil.Process) -> tuple[float, int]:
    """Seconds of a core and wake-ups so far, of all its threads."""
    times = process.cpu_times()
    tasks = Path(f"/proc/{process.pid}/task").glob("*/status")
    lines = [line for task in tasks for line in task.read_text().splitlines() if line.startswith("voluntary_ctxt")]
    return times.user + times.system, sum(int(line.split()[1]) for line in lines)


def _rolled(url: str) -> Iterator[Any]:
    with Client(url) as client:
        yield from RollingRestart(client).run(())


async def _stream(client: AsyncClient, gaps: list[float]) -> None:
    """Answers, one after the other. Raises SwarmError if one fails."""
    while True:
        before = time.perf_counter()
        async for _ in client.stream("Once upon a time", max_tokens=400, ignore_eos=True):
            now = time.perf_counter()
            gaps.append(now - before)
            before = now


async def _first_token(client: AsyncClient) -> float:
    while True:
        with suppress(SwarmError):
            async for _ in client.stream("Once upon a time", max_tokens=1):
                return time.perf_counter()
        await asyncio.sleep(0.02)


async def _workers(client: AsyncClient) -> dict[str, Any]:
    found: Any = await client.query("nodes")
    return {worker["name"]: worker for worker in found["workers"] if worker["state"] == "member"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--rolling", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkouts = {"this": HERE} | ({"other": arguments.against.resolve()} if arguments.against else {})
    if arguments.idle:
        tell_lines("idle", asyncio.run(one_idle(arguments.workers)), {"seconds": IDLE_S}, as_json=arguments.json)
        return
    if arguments.rolling:
        upgrades: list[dict[str, object]] = [
            {name: round(figure, 3) for name, figure in asyncio.run(one_upgrade(arguments.workers)).items()}
            for _ in range(arguments.rounds)
        ]
        tell_lines("rolling upgrade", upgrades, {"streams": NUM_STREAMS}, as_json=arguments.json)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for name, counts in turns(checkouts, arguments.rounds):
        figures = asyncio.run(one_start(checkouts[name], arguments.workers))
        note(f"{name}: " + ", ".join(f"{what} {figure:.2f}" for what, figure in figures.items()))
        if counts:
            found[name].append(figures)
    lines: list[dict[str, object]] = [
        {"checkout": name} | {what: round(median(each[what] for each in rounds), 2) for what in rounds[0]}
        for name, rounds in found.items()
    ]
    tell_lines("start", lines, {"workers": arguments.workers, "rounds": arguments.rounds}, as_json=arguments.json)


if __name__ == "__main__":
    main()

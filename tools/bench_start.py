#!/usr/bin/env python3
"""Measure what ``swarm up`` takes to begin, and to replace a worker that died: this checkout and another, in turns.

``first token``: from the command to the first token of the demo model, asked for by a client that is there already.
``back``: from a worker's SIGKILL until the broker knows its replacement. ``own``: MiB that a worker has to itself.
The other checkout (``--against DIR``) is run by the same Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from bench_lib import note, tell_lines, turns
from bench_swarm import free_port

from swarm import AsyncClient
from swarm.errors import SwarmError

HERE = Path(__file__).resolve().parents[1]
WITHIN_S = 90.0


async def one_start(checkout: Path, num_workers: int) -> dict[str, float]:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "swarm", "up", "--no-http", "--port", str(port), "--workers", str(num_workers)]
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
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkouts = {"this": HERE} | ({"other": arguments.against.resolve()} if arguments.against else {})
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

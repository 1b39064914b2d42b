"""Requests that kill whoever computes them; workers that lie; workers that leave; workers that die again and again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from swarm import RequestFailed
from tests.faults.bench import Bench

POISON = 499  # a token that no other prompt has, and that no answer happens to draw before


async def test_a_poisonous_request_is_put_aside(bench: Bench) -> None:
    """One that kills every worker on which it is computed fails after three deaths, and says why; the others that run
    beside it are answered as ever."""
    bench.swarm.faults = f"step.computes[token={POISON}]=kill"
    for name in ("w0", "w1", "w2"):
        bench.swarm.start_again(name, bench.swarm.faults)
    await bench.serving()
    keeper = asyncio.create_task(_restart_the_dead(bench))
    try:
        with pytest.raises(RequestFailed, match="quarantined"):
            await bench.client.generate([5, POISON, 6], max_tokens=20, ignore_eos=True, timeout=60.0)
    finally:
        keeper.cancel()
    bench.swarm.faults = ""
    assert len([f for f in bench.swarm.happened() if f.place == "step.computes"]) <= 3


async def _restart_the_dead(bench: Bench) -> None:
    while True:
        for name, process in list(bench.swarm.workers.items()):
            if process.poll() is not None:
                bench.swarm.start_again(name, bench.swarm.faults)
        await asyncio.sleep(0.05)


async def test_all_workers_are_drained_one_after_the_other(bench: Bench) -> None:
    """SIGTERM to each, a new one in its place: none counts as lost, and the answers are as ever."""
    before = await bench.figures()
    async with bench.under_load(warm=30):
        for name in ("w0", "w1", "w2"):
            process = bench.swarm.workers[name]
            process.terminate()
            assert await asyncio.to_thread(process.wait, 10.0) == 128 + signal.SIGTERM
            bench.swarm.start_worker(name)
            await bench.serving()
    assert (await bench.figures()).get("workers_lost", 0) == before.get("workers_lost", 0)


async def test_ten_deaths_leave_nothing_behind(bench: Bench) -> None:
    """One place, ten processes that die one after the other under load: the broker and the survivors have the same
    threads, descriptors and memory as before, but for what an allocator keeps."""
    await _crash(bench, 3)  # what is made once is made now
    before = _sizes(bench)
    await _crash(bench, 10)
    after = _sizes(bench)
    for name in ("broker", "w0", "w2"):
        threads, descriptors, memory = before[name]
        assert after[name][0] <= threads + 1
        assert after[name][1] <= descriptors + 4
        assert after[name][2] <= memory + (12 << 20)


async def _crash(bench: Bench, times: int) -> None:
    indexes = [0, 1, 4]
    for _ in range(times):
        async with bench.under_load(cases=indexes, tokens=30, warm=3):
            bench.swarm.start_again("w1")
        await bench.serving()  # so that a stage dies each time


def _sizes(bench: Bench) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name, process in (*bench.swarm.workers.items(), ("broker", bench.swarm.broker)):
        of = psutil.Process(process.pid)
        found[name] = (of.num_threads(), of.num_fds(), _own_memory(process.pid))
    return found


def _own_memory(pid: int) -> int:
    """Bytes that are not pages of files: those come and go as code is run for the first time."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

"""Processes that live and do nothing, or little: stopped, frozen, hanging, slow, without memory."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest

from tests.faults.bench import Bench, long
from tests.faults.linux import Cgroup, needs_cgroup


async def test_a_worker_is_stopped_and_wakes(bench: Bench) -> None:
    """It is out within moments, the others go on; awake again, what it still had to say harms nobody, and it joins."""
    before = await bench.figures()
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        bench.stop(bench.swarm.workers[name])
        seen = await bench.until_out(name)
        assert "no heartbeat" in seen["reason"]
        await bench.until(lambda s: s["tokens"] >= before.get("tokens", 0) + 200)
        bench.wake()
    await bench.serving()
    await bench.right()


async def test_two_workers_are_stopped_and_wake_in_the_recovery(bench: Bench) -> None:
    """The one that is left takes over, and in the middle of that the others come back: an old epoch's steps, sent after
    it ended, are not used."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        for name in names[1:]:
            bench.stop(bench.swarm.workers[name])
        await bench.until_out(names[1])
        bench.wake()
    await bench.serving()
    await bench.right()


async def test_the_broker_is_stopped_and_wakes(bench: Bench) -> None:
    """Five seconds in which it hears nobody: it blames itself alone."""
    before = await bench.figures()
    pids = {name: process.pid for name, process in bench.swarm.workers.items()}
    async with bench.under_load(warm=30):
        bench.stop(bench.swarm.broker)
        await asyncio.sleep(5.0)
        bench.wake()
    after = await bench.figures()
    assert after.get("workers_lost", 0) == before.get("workers_lost", 0)
    assert after["own_pauses"] > before.get("own_pauses", 0)
    assert {n["name"]: n["pid"] for n in await bench.nodes() if n["layers"]} == pids


READER = """
import json, sys
from swarm import Client
with Client(sys.argv[1], connect_timeout_s=60.0, reconnect_timeout_s=3.0) as client:
    tokens = []
    for piece in client.stream([3, 1, 4], max_tokens=900, ignore_eos=True, temperature=1.0, seed=9):
        tokens.append(piece.token)
        if len(tokens) == 100:
            print("reads", flush=True)
    print(json.dumps(tokens))
"""


async def test_a_client_is_stopped_and_wakes(bench: Bench) -> None:
    """For twice as long as it would wait for a silent broker: it gets every token."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, bench.swarm.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60.0) == b"reads\n"
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    out, errors = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 0, errors.decode()
    whole = await bench.client.generate([3, 1, 4], max_tokens=900, ignore_eos=True, temperature=1.0, seed=9)
    assert json.loads(out) == list(whole.tokens)


@needs_cgroup("freezer")
async def test_a_worker_is_frozen(bench: Bench) -> None:
    """As stopped, with all its threads, and with nothing that it could notice; thawed, it joins anew."""
    with Cgroup("freezer") as group:
        async with bench.under_load(warm=60):
            name = (await bench.order())[0]
            group.add(bench.swarm.workers[name].pid)
            group.set("freezer.state", "FROZEN")
            await bench.until_out(name)
        group.set("freezer.state", "THAWED")
        await bench.serving()
        await bench.right()


@pytest.mark.parametrize(
    ("place", "fault"),
    [(1, "step.computes=hang@20"), *long((-1, "step.computed=hang@20"), (0, "step.computes=hang@20"))],
)
async def test_a_computation_hangs(bench: Bench, place: int, fault: str) -> None:
    """Beats come, but the layers' counter stands still: out, with that as the evidence; nobody else is."""
    times = len(bench.struck_so_far())
    before = await bench.figures()
    name = await bench.arm(place, fault)
    lost = (await bench.figures())["workers_lost"]
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)
        seen = await bench.until_out(name)
        assert "computing" in seen["reason"]
    assert (await bench.figures())["workers_lost"] == lost + 1 > before.get("workers_lost", 0)


@pytest.mark.parametrize("place", ["loop.turn", "step.computes"])
async def test_a_stall_is_no_death(bench: Bench, place: str) -> None:
    """A control loop that is blocked for three seconds, a step that sleeps for half a second: nobody is out."""
    times = len(bench.struck_so_far())
    length, count = (3.0, 12) if place == "loop.turn" else (0.5, 30)
    await bench.arm(1, f"{place}=stall:{length}@{count}")
    lost = (await bench.figures()).get("workers_lost", 0)
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)
        await asyncio.sleep(length if place == "loop.turn" else 0)
    assert (await bench.figures()).get("workers_lost", 0) == lost


@needs_cgroup("cpu")
async def test_a_worker_becomes_ten_times_slower(bench: Bench) -> None:
    """It has a tenth of a core from now on: answers take longer, and nobody is out for that."""
    before = await bench.figures()
    with Cgroup("cpu") as group:
        group.set("cpu.cfs_period_us", 100_000)
        group.set("cpu.cfs_quota_us", 10_000)
        async with bench.under_load(warm=30):
            group.add(bench.swarm.workers[(await bench.order())[1]].pid)
    after = await bench.figures()
    assert after.get("workers_lost", 0) == before.get("workers_lost", 0)
    assert after["plans"] == before["plans"]


@needs_cgroup("memory")
async def test_a_worker_is_killed_for_its_memory(bench: Bench) -> None:
    """The kernel ends the process that takes more than its group may have: a death like others."""
    times = len(bench.struck_so_far())
    name = await bench.arm(1, "step.computes=devour:200@20")
    process = bench.swarm.workers[name]
    with Cgroup("memory") as group:
        group.set("memory.limit_in_bytes", 60 << 20)
        group.add(process.pid)
        async with bench.under_load(warm=0):
            await bench.struck(times + 1)
        assert await asyncio.to_thread(process.wait, 10.0) == -signal.SIGKILL


async def test_an_allocation_fails(bench: Bench) -> None:
    """No memory for a step: the worker drops what it can spare and does the step again. It lives, and no plan is made
    for it."""
    times = len(bench.struck_so_far())
    name = await bench.arm(1, "step.computes=memory@20")
    process = bench.swarm.workers[name]
    troubles = (await bench.figures()).get("troubles", 0)
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)
    assert (await bench.figures()).get("troubles", 0) == troubles
    assert process.poll() is None

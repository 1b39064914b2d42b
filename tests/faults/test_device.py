"""Devices that fail while they compute, and requests that make them fail: real processes, and the answers of an
undisturbed swarm."""

from __future__ import annotations

import asyncio

import pytest

from swarm import RequestFailed
from tests.faults.bench import CASES, Bench, long

BROKEN = "step.computes=raise@30+"


async def test_it_comes_back_after_a_test(bench: Bench) -> None:
    """Two steps raise, then all is well again: the worker is out, its test passes, and it is a member again, as the
    process that it was."""
    name = await bench.arm(1, "step.computes=raise@30,step.computes=raise@31")
    pid = bench.swarm.workers[name].pid
    before = await bench.figures()
    async with bench.under_load(warm=0):
        await bench.until(lambda s: s.get("workers_lost", 0) > before.get("workers_lost", 0))
        await bench.members(name)
    await bench.serving()
    node = await bench.node(name)
    assert node["pid"] == pid
    assert node["faults"] >= 1  # some may be of the processes of this name before it
    await bench.right()


@pytest.mark.parametrize("place", [*long(0), 1, *long(-1)], ids=["first", "middle", "last"])
async def test_a_worker_whose_steps_fail_for_good_is_out(bench: Bench, place: int) -> None:
    """From its thirtieth step on, whatever it computes raises, its tests too: it is out after two failures, with the
    evidence, and no request is lost or blamed for it."""
    name = await bench.arm(place, BROKEN)
    before = await bench.figures()
    async with bench.under_load(warm=0):
        node = await bench.until_out(name)
    assert node["verdict"] == "failed"
    assert "an injected fault at step.computes" in node["evidence"]
    after = await bench.figures()
    assert after["steps_failed"] - before.get("steps_failed", 0) <= 3
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1
    assert after.get("sequences_at_deaths", 0) == before.get("sequences_at_deaths", 0), "no request is to blame"
    assert after.get("sequences_failed", 0) == before.get("sequences_failed", 0)
    await bench.right()


async def test_out_of_memory_once_is_nobodys_affair(bench: Bench) -> None:
    """A step finds no memory: the worker drops what it can spare and computes it again in pieces. No new plan is made,
    and the answers have the same bits."""
    name = await bench.arm(1, "step.computes=memory@30,step.computes=memory@40")
    before = await bench.figures()
    struck = len(bench.struck_so_far())
    async with bench.under_load(warm=0):
        await bench.struck(struck + 2)
    after = await bench.figures()
    assert after["plans"] == before["plans"]
    assert after.get("steps_failed", 0) == before.get("steps_failed", 0)

    def has_told(report: dict[str, dict[str, dict[str, float]]]) -> bool:
        return report["stages"][name].get("memory_shortages", 0) == 2

    await bench.swarm.until(bench.client, "stats", has_told)


async def test_a_request_that_makes_steps_fail_ends_and_no_other_one(bench: Bench) -> None:
    """Every worker raises when it computes that token: the request ends with a reason that names the workers, others
    are answered as ever, and all workers are members again."""
    used = {token for case in CASES for token in case.prompt}
    used |= {token for answer in bench.expected.values() for tokens, _, _ in answer for token in tokens}
    poison = max(set(range(3, 500)) - used)
    for name in ("w0", "w1", "w2"):
        bench.swarm.start_again(name, f"step.computes[token={poison}]=raise@1+")
    await bench.serving()
    async with bench.under_load():
        with pytest.raises(RequestFailed, match=r"quarantined: its steps failed \d times \(on w\d, w\d"):
            await asyncio.wait_for(bench.client.generate([5, poison, 6], max_tokens=20, ignore_eos=True), 60.0)
    await bench.members("w0", "w1", "w2")
    await bench.right()

"""Processes that end in the middle: killed, aborted, by a segmentation fault; one, two, all; while they take over."""

from __future__ import annotations

import pytest

from tests.faults.bench import Bench, long


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """Without copies all that is lost is replayed, and the process dies in replays; ``test_copies`` has copies."""
    return {"SWARM_PLAN__STANDBY_KV": "none"}


@pytest.mark.parametrize("place", [0, 1, -1], ids=["first", "middle", "last"])
async def test_a_stage_is_killed_in_decode(bench: Bench, place: int) -> None:
    """Whichever stage dies: the same answers to the last bit of their logprobs; and no more work than what was lost,
    but for the first stage, for which nobody has a log of what went into it."""
    before = await bench.figures()
    async with bench.under_load(warm=120):
        bench.swarm.kill((await bench.order())[place])
    after = await bench.figures()
    assert after["workers_lost"] == before.get("workers_lost", 0) + 1


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (-1, "step.sampled=kill@20"),
        (1, "step.arrived=kill@15"),
        *long((1, "step.computes=abort@15")),
        (1, "step.computed=segfault@15"),
        (0, "step.sent=kill@15"),
        (1, "step.prefill=kill@2"),
        *long((0, "step.prefill=exit@3")),
    ],
)
async def test_an_end_at_a_place_of_a_step(bench: Bench, place: int, fault: str) -> None:
    """The last stage after drawing a token that nobody has heard of, before it computes, after it has sent, between
    two chunks of a prompt, by a signal of its own doing: what was drawn is drawn again, and is the same."""
    times = len(bench.struck_so_far())
    await bench.arm(place, fault)
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)


@pytest.mark.parametrize("places", [(0, 1), *long(((1, 2),), ((0, 2),))], ids=["first two", "last two", "both ends"])
async def test_two_stages_are_killed(bench: Bench, places: tuple[int, int]) -> None:
    """Neighbours or not: the one that is left goes on alone."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        for place in places:
            bench.swarm.kill(names[place])


async def test_all_stages_are_killed(bench: Bench) -> None:
    """Nothing is left of the answers but what the broker knows. When workers come, they go on; accepted requests waited
    for them."""
    async with bench.under_load(warm=60):
        for process in bench.swarm.workers.values():
            process.kill()  # all at once: three deaths, one after the other, would be the fault of the requests
        for name in list(bench.swarm.workers):
            bench.swarm.kill(name)
        await bench.swarm.until(bench.client, "status", lambda status: status["state"] == "waiting")
        for name in ("w0", "w1", "w2"):
            bench.swarm.start_worker(name)


@pytest.mark.parametrize(
    "fault",
    [
        "tell.hello=kill",
        *long("order.prepare=kill", "handled.prepare=kill", "load.tensor=kill"),
        "load.tensor=kill@5",
        *long("load.done=kill", "tell.prepared=kill"),
        "told.prepared=kill",
        "order.activate=kill",
        *long("handled.activate=kill", "tell.activated=kill", "told.activated=kill"),
        "replay.begins=kill",
        *long("replay.computed=kill", "replay.begins=kill@3", "tell.replaydone=kill"),
        "told.replaydone=kill@2",
        *long("replay.computed=hang", "load.tensor=memory@5"),
    ],
)
async def test_a_replacement_dies_too(bench: Bench, fault: str) -> None:
    """The process that comes in the place of a dead one dies before, at or after each thing that it says or is told,
    while it loads, while it replays. It has nothing to replay when it comes, since its layers' keys and values are
    copied to it; so a neighbour is killed, too, and it takes layers over. It may have too little to replay, since
    answers are short just then: another neighbour is killed."""
    times = len(bench.struck_so_far())
    async with bench.under_load(warm=30):
        name = (await bench.order())[1]
        bench.swarm.kill(name)
        bench.swarm.start_worker(name, faults=fault)
        for _ in range(3 if "replay" in fault else 0):
            middle = await bench.struck_or_in_the_middle(times + 1)
            if middle is None:
                break
            bench.swarm.start_again((await bench.order())[2] if middle == name else middle)
        await bench.struck(times + 1)


@pytest.mark.parametrize(
    ("killed", "place", "fault"),
    [
        (2, 1, "order.fence=kill@2"),
        *long((2, 1, "handled.fence=kill@2"), (2, 1, "order.prepare=kill"), (2, 1, "load.done=kill")),
        *long((2, 1, "told.prepared=kill")),
        (2, 1, "handled.activate=kill"),
        *long((2, 1, "order.replay=kill"), (2, 1, "handled.replay=kill")),
        *long((2, 1, "replay.begins=kill@2"), (2, 1, "replay.computed=kill")),
        (2, 1, "replay.begins=kill"),
        *long((1, 0, "replay.sent=kill"), (1, 0, "order.replay=kill")),
    ],
)
async def test_a_survivor_dies_in_the_recovery(bench: Bench, killed: int, place: int, fault: str) -> None:
    """A stage is killed, and the one before it, which sends or computes the replay, dies in the middle of that: the one
    that is left does it all alone."""
    times = len(bench.struck_so_far())
    await bench.arm(place, fault)
    async with bench.under_load(warm=60):
        bench.swarm.kill((await bench.order())[killed])
        await bench.struck(times + 1)

"""Processes die while tokens are proposed: the answers are those without proposals, to the last bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.bench import SPECULATION_VARIABLE, Answer, Bench, Swarm, ask, long


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    return {SPECULATION_VARIABLE: "suffix"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


async def _ask_before(bench: Bench) -> None:
    """Have all requests answered, so that the next ones are guessed, and others that are guessed wrongly."""
    await bench.right()
    await _leave(bench)


async def _leave(bench: Bench, **more: str) -> list[Answer]:
    """Ask for answers that begin like a known one, and leave it at a token that is forbidden."""
    [(known, _, _)] = bench.expected[0]
    new = [token for index, token in enumerate(known) if token not in known[:index]]
    forbidden = new[len(new) // 3 :: 6]
    return list(await asyncio.gather(*(ask(bench.client, 0, logit_bias={t: -100.0}, **more) for t in forbidden)))


async def test_repeated_answers_are_guessed(bench: Bench) -> None:
    """The workload of this folder leads to proposals, of which some are accepted and some refused."""
    await bench.right()
    before = await bench.figures()
    await bench.right()
    others = await _leave(bench)
    after = await bench.figures()
    proposed, accepted = (after[name] - before.get(name, 0) for name in ("proposed_tokens", "accepted_tokens"))
    assert 0 < accepted < proposed
    assert await _leave(bench, speculation="off") == others


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (0, "step.proposes=kill@4"),
        (1, "step.proposes=kill@9"),
        *long((1, "step.proposes=kill@1"), (0, "step.proposes=kill@20")),
        (-1, "step.sampled=kill@12"),
        *long((-1, "step.sent=kill@12")),
    ],
)
async def test_a_stage_is_killed_with_proposals(bench: Bench, place: int, fault: str) -> None:
    """It dies after a step with proposals, before the next one's header removes the refused ones. The survivors'
    positions of proposals count for nothing, unless they were accepted."""
    await _ask_before(bench)
    times = len(bench.struck_so_far())
    await bench.arm(place, fault)
    async with bench.under_load(warm=0):
        await bench.struck(times + 1)


@pytest.mark.parametrize(
    "fault", ["broker.proposes=kill@3", *long("broker.proposes=kill@1", "broker.proposes=kill@15")]
)
async def test_the_broker_is_killed_with_proposals_in_flight(bench: Bench, swarm: Swarm, fault: str) -> None:
    """The next broker knows nothing of them, and workers list none of their positions."""
    swarm.kill_broker()
    swarm.start_broker(3, SWARM_FAILPOINTS=fault, SWARM_FAILPOINTS_TRACE=str(swarm.trace))
    await bench.serving()
    async with bench.under_load(warm=0):
        await asyncio.wait_for(asyncio.to_thread(swarm.broker.wait), 60)
        swarm.start_broker(3)


async def test_a_stage_and_the_broker_are_killed(bench: Bench, swarm: Swarm) -> None:
    """What is left of proposals in two stages does not get into a third."""
    await _ask_before(bench)
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        swarm.kill_broker()
        swarm.kill(name)
        swarm.start_broker(3)
        swarm.start_worker(name)

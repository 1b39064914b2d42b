"""Objective auto on machines of their own: the plan follows the load, and no token is another one for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm import AsyncClient
from tests.faults.linux import why_no_namespaces
from tests.faults.machines import Machines, machines
from tests.faults.zygote import Zygote

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
# So soon that a test can wait for it; and whatever this machine measures, the better plan is worth a change.
OPTIONS = {
    "SWARM_PLAN__OBJECTIVE": "auto",
    "SWARM_PLAN__QUIET_S": "3",
    "SWARM_PLAN__MARGIN": "0",
    "SWARM_PLAN__COOLDOWN_S": "5",  # with no margin, noise alone moves layers, and each move delays the next one
}
PATIENCE_S = 240.0
NUM_TOKENS = 400


@pytest.fixture
def swarm(model: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Machines]:
    with machines(model, tmp_path, zygote, OPTIONS) as swarm:
        yield swarm


async def test_the_plan_follows_the_load(swarm: Machines) -> None:
    """In quiet, fewer than three machines serve, while an answer is under way; when many ask, more do."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
        # If the workers were slow to join, the swarm has been quiet long enough for a first plan of fewer stages.
        await swarm.until(client, "status", lambda s: s["state"] == "serving" and s["num_workers"] == 3)
        alone = asyncio.create_task(_answer(client))
        await swarm.until(client, "plan", lambda plan: plan["objective"] == "latency", PATIENCE_S)
        num_quiet = len(await _stages(client))
        expected = await alone
        many = [asyncio.create_task(_answer_again(client, expected)) for _ in range(6)]
        await swarm.until(client, "plan", lambda plan: plan["objective"] == "throughput", PATIENCE_S)
        assert num_quiet < len(await _stages(client))
        assert not any(task.done() for task in many)
        for task in many:
            task.cancel()
        assert await _answer(client) == expected


async def _stages(client: AsyncClient) -> list[object]:
    return (await client.query("plan"))["stages"]  # type: ignore[return-value]


async def _answer(client: AsyncClient) -> list[int]:
    done = await client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=7)
    return list(done.tokens)


async def _answer_again(client: AsyncClient, expected: list[int]) -> None:
    """One after the other; each is as before."""
    while await _answer(client) == expected:
        pass

"""Layers that move between real processes under load, with their keys and values."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from swarm import AsyncClient
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from swarm.wire.messages import PlanCommand
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, some_tokens, stages_of

NUM_TOKENS = 850
MEASURED = 60  # tokens of each that are drawn before the plan changes: more steps than a speed is measured from
# While a file exists, the broker pauses before each step from about then on, so that answers outlast the change.
SLOW = f"broker.dispatch=stall:0.1@{MEASURED}+"
PROMPTS = [[5 + i % 90 for i in range(first, first + 150)] for first in range(0, 84, 7)]

Change = Callable[[Processes, AsyncClient], Awaitable[None]]


async def drain(swarm: Processes, client: AsyncClient) -> None:
    """As ``swarmctl drain w1``."""
    assert (await client.steer(PlanCommand(verb="drain", worker="w1")))["state"] == "drained"
    await swarm.until(client, "nodes", lambda nodes: "w1" not in stages_of(nodes))


async def leave(swarm: Processes, client: AsyncClient) -> None:
    """As its service manager ends a worker."""
    leaving = swarm.workers.pop("w1")
    leaving.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(leaving.wait, 30) == 143


async def join(swarm: Processes, client: AsyncClient) -> None:
    """A third worker comes."""
    swarm.start_worker("w2")
    await swarm.until(client, "nodes", lambda nodes: "w2" in stages_of(nodes))


@pytest.fixture(scope="module")
def expected(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Answers of one worker."""

    async def ask(swarm: Processes) -> list[list[int]]:
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            return await asyncio.gather(*(_generate(client, prompt) for prompt in PROMPTS))

    with Processes(zygote.model, tmp_path_factory.mktemp("undisturbed"), launch=zygote) as swarm:
        swarm.start(1)
        return asyncio.run(ask(swarm))


def _are_warm(report: dict) -> bool:  # type: ignore[type-arg]
    """Whether every stage has all layers loaded: its own, and the others' as a standby."""
    held = [[node["layers"], *node["standby"]] for node in report["workers"] if node["layers"] is not None]
    num_layers = max((layers[0][1] for layers in held), default=0)
    return bool(held) and all(sum(stop - first for first, stop in layers) == num_layers for layers in held)


@pytest.mark.parametrize(("num_workers", "change"), [(3, drain), (3, leave), (2, join)])
async def test_no_position_is_computed_again(
    zygote: Zygote, tmp_path: Path, expected: list[list[int]], num_workers: int, change: Change
) -> None:
    """Under load, the plan changes while it is whole: every token is that of one undisturbed worker, and the keys and
    values of the moved layers come from their former holder. The present workers have loaded all layers before, since a
    load beside steps may take longer than the answers."""
    slow = tmp_path / "slow"
    with Processes(zygote.model, tmp_path, options={"SWARM_PLAN__STANDBY": "all"}, launch=zygote) as swarm:
        swarm.start_broker(num_workers, **{VARIABLE: SLOW, FROM_VARIABLE: str(slow)})
        for number in range(num_workers):
            swarm.start_worker(f"w{number}")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, num_workers)
            await swarm.until(client, "nodes", _are_warm)
            slow.touch()
            answers = [asyncio.create_task(_generate(client, prompt)) for prompt in PROMPTS]
            await some_tokens(swarm, client, MEASURED * len(PROMPTS))
            before = await figures(client)
            await change(swarm, client)
            slow.unlink()
            assert not any(answer.done() for answer in answers)
            assert await asyncio.gather(*answers) == expected
            after = await figures(client)
            (move,) = (await client.query("plan"))["moves"]  # type: ignore[misc]
        assert move["cause"] == {drain: "without w1", leave: "without w1", join: "with w2"}[change]
        assert move["measured"]["gain"] > 0
        assert move["measured"]["sequences"] == len(PROMPTS)
        assert 0 < move["measured"]["pause_s"] < move["measured"]["reached_s"]
        assert after.get("migrations", 0) == before.get("migrations", 0) + 1
        assert after.get("migrations_incomplete", 0) == 0
        assert after.get("replayed_positions", 0) == 0
        assert after["positions"] == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)  # each is computed once


async def _generate(client: AsyncClient, prompt: list[int]) -> list[int]:
    """Without proposals: positions of refused ones would count as computed."""
    done = await client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, speculation="off")
    return list(done.tokens)

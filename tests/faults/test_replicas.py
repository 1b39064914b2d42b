"""Workers that die while others hold copies of their keys and values: only what the copies lack is computed again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from tests.faults.bench import Swarm
from tests.faults.test_deaths import order
from tests.faults.zygote import Zygote
from tests.integration.processes import figures, some_tokens

PROMPTS = [[3 + (7 * i + j) % 400 for j in range(length)] for i, length in enumerate((200, 250, 300, 350))]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.2},
    {"temperature": 1.1, "top_k": 40, "seed": 13},
]
TOKENS = 600
# While the test waits for copies, the broker pauses before each step: the workers have little to do but copy, and a
# block is seldom finished, so that the copies become complete, however slow the machine is.
SLOW = "broker.dispatch=stall:0.2@1+"
MOST_REPLAYED = 160  # positions of a sequence: its unfinished block, those on their way, and those of the last second


async def generate(client: AsyncClient, index: int) -> list[int]:
    done = await client.generate(PROMPTS[index], max_tokens=TOKENS, ignore_eos=True, timeout=120.0, **SAMPLING[index])
    return list(done.tokens)


async def everything(client: AsyncClient) -> list[list[int]]:
    return await asyncio.gather(*(generate(client, index) for index in range(len(PROMPTS))))


@pytest.fixture(scope="module")
def expected(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Answers of one worker."""

    async def ask(swarm: Swarm) -> list[list[int]]:
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 1)
            return await everything(client)

    with Swarm(model, tmp_path_factory.mktemp("undisturbed"), zygote) as swarm:
        swarm.start(1)
        return asyncio.run(ask(swarm))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
async def test_only_what_copies_lack_is_replayed(
    model: Path, zygote: Zygote, tmp_path: Path, expected: list[list[int]], place: int
) -> None:
    """Whichever stage dies: the same tokens, from keys and values that another worker computed."""
    slow = tmp_path / "slow"
    with Swarm(model, tmp_path, zygote) as swarm:
        swarm.start_broker(3, **{VARIABLE: SLOW, FROM_VARIABLE: str(slow)})
        for number in range(3):
            swarm.start_worker(f"w{number}")
        async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
            await swarm.until_serving(client, 3)
            await swarm.until(client, "stats", lambda stats: stats["kv_copies"]["routes"] > 2)
            before = await figures(client)
            answers = asyncio.create_task(everything(client))
            await some_tokens(swarm, client, 4 * 350)
            victim = (await order(client))[place]
            slow.touch()
            await swarm.until(client, "stats", lambda stats: stats["kv_copies"]["behind"] == 0)
            assert not answers.done()
            swarm.kill(victim)
            slow.unlink()
            assert await answers == expected
            after = await figures(client)
            recoveries = (await client.query("recoveries"))["recoveries"]
    assert isinstance(recoveries, list)
    (recovery,) = recoveries
    replayed = after.get("replayed_positions", 0) - before.get("replayed_positions", 0)
    assert replayed <= len(PROMPTS) * MOST_REPLAYED
    assert recovery["copied_layer_positions"] == after["kv_copies_used_positions"]
    assert recovery["copied_layer_positions"] > 10 * recovery["layer_positions"] > 0

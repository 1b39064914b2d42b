"""A real swarm copies keys and values between its stages, and goes on from the copies when it loses one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.failpoints import FROM_VARIABLE, VARIABLE
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, some_tokens, stages_of

PROMPT = tuple(5 + n * 7 % 480 for n in range(250))
NUM_REQUESTS, TOKENS = 3, 400
WARM = 130  # tokens of each that are drawn before the loss
# While a file exists, the broker pauses before each step from about then on, so that copies catch up on any machine.
SLOW = f"broker.dispatch=stall:0.2@{WARM}+"


async def ask(client: AsyncClient) -> list[tuple[Any, ...]]:
    """Return greedy continuations of prompts that differ in their first token, with logprobs."""
    prompts = [(n + 5, *PROMPT) for n in range(NUM_REQUESTS)]
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    async with client.stream_batch(prompts, timeout=120, **options) as pieces:
        async for _ in pieces:
            pass
    assert pieces.completions is not None
    return [(choice.tokens, choice.logprobs) for done in pieces.completions for choice in done.choices]


@pytest.fixture(scope="module")
def expected(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Answers of one worker."""

    async def ask_alone(swarm: Processes) -> list[tuple[Any, ...]]:
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            return await ask(client)

    with Processes(random_llama, tmp_path_factory.mktemp("undisturbed"), launch=zygote) as swarm:
        swarm.start(1)
        return asyncio.run(ask_alone(swarm))


def _all_warm(workers: list[dict[str, Any]]) -> bool:
    """Whether each of two stages keeps the other's layers."""
    return all(worker["standby"] == [other["layers"]] for worker, other in zip(workers, workers[::-1], strict=True))


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "last"])
async def test_a_loss_costs_the_last_positions(
    random_llama: Path, zygote: Zygote, tmp_path: Path, expected: list[tuple[Any, ...]], lost: int
) -> None:
    """The survivor takes over with the copies that it holds: the same tokens and logprobs to the last bit, and the
    replay computes a few blocks of each sequence at most."""
    slow = tmp_path / "slow"
    with Processes(random_llama, tmp_path, launch=zygote, options={"SWARM_BROKER__PREFIX_CACHE": "false"}) as swarm:
        swarm.start_broker(2, **{VARIABLE: SLOW, FROM_VARIABLE: str(slow)})
        for name in ("w0", "w1"):
            swarm.start_worker(name)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            await swarm.until(client, "nodes", lambda report: _all_warm(report["workers"]))
            doomed = stages_of(await client.query("nodes"))[lost]
            slow.touch()
            answers = asyncio.create_task(ask(client))
            await some_tokens(swarm, client, NUM_REQUESTS * WARM)
            await swarm.until(client, "stats", lambda report: report["kv_copies"]["behind"] == 0)
            assert not answers.done()
            swarm.kill(doomed)
            slow.unlink()
            assert await answers == expected
            (recovery,) = (await client.query("recoveries"))["recoveries"]
            assert recovery["warm"]
            assert recovery["copied_layer_positions"] >= NUM_REQUESTS * 4 * 256
            assert recovery["layer_positions"] < NUM_REQUESTS * 4 * 128

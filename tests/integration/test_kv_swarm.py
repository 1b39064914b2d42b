"""A real swarm copies keys and values between its stages, and goes on from the copies when it loses one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, stages_of

PROMPT = tuple(5 + n * 7 % 480 for n in range(250))
NUM_REQUESTS, TOKENS = 3, 400
WARM = 130  # tokens of each that are drawn before the loss


async def ask(client: AsyncClient, on_token: Callable[[int], None] = lambda _: None) -> list[tuple[Any, ...]]:
    """Greedy continuations of prompts that differ in their first token, with logprobs. ``on_token`` is called with the
    number of tokens so far, of all of them."""
    prompts = [(n + 5, *PROMPT) for n in range(NUM_REQUESTS)]
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    num = 0
    async with client.stream_batch(prompts, timeout=120, **options) as pieces:
        async for _ in pieces:
            num += 1
            on_token(num)
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
    replay computes a few blocks of each sequence at most: the parts of fast models follow each other with a pause."""
    with Processes(random_llama, tmp_path, launch=zygote, options={"SWARM_BROKER__PREFIX_CACHE": "false"}) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            await swarm.until(client, "nodes", lambda report: _all_warm(report["workers"]))
            doomed = stages_of(await client.query("nodes"))[lost]
            got = await ask(client, lambda num: swarm.kill(doomed) if num == NUM_REQUESTS * WARM else None)
            assert got == expected
            (recovery,) = (await client.query("recoveries"))["recoveries"]
            assert recovery["warm"]
            assert recovery["copied_layer_positions"] >= NUM_REQUESTS * 4 * 256
            assert recovery["layer_positions"] < NUM_REQUESTS * 4 * 128

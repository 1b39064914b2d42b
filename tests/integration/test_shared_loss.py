"""A real swarm loses a stage while continuations of a long prompt run that fit only because they share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes, figures, stages_of

PROMPT = tuple(5 + n * 7 % 480 for n in range(790))  # 768 positions can be shared
N, TOKENS = 8, 100
MEMORY = "560MiB"
SLOW = "step.computes=stall:0.02@5+"  # so that a move takes less time than the answers
KILL_AT, LEAVE_AT = N * 40, N * 5  # tokens, of all continuations


async def ask(client: AsyncClient, on_token: Callable[[int], None] = lambda _: None) -> list[tuple[Any, ...]]:
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.9, "seed": 7, "ignore_eos": True, "logprobs": 0}
    num = 0
    async with client.stream_batch([PROMPT], n=N, timeout=120, **options) as pieces:
        async for _ in pieces:
            num += 1
            on_token(num)
    assert pieces.completions is not None
    return [(choice.tokens, choice.logprobs) for done in pieces.completions for choice in done.choices]


@pytest.fixture(scope="module")
def expected(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Answers of one worker that shares nothing."""

    async def ask_alone(swarm: Processes) -> list[tuple[Any, ...]]:
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            return await ask(client)

    options = {"SWARM_BROKER__PREFIX_CACHE": "false"}
    with Processes(random_llama, tmp_path_factory.mktemp("alone"), launch=zygote, options=options) as swarm:
        swarm.start(1)
        return asyncio.run(ask_alone(swarm))


@pytest.mark.parametrize(
    "case", list(product((0, 1, 2), ("none", "neighbours"))), ids=lambda case: f"{case[0]} {case[1]}"
)
async def test_all_continuations_stay(
    random_llama: Path, zygote: Zygote, tmp_path: Path, expected: list[tuple[Any, ...]], case: tuple[int, str]
) -> None:
    """None starts again, although less than half of them would fit alone: the same tokens and logprobs to the last
    bit. Of the layers that changed hands, the prompt is computed once at most."""
    lost, copies = case
    options = {"SWARM_PLAN__STANDBY_KV": copies, "SWARM_WORKER__KV_SHARE": "0.01"}
    with Processes(random_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start_broker(3)
        for number in range(3):
            swarm.start_worker(f"w{number}", "--memory-limit", MEMORY)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 3)
            doomed = stages_of(await client.query("nodes"))[lost]
            got = await ask(client, lambda num: swarm.kill(doomed) if num == KILL_AT else None)
            status = await client.query("status")
            counters = await figures(client)
            assert got == expected
            capacity = status["kv_capacity"] / (len(PROMPT) + TOKENS)
            assert 2.4 < capacity < 4.0
            assert counters["sequences_rebuilt"] >= 1 or copies != "none"
            assert counters["prefix_hits"] == N - 1
            assert counters.get("preemptions", 0) == 0
            assert counters.get("replayed_positions", 0) < len(PROMPT) + N * (TOKENS + 32)


async def test_all_continuations_stay_when_a_stage_is_drained(
    random_llama: Path, zygote: Zygote, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    """Copies of all of them would not fit at the new holders; what was not copied is replayed, the prompt once."""
    options = {"SWARM_PLAN__STANDBY": "all", "SWARM_WORKER__KV_SHARE": "0.01"}
    with Processes(random_llama, tmp_path, launch=zygote, options=options) as swarm:
        swarm.start_broker(3)
        for number in range(3):
            swarm.start_worker(f"w{number}", "--memory-limit", MEMORY, SWARM_FAILPOINTS=SLOW)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 3)
            await swarm.until(client, "nodes", lambda report: all(w["standby"] for w in report["workers"]))
            leaving = stages_of(await client.query("nodes"))[1]
            got = await ask(client, lambda num: swarm.workers[leaving].terminate() if num == LEAVE_AT else None)
            status = await client.query("status")
            counters = await figures(client)
            moves = (await client.query("plan"))["moves"]
            assert got == expected
            assert status["num_stages"] == 2
            assert len(moves) == 1
            assert status["kv_capacity"] < 4 * (len(PROMPT) + TOKENS)
            assert counters["prefix_hits"] == N - 1
            assert counters.get("preemptions", 0) == 0
            assert counters.get("replayed_positions", 0) < len(PROMPT) + N * (TOKENS + 32)

"""Real workers with little room for keys and values: many are computed side by side, some give way, nobody notices."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

from swarm import AsyncClient
from swarm.demo import model_path
from tests.integration.processes import Processes

NUM_SEQUENCES = 64
PROMPT = 300
TOKENS = 120
MORE_MIB = 75  # than a worker needs to start: what a plan asks for, and room for keys and values
ALONE = 4  # that are asked once more, with the stages to themselves


async def test_nobody_notices_that_room_was_short(tmp_path: Path) -> None:
    """Together they become far longer than there is room for. All are answered in full, with the tokens that each gets
    when it is alone, and in the end nothing is left behind."""
    chance = random.Random(4)
    prompts = [[chance.randrange(3, 700) for _ in range(PROMPT)] for _ in range(NUM_SEQUENCES)]
    options = {
        "SWARM_BROKER__KV_HEADROOM": "1",
        "SWARM_BROKER__PREFIX_CACHE": "false",
    }  # what is kept on purpose would hide what is left behind
    with Processes(model_path(), tmp_path, options=options) as swarm:
        swarm.start_broker()
        swarm.start_worker("w0", "--memory-limit", f"{await _least_mib(swarm) + MORE_MIB}MiB")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            capacity = (await client.query("status"))["kv_capacity"]
            assert isinstance(capacity, int)
            assert PROMPT + TOKENS < capacity < 0.7 * NUM_SEQUENCES * (PROMPT + TOKENS), capacity

            async def ask(number: int) -> tuple[int, ...]:
                answer = await client.generate(
                    prompts[number], max_tokens=TOKENS, temperature=0.8, seed=number, ignore_eos=True, timeout=240
                )
                return tuple(answer.tokens)

            together = await asyncio.gather(*map(ask, range(NUM_SEQUENCES)))
            stats = await client.query("stats")
            assert stats["scheduler"]["preemptions"] > 0  # type: ignore[index]
            assert [len(tokens) for tokens in together] == [TOKENS] * NUM_SEQUENCES
            for number in range(NUM_SEQUENCES - ALONE, NUM_SEQUENCES):  # the youngest: they gave way
                assert await ask(number) == together[number], number
            await swarm.until(client, "status", lambda s: s["num_requests"] == s["steps_in_flight"] == 0)
            await swarm.until(client, "stats", lambda s: s["stages"]["w0"].get("kv_used") == 0)


async def _least_mib(swarm: Processes) -> int:
    """The least memory with which a worker would start, as it says itself."""
    swarm.start_worker("absurd", "--memory-limit", "100MiB")
    await asyncio.to_thread(swarm.workers.pop("absurd").wait, 60)
    found = re.search(r"the minimum is (\d+) MiB", swarm.log("absurd"))
    assert found is not None, swarm.log("absurd")
    return int(found[1])

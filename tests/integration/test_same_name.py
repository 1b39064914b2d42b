"""Two processes under one worker's name, as real ones: who lives keeps it, and who replaces a dead one gets it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

NUM_TOKENS = 200


async def test_a_second_process_does_not_put_the_first_one_out(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """It is told so and ends for good, while answers go on with the first one; that one's successor is let in."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            epoch = (await client.query("status"))["epoch"]
            answer = asyncio.create_task(client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True))
            first = swarm.workers["w1"]
            swarm.start_worker("w1")
            second, swarm.workers["w1"] = swarm.workers["w1"], first
            assert await asyncio.to_thread(second.wait, 60) == 78
            assert "the name w1 is taken by a running worker" in swarm.log("w1")
            assert len((await answer).tokens) == NUM_TOKENS
            assert (await client.query("status"))["epoch"] == epoch
            (refused,) = (await client.query("nodes"))["refused"]  # type: ignore[misc]
            assert (refused["name"], refused["times"]) == ("w1", 1)

            swarm.kill("w1")
            swarm.start_worker("w1")
            await swarm.until_serving(client, 2)
            assert await swarm.until(client, "status", lambda s: s["epoch"] > epoch)

"""Workers that are asked to end, as real processes."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

NUM_TOKENS = 200


async def test_ending_workers_by_hand_is_no_requests_fault(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """A worker is ended by SIGTERM under load, and another one takes its place, again and again: no request is blamed,
    none loses anything. A worker that the broker lets go by ``swarmctl stop`` ends with another code."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start(2)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            expected = (await client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True)).tokens
            answers = asyncio.create_task(_go_on(client))
            for _ in range(2):
                await swarm.until(client, "status", lambda s: s["num_running"] > 0)
                leaving = swarm.workers.pop("w1")
                leaving.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(leaving.wait, 10) == 143
                swarm.start_worker("w1")
                await swarm.until_serving(client, 2)
            stats = await client.query("stats")
            assert stats["pipeline"].get("sequences_at_deaths", 0) == 0  # type: ignore[attr-defined]
            assert not answers.done()
            answers.cancel()
            await asyncio.wait([answers])
            assert (await client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True)).tokens == expected

            released = swarm.workers.pop("w1")
            await client.stop_worker("w1")
            assert await asyncio.to_thread(released.wait, 10) == 0


async def _go_on(client: AsyncClient) -> None:
    """Requests, one after the other; each must end well."""
    while True:
        await client.generate([5, 6, 7], max_tokens=NUM_TOKENS, ignore_eos=True)


def test_without_a_broker_a_worker_ends_at_once(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """There is nobody to take leave of."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_worker("w0")
        until = time.monotonic() + 60
        while "worker_started" not in swarm.log("w0"):
            assert time.monotonic() < until
            time.sleep(0.05)
        began = time.monotonic()
        assert swarm.stop() == [143]
        assert time.monotonic() - began < 2.5  # below the patience with a broker

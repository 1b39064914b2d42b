"""One type of weights in a swarm, whatever each worker would choose by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes


async def test_a_worker_takes_the_swarm_s_dtype(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """The model is stored in float32, so workers that may choose come with that. In a swarm of bfloat16 they take
    that one, and answers are those of a swarm that was set so throughout; a worker that may not choose ends."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker(2)
        swarm.start_worker("w0", "--dtype", "bfloat16")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until(client, "nodes", lambda nodes: len(nodes["workers"]) == 1)
            swarm.start_worker("w1")
            await swarm.until_serving(client, 2)
            mixed = (await client.generate([5, 6, 7], max_tokens=40, ignore_eos=True)).tokens
            workers = (await client.query("nodes"))["workers"]
            assert {w["name"]: w["dtype"] for w in workers} == {"w0": "bfloat16", "w1": "bfloat16"}  # type: ignore[attr-defined]

            swarm.start_worker("w2", "--dtype", "float32")
            assert await asyncio.to_thread(swarm.workers.pop("w2").wait, 30) == 78
            assert 'set worker.dtype = \\"bfloat16\\" there, or start all workers with' in swarm.log("w2")

            swarm.kill("w1")
            swarm.start_worker("w1", "--dtype", "bfloat16")
            await swarm.until_serving(client, 2)
            assert (await client.generate([5, 6, 7], max_tokens=40, ignore_eos=True)).tokens == mixed


async def test_unlike_workers_agree_on_a_dtype(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """Before the first plan: the first worker comes with the files' float32, the second one can't compute in that."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker(2)
        swarm.start_worker("w0")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until(client, "nodes", lambda nodes: len(nodes["workers"]) == 1)
            swarm.start_worker("w1", "--dtype", "bfloat16")
            await swarm.until_serving(client, 2)
            workers = (await client.query("nodes"))["workers"]
            assert {w["name"]: w["dtype"] for w in workers} == {"w0": "bfloat16", "w1": "bfloat16"}  # type: ignore[attr-defined]
            assert len((await client.generate([5, 6, 7], max_tokens=10, ignore_eos=True)).tokens) == 10


async def test_the_broker_s_dtype_counts(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """For the first worker, too."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker(1, SWARM_BROKER__DTYPE="bfloat16")
        swarm.start_worker("w0")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            (worker,) = (await client.query("nodes"))["workers"]  # type: ignore[misc]
            assert worker["dtype"] == "bfloat16"

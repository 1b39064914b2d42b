"""A swarm that quantizes its weights at load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

PROMPT = [5, 6, 7]


async def answer(client: AsyncClient) -> tuple[int, ...]:
    return tuple((await client.generate(PROMPT, max_tokens=24, ignore_eos=True)).tokens)


@pytest.mark.usefixtures("own_cache")
async def test_workers_quantize_share_the_cache_and_refuse_others(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """The second start maps what the first one packed, and gives the same tokens. A worker whose weights are quantized
    otherwise is refused, with both ways and what to set."""
    packed = tmp_path / "packed"
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker(2)
        for name in ("w0", "w1"):
            swarm.start_worker(name, "--weights", "int4")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 2)
            tokens = await answer(client)
            workers = (await client.query("nodes"))["workers"]
            assert {row["weights"] for row in workers} == {"int4, head int6, groups of 32, quantizer 1"}  # type: ignore[attr-defined]
            files = {path.name: path.stat().st_ino for path in packed.iterdir()}
            assert files

            swarm.start_worker("w2", "--weights", "int8")
            assert await asyncio.to_thread(swarm.workers.pop("w2").wait, 30) == 78
            assert "and this worker's int8, groups of 32, quantizer 1: set worker.weights (--weights)" in swarm.log(
                "w2"
            )

            swarm.kill("w1")
            swarm.start_worker("w1", "--weights", "int4")
            await swarm.until_serving(client, 2)
            assert await answer(client) == tokens
            assert files.items() <= {path.name: path.stat().st_ino for path in packed.iterdir()}.items()

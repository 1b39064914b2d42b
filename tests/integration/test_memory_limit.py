"""A worker's memory limit is for the whole process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm import AsyncClient
from tests.integration.processes import Processes

MIB = 1 << 20


async def test_what_a_worker_announces_is_what_the_limit_leaves(random_llama: Path, tmp_path: Path) -> None:
    """Of 1 GiB, the process itself takes its part and the log an eighth: only the rest is offered for weights and KV.
    A limit that leaves nothing ends the worker with one line and the code that means: never."""
    with Processes(random_llama, tmp_path) as swarm:
        swarm.start_broker()
        swarm.start_worker("w0", "--memory-limit", "1GiB")
        swarm.start_worker("absurd", "--memory-limit", "100MiB")
        assert await asyncio.to_thread(swarm.workers.pop("absurd").wait, 60) == 78
        (line,) = [line for line in swarm.log("absurd").splitlines() if line.startswith("swarm: ")]
        assert "a memory limit of 100 MiB is too small" in line
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            (worker,) = (await client.query("nodes"))["workers"]  # type: ignore[misc]
            stats = await swarm.until(client, "stats", lambda s: "resident_bytes" in s["stages"]["w0"])
    base = 1024 * MIB - 128 * MIB - worker["memory_bytes"]
    assert 150 * MIB < base < 700 * MIB
    assert stats["stages"]["w0"]["resident_bytes"] < stats["stages"]["w0"]["limit_bytes"] == 1024 * MIB

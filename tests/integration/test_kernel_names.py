"""What multiplies on a worker can be seen from outside."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from swarm import AsyncClient
from swarm.ctl import render
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes


async def test_nodes_and_plan_name_the_kernels(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """As the worker said when it had loaded: kernels, dtype, exact or not; in both reports and in their tables."""
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker()
        swarm.start_worker("w0")
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            nodes, plan = await client.query("nodes"), await client.query("plan")
    (worker,), (stage,) = nodes["workers"], plan["stages"]  # type: ignore[misc]
    assert worker["kernels"] == stage["kernels"]
    assert worker["kernels"].startswith("linears ")
    assert worker["kernels"].endswith(f"{worker['dtype']}, exact")
    for table in (render.nodes(nodes), render.plan(plan)):
        console = Console(width=300)
        with console.capture() as captured:
            console.print(table)
        assert worker["kernels"] in captured.get()

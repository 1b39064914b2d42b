"""Machines of their own, and ways between them of unlike rate: what was measured is in the plan, and comes true."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.bench import MODE_VARIABLE, WAIT_S, Answers, Bench
from tests.faults.linux import call, why_no_namespaces
from tests.faults.machines import WORKERS, Machines, at
from tests.faults.zygote import Zygote
from tests.integration.hosts import Host, network

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
SLOW = "w1"
ROWS, TOKENS = 32, 60


@pytest.fixture
def swarm(model: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Machines]:
    """One of three workers is behind a wire of 1 Mb/s. No two of them can hold the model."""
    caps = '{"w0": 3, "w1": 3, "w2": 3}'
    load = {"SWARM_PLAN__ROWS": str(ROWS), "SWARM_PLAN__PROMPT": "0", "SWARM_PLAN__CONTEXT": "32"}
    options = {MODE_VARIABLE: "batch", "SWARM_PLAN__CAPS": caps} | load
    with network(tmp_path / "hosts", "a", *WORKERS, "laptop") as hosts:
        _narrow(hosts[SLOW])
        with Machines(model, tmp_path, zygote, hosts, options=options, is_apart=True) as swarm:
            swarm.start(3)
            swarm.let_in("laptop")
            with at(hosts["laptop"]):
                yield swarm


def _narrow(host: Host) -> None:
    shape = ("tbf", "rate", "1mbit", "burst", "1600", "latency", "9s")
    call(*host.command("tc", "qdisc", "add", "dev", "eth0", "root", *shape))


async def test_the_slow_link_carries_one_cut(swarm: Machines, expected: Answers) -> None:
    """Its owner is first, so that only one hop crosses its wire; and hops take what was said, within a quarter."""
    async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await swarm.until_serving(client, 3)
        plan: Any = await client.query("plan")
        assert plan["stages"][0]["worker"] == SLOW
        told = [stage["hop_s"] for stage in plan["forecast"]["stages"]]
        assert told[0] > 4 * sum(told[1:])
        prompt = [3, 1, 4]
        await asyncio.gather(
            *(
                client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=seed, timeout=WAIT_S)
                for seed in range(ROWS)
            )
        )
        after: Any = await client.query("plan")
        assert after["epoch"] == plan["epoch"]
        assert after["measured"]["outside_s"] == pytest.approx(sum(told), rel=0.25)
        await bench.right([0])

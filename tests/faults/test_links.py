"""Machines of their own, with ways of unlike rate and delay between them: what was measured is in the plan, and comes
true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from tests.faults.bench import MODE_VARIABLE, WAIT_S, Answers, Bench
from tests.faults.linux import call, why_no_namespaces
from tests.faults.machines import WORKERS, Machines, at
from tests.faults.router import far_away
from tests.faults.zygote import Zygote
from tests.integration.hosts import Host, network

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
SLOW = "w1"
ROWS, TOKENS = 32, 60
NUM_RIGHT = 20  # tokens of an answer that is compared: over these links, a whole one takes half a minute
# One way. The tolerances below are a part of it: large enough that computing on a busy machine stays within them.
FAR_S, NUM_FAR_TOKENS = 0.15, 30


@contextmanager
def unlike(
    model: Path, zygote: Zygote, folder: Path, rows: int, worsen: Callable[[Host], AbstractContextManager[None]]
) -> Iterator[Machines]:
    """The way to one of three workers is unlike the others. No two of them can hold the model."""
    caps = '{"w0": 3, "w1": 3, "w2": 3}'
    load = {"SWARM_PLAN__ROWS": str(rows), "SWARM_PLAN__PROMPT": "0", "SWARM_PLAN__CONTEXT": "32"}
    options = {MODE_VARIABLE: "batch", "SWARM_PLAN__CAPS": caps} | load
    with ExitStack() as stack:
        hosts = stack.enter_context(network(folder / "hosts", "a", *WORKERS, "laptop"))
        stack.enter_context(worsen(hosts[SLOW]))
        swarm = stack.enter_context(Machines(model, folder, zygote, hosts, options=options))
        swarm.start(3)
        swarm.let_in("laptop")
        stack.enter_context(at(hosts["laptop"]))
        yield swarm


@contextmanager
def narrow(host: Host) -> Iterator[None]:
    """A wire of 1 Mb/s, both ways."""
    shape = ("tbf", "rate", "1mbit", "burst", "1600", "latency", "9s")
    call(*host.command("tc", "qdisc", "add", "dev", "eth0", "root", *shape))
    other_end = f"p{host.address.rpartition('.')[2]}"
    call("ip", "netns", "exec", host.bridge, "tc", "qdisc", "add", "dev", other_end, "root", *shape)
    yield


@pytest.fixture
def narrowed(model: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Machines]:
    with unlike(model, zygote, tmp_path, ROWS, narrow) as swarm:
        yield swarm


@pytest.fixture
def stretched(model: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Machines]:
    with unlike(model, zygote, tmp_path, 1, partial(far_away, delay_s=FAR_S)) as swarm:
        yield swarm


async def measured(swarm: Machines, client: AsyncClient, rows: int, tokens: int) -> tuple[Any, Any]:
    """The plan as it was predicted, and what its steps took."""
    await swarm.until_serving(client, 3)
    plan: Any = await client.query("plan")
    prompt = [3, 1, 4]
    await asyncio.gather(
        *(
            client.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=seed, timeout=WAIT_S)
            for seed in range(rows)
        )
    )
    after: Any = await client.query("plan")
    assert after["epoch"] == plan["epoch"]
    return plan, after["measured"]


async def test_the_slow_link_carries_one_cut(narrowed: Machines, expected: Answers) -> None:
    """Its owner is first or last, so that only one hop crosses its wire; hops take what was said, within a quarter."""
    async with AsyncClient(narrowed.url, connect_timeout_s=60.0) as client:
        plan, took = await measured(narrowed, client, ROWS, TOKENS)
        place = [stage["worker"] for stage in plan["stages"]].index(SLOW)
        told = [stage["hop_s"] for stage in plan["forecast"]["stages"]]
        assert place in (0, 2)
        slow = told[0] if place == 0 else told[1]
        assert slow > 4 * (sum(told) - slow)
        assert took["outside_s"] == pytest.approx(sum(told), rel=0.25)
        async with Bench(narrowed, client, expected).under_load(cases=[0], warm=0, tokens=NUM_RIGHT):
            pass


async def test_a_link_that_takes_long_is_in_the_step(stretched: Machines, expected: Answers) -> None:
    """Wherever its owner is, a step crosses it twice; a whole step takes what was said, within a quarter."""
    async with AsyncClient(stretched.url, connect_timeout_s=60.0) as client:
        plan, took = await measured(stretched, client, 1, NUM_FAR_TOKENS)
        told = plan["forecast"]
        ways = told["broker_s"] + sum(stage["hop_s"] for stage in told["stages"])
        assert ways == pytest.approx(2 * FAR_S, rel=0.2)
        assert took["step_s"] == pytest.approx(told["step_s"], rel=0.25)
        async with Bench(stretched, client, expected).under_load(cases=[0], warm=0, tokens=NUM_RIGHT):
            pass

"""Connections that break, in a network of our own: packets dropped one way or both, lost, refused; a link that flaps.

All processes are on one loopback device, so a worker's packets are told by the group it runs as, by its data port and
by the ports that it has open when the rules are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from swarm import AsyncClient
from tests.faults.bench import Answers, Bench, Swarm, long
from tests.faults.linux import Firewall, call, own_network, why_no_namespaces
from tests.faults.zygote import GROUP_VARIABLE, Zygote

_WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
GROUPS = {"w0": 60_001, "w1": 60_002, "w2": 60_003}


class Cables(Swarm):
    """A swarm whose workers run as groups of their own."""

    def start_worker(self, name: str, *more: str, faults: str = "", **environment: str) -> None:
        super().start_worker(name, *more, faults=faults, **environment, **{GROUP_VARIABLE: str(GROUPS[name])})


@pytest.fixture(scope="module")
def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with own_network(), Zygote(model) as zygote, Cables(model, tmp_path_factory.mktemp("network"), zygote) as swarm:
        swarm.start(3)
        yield swarm


@pytest.fixture
def firewall() -> Iterator[Firewall]:
    firewall = Firewall()
    yield firewall
    firewall.clear()


@pytest_asyncio.fixture
async def bench(expected: Answers, swarm: Swarm, firewall: Firewall) -> AsyncIterator[Bench]:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.make_well()
        yield bench
        firewall.clear()
        await bench.make_well()


def ports(swarm: Swarm, name: str) -> tuple[set[int], set[int]]:
    """The ports on which a process listens, and its own ends of the connections that it has made."""
    process = swarm.broker if name == "broker" else swarm.workers[name]
    connections = psutil.Process(process.pid).net_connections(kind="tcp")
    listens = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return listens, {c.laddr.port for c in connections if c.status != psutil.CONN_LISTEN} - listens


def _set(found: set[int]) -> str:
    return "{ " + ", ".join(map(str, sorted(found))) + " }"


def from_worker(swarm: Swarm, name: str, how: str = "drop", to: set[int] | None = None) -> list[str]:
    """Rules on what this worker sends (to these ports only): on the connections that it made or took, also when it has
    ended (then its last packets belong to no group), and on those that it makes later."""
    listens, made = ports(swarm, name)
    only = f" tcp dport {_set(to)}" if to else ""
    return [f"meta skgid {GROUPS[name]}{only} {how}", f"tcp sport {_set(listens | made)}{only} {how}"]


def to_worker(swarm: Swarm, name: str, how: str = "drop", of: set[int] | None = None) -> list[str]:
    """Rules on what is sent to this worker (from these ports only)."""
    listens, made = ports(swarm, name)
    only = f" tcp sport {_set(of)}" if of else ""
    return [f"tcp dport {_set(listens | made)}{only} {how}"]


@pytest.mark.parametrize("way", ["both", *long("from it"), "to it"])
async def test_a_worker_is_cut_off(bench: Bench, firewall: Firewall, way: str) -> None:
    """From everybody, in both directions or in one: if its beats don't come it is out within moments; whatever it still
    says once the network is whole harms nobody, and it joins anew."""
    async with bench.under_load(warm=40):
        name = (await bench.order())[1]
        rules = from_worker(bench.swarm, name) if way != "to it" else []
        firewall.set([*rules, *(to_worker(bench.swarm, name) if way != "from it" else [])])
        if way != "to it":
            await bench.until_out(name)
    firewall.clear()
    await bench.serving()
    await bench.right()


async def test_a_worker_is_cut_off_from_the_broker_alone(bench: Bench, firewall: Firewall) -> None:
    """Its neighbours still reach it: there is one plan all the same, and it isn't in it."""
    async with bench.under_load(warm=40):
        name = (await bench.order())[1]
        listens, made = ports(bench.swarm, "broker")
        firewall.set(
            [
                *from_worker(bench.swarm, name, to=listens | made),
                *to_worker(bench.swarm, name, of=listens | made),
            ]
        )
        await bench.until_out(name)
        assert name not in await bench.order()
    firewall.clear()
    await bench.serving()
    await bench.right()


async def test_a_worker_s_connections_are_reset(bench: Bench, firewall: Firewall) -> None:
    """Whatever it has under way is refused with a reset: its connections break in the middle of messages."""
    async with bench.under_load(warm=40):
        name = (await bench.order())[1]
        listens, _ = ports(bench.swarm, name)
        firewall.set([f"meta l4proto tcp tcp dport {_set(listens)} reject with tcp reset"])
        await asyncio.sleep(0.5)
        firewall.clear()
    await bench.serving()


@pytest.mark.parametrize("percent", [*long(1, 10), 5])
async def test_packets_are_lost(bench: Bench, firewall: Firewall, percent: int) -> None:
    """TCP sends them again: slower, and nothing else."""
    firewall.set([f"numgen random mod 100 < {percent} drop"])
    await bench.right([0, 1, 4])


async def test_a_link_flaps(bench: Bench) -> None:
    """Down and up each half second: all are cut off at once, and nobody is better off without the others."""
    async with bench.under_load(warm=20):
        for _ in range(4):
            call("ip", "link", "set", "lo", "down")
            await asyncio.sleep(0.4)
            call("ip", "link", "set", "lo", "up")
            await asyncio.sleep(0.5)
    await bench.serving()


async def test_a_narrow_link(bench: Bench) -> None:
    """10 Mb/s for all together: answers take longer, and nobody is out for it."""
    before = await bench.figures()
    call("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "10mbit", "burst", "32k", "latency", "400ms")
    try:
        await bench.right([0, 1, 4])
    finally:
        call("tc", "qdisc", "del", "dev", "lo", "root")
    assert (await bench.figures()).get("workers_lost", 0) == before.get("workers_lost", 0)


async def test_a_worker_dies_unheard(bench: Bench, firewall: Firewall) -> None:
    """Its machine is gone from one moment to the next, and no end of a connection is ever told: the beats tell."""
    async with bench.under_load(warm=40):
        name = (await bench.order())[-1]
        firewall.set([*from_worker(bench.swarm, name), *to_worker(bench.swarm, name)])
        process = bench.swarm.workers[name]
        process.kill()
        seen = await bench.until_out(name)
        assert "no heartbeat" in seen["reason"]
    firewall.clear()

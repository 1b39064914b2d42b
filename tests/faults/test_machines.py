"""Machines with an address each, keys, and several steps in flight: cut off from each other in every way, gone and
back, moved, behind a router, started again. Answers are those of three workers on one machine, to the last bit.

One swarm for all; the faults of processes follow those of the network. (``FAULTS_ON=hosts pytest tests/faults`` runs
every other test of a fault so, see ``docs/explanation/faults.md``.)
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient
from swarm.auth import memberships
from swarm.auth.access import BrokerCredentials, credentials_for
from swarm.ctl.inspect.diagnostics import Reports, diagnose
from swarm.errors import Unavailable
from tests.faults.bench import MODE_VARIABLE, Answers, Bench, ask, long
from tests.faults.linux import call, why_no_namespaces
from tests.faults.machines import Machines, machines
from tests.faults.zygote import Zygote
from tests.integration.hosts import Host

_WHY_NOT = why_no_namespaces()
MOVED = "10.77.0.99"
NOBODY_ALONE = '{"w0": 5, "w1": 5, "w2": 5, "x0": 5}'  # of eight layers: two are always needed, and enough
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")


@pytest.fixture(scope="module")
def swarm(model: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    options = {MODE_VARIABLE: "overlapped", "SWARM_PLAN__CAPS": NOBODY_ALONE}
    with machines(model, folder, zygote, options, more=("b", "x0")) as swarm:
        yield swarm


@pytest_asyncio.fixture
async def bench(swarm: Machines, expected: Answers) -> AsyncIterator[Bench]:
    async with AsyncClient(swarm.url, connect_timeout_s=60.0, reconnect_timeout_s=60.0) as client:
        bench = Bench(swarm, client, expected)
        await bench.make_well()
        yield bench
        for host in swarm.hosts.values():
            host.rules()
        await bench.make_well()


async def _in_the_middle(bench: Bench, swarm: Machines) -> tuple[str, Host]:
    name = (await bench.order())[1]
    return name, swarm.hosts[name]


async def test_the_ways_between_machines_are_told(bench: Bench, swarm: Machines) -> None:
    """From each stage to the next, and from the last one to the broker: as the kernel saw them while steps went there;
    so are the machines' clocks, which are one here. ``swarmctl doctor`` makes findings of it."""
    await bench.serving()
    await bench.right([0])

    def are_told(report: dict[str, Any]) -> bool:
        here = [row for row in report["workers"] if row["state"] == "member"]
        return all(row["next"] and row["clock_ahead_s"] is not None for row in here)

    nodes = await swarm.until(bench.client, "nodes", are_told)
    order = await bench.order()
    here = {row["name"]: row for row in nodes["workers"] if row["state"] == "member"}
    assert [here[name]["next"]["to"] for name in order] == [*order[1:], "the broker"]
    for row in here.values():
        assert 0 < row["next"]["round_trip_s"] < 1
        assert row["next"]["bytes_per_s"] > 0
        assert abs(row["clock_ahead_s"]) < 1
    found = diagnose(Reports(await bench.client.query("status"), nodes, await bench.client.query("plan")))
    assert len([each for each in found if each.about == "way"]) == 3
    assert [each.level for each in found if each.about == "clock"] == ["ok"]


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [*long("output: ip daddr {a} drop\ninput: ip saddr {a} drop"), "output: ip daddr {a} drop"],
    ids=["both", "from it"],
)
async def test_a_worker_and_the_broker_are_cut_off(bench: Bench, swarm: Machines, rule: str) -> None:
    """Its neighbours still reach it: there is one plan all the same, without it; healed, it joins anew."""
    async with bench.under_load(warm=60):
        name, host = await _in_the_middle(bench, swarm)
        host.rules(*rule.format(a=swarm.hosts["a"].address).splitlines())
        await bench.until_out(name)
        host.rules()
    await bench.serving()


@pytest.mark.long
@pytest.mark.parametrize("way", ["there", *long("both", "back")])
async def test_two_neighbours_are_cut_off(bench: Bench, swarm: Machines, way: str) -> None:
    """Both are heard, and no step passes between them: the plan does without one of them, and requests only wait."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        before, host = names[0], swarm.hosts[names[1]]
        address = swarm.hosts[before].address
        rules = {"there": [f"input: ip saddr {address} drop"], "back": [f"output: ip daddr {address} drop"]}
        host.rules(*(rules["there"] + rules["back"] if way == "both" else rules[way]))
        await bench.swarm.until(bench.client, "plan", lambda plan: _are_apart(plan, names[:2]))
        host.rules()
    for name in names:  # what they were found to lack is held against these processes for half a minute
        swarm.start_again(name)


def _are_apart(plan: dict[str, object], names: list[str]) -> bool:
    """Serving, and no step passes from the first to the second."""
    stages: object = plan["stages"]
    assert isinstance(stages, list)
    order = [stage["worker"] for stage in stages]
    return plan["state"] == "serving" and names not in [order[i : i + 2] for i in range(len(order))]


@pytest.mark.parametrize("hook", ["both", *long("input", "output")])
async def test_the_client_is_cut_off(bench: Bench, swarm: Machines, hook: str) -> None:
    """For longer than a broker may be silent: it reads on where it was."""
    async with bench.under_load(warm=60):
        rules = {"input": "input: ip saddr {a} drop", "output": "output: ip daddr {a} drop"}
        chosen = rules.values() if hook == "both" else [rules[hook]]
        swarm.hosts["laptop"].rules(*(rule.format(a=swarm.hosts["a"].address) for rule in chosen))
        await asyncio.sleep(5.0)
        swarm.hosts["laptop"].rules()


@pytest.mark.long
async def test_a_host_vanishes_and_returns(bench: Bench, swarm: Machines) -> None:
    """Nothing is told of the end of any connection. The others have its layers; then it is a member again."""
    async with bench.under_load(warm=60):
        name, host = await _in_the_middle(bench, swarm)
        host.vanish()
        await bench.until_out(name)
        host.return_()
    await bench.serving()


async def test_a_host_has_another_address(bench: Bench, swarm: Machines) -> None:
    """The others have its layers within moments. Its worker finds out that it listens where nobody looks for it, and
    ends, to be started again by whoever starts workers; then it is known by its key, needs no invitation, and its
    neighbours find it where it is now."""
    name, host = await _in_the_middle(bench, swarm)
    try:
        async with bench.under_load(warm=60):
            _move(host, host.address, MOVED)
            await bench.until_out(name)
            assert await asyncio.to_thread(swarm.workers[name].wait, 60.0) == 1
            assert "address_changed" in swarm.log(name)
            swarm.start_again(name)
        await bench.members(name)
        assert MOVED in str(await bench.node(name))
        await bench.right([0, 3])
    finally:
        _move(host, MOVED, host.address)
    swarm.start_again(name)


def _move(host: Host, former: str, address: str) -> None:
    call(*host.command("ip", "addr", "del", f"{former}/24", "dev", "eth0"))
    call(*host.command("ip", "addr", "add", f"{address}/24", "dev", "eth0"))


async def test_a_worker_behind_a_router(bench: Bench, swarm: Machines) -> None:
    """Its address is translated: it reaches the broker, and nobody reaches it. It has its part by the broker's relay:
    also when a neighbour dies, and when the broker does, with the relay."""
    inner, router = swarm.hosts["x0"], swarm.hosts["b"]
    name = (await bench.order())[1]
    _put_behind(inner, router)
    try:
        async with bench.under_load(warm=60):
            swarm.kill(name)
            swarm.start_worker("x0")
            await bench.swarm.until(bench.client, "plan", lambda plan: _is_relayed(plan, "x0"))
            swarm.kill(next(each for each in await bench.order() if each != "x0"))
            await bench.serving(2)
            await bench.swarm.until(bench.client, "plan", lambda plan: _is_relayed(plan, "x0"))
            swarm.kill_broker()
            swarm.start_broker(2)
            await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)
            await bench.swarm.until(bench.client, "plan", lambda plan: _is_relayed(plan, "x0"))
    finally:
        swarm.kill("x0")
        call(*inner.command("ip", "link", "del", "inner"))
        inner.return_()
    for each in ("w0", "w1", "w2"):
        swarm.start_again(each)


def _put_behind(inner: Host, router: Host) -> None:
    """All its ways lead through the router, which lends it its own address."""
    call(
        "ip",
        "-n",
        inner.namespace,
        "link",
        "add",
        "inner",
        "type",
        "veth",
        "peer",
        "name",
        "outer",
        "netns",
        router.namespace,
    )
    for host, device, address in ((inner, "inner", "10.99.0.2"), (router, "outer", "10.99.0.1")):
        call(*host.command("ip", "addr", "add", f"{address}/24", "dev", device))
        call(*host.command("ip", "link", "set", device, "up"))
    inner.vanish()
    call(*inner.command("ip", "route", "add", "default", "via", "10.99.0.1"))
    call(*router.command("sysctl", "-qw", "net.ipv4.ip_forward=1"))
    masquerade = "chain c { type nat hook postrouting priority 100; oifname eth0 masquerade\n }"
    call(*router.command("nft", "-f", "-"), text=f"table ip lends {{\n{masquerade}\n}}\n")


def _is_relayed(plan: dict[str, Any], name: str) -> bool:
    stages = plan["stages"] if plan["state"] == "serving" else []
    return any(stage["worker"] == name and stage["by_relay"] for stage in stages)


async def test_the_broker_s_host_is_started_again(bench: Bench, swarm: Machines) -> None:
    """All that was there is gone but the disk: members are known by it, and requests go on."""
    host = swarm.hosts["a"]
    async with bench.under_load(warm=60):
        swarm.kill_broker()
        host.vanish()
        await asyncio.sleep(2.0)
        host.return_()
        swarm.start_broker(3)
        await bench.until(lambda s: s.get("sequences_taken_back", 0) > 0)


async def test_two_swarms_on_one_network(
    bench: Bench, swarm: Machines, model: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """Same ports, same model, same names: who belongs to one gets nowhere at the other, and both answer."""
    hosts = {"b": swarm.hosts["b"], "w0": swarm.hosts["x0"]}
    with Machines(model, tmp_path, zygote, hosts, broker="b") as other:
        await asyncio.to_thread(other.start, 1)
        with pytest.raises(Unavailable, match="has not joined"):
            AsyncClient(other.url)
        # Who has joined the first one, and knocks at the second with that key, is heard by nobody.
        here = credentials_for(swarm.url)
        theirs = (
            memberships.find(hosts["b"].home / "state" / "swarm") if await asyncio.to_thread(_joined, other) else None
        )
        assert theirs is not None
        stranger = BrokerCredentials(other.url, theirs.endpoint, here.pair)
        async with AsyncClient(stranger, connect_timeout_s=5.0) as lost:
            with pytest.raises(Unavailable):
                await lost.query("nodes")
        async with AsyncClient(
            BrokerCredentials(other.url, theirs.endpoint, theirs.pair), connect_timeout_s=20.0
        ) as client:
            await other.until_serving(client, 1)
            answers, _ = await asyncio.gather(ask(client, 2), bench.right([0, 2]))
            assert answers == bench.expected[2]
            nodes = await Bench(other, client, bench.expected).nodes()
        assert [node["name"] for node in nodes] == ["w0"]
        await bench.members("w0", "w1", "w2")
        assert {node["name"] for node in await bench.nodes() if node["state"] != "out"} == {"w0", "w1", "w2"}


def _joined(swarm: Machines) -> bool:
    swarm.let_in("b")
    return True


# --- processes, on these machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [*long(0, 1), -1], ids=["first", "middle", "last"])
async def test_a_stage_is_killed(bench: Bench, place: int) -> None:
    before = await bench.figures()
    async with bench.under_load(warm=60):
        bench.swarm.kill((await bench.order())[place])
    assert (await bench.figures())["workers_lost"] == before.get("workers_lost", 0) + 1


@pytest.mark.long
async def test_a_worker_is_stopped_and_wakes(bench: Bench) -> None:
    """With steps of an old epoch, and keys that a fence took away since."""
    async with bench.under_load(warm=60):
        name = (await bench.order())[1]
        bench.stop(bench.swarm.workers[name])
        await bench.until_out(name)
        bench.wake()
    await bench.serving()


async def test_everything_is_killed(bench: Bench, swarm: Machines) -> None:
    """Broker and workers; started again, they know each other by the keys on their disks."""
    async with bench.under_load(warm=60):
        names = await bench.order()
        swarm.broker.send_signal(signal.SIGKILL)
        swarm.broker.wait()
        for name in names:
            swarm.kill(name)
        swarm.start_broker(3)
        for name in names:
            swarm.start_worker(name)

"""Workers that speak for others: a member from elsewhere that means harm, at the doors of a real broker. It is let in
by an invitation and knocks with a key of its own; workers of the broker's machine come in at loopback, without one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.auth.enrol import enrol
from swarm.auth.invitation import Invitation
from swarm.wire.addresses import is_loopback
from swarm.wire.codec import CLIENT, ORDER, SERVER, WORKER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import read_greeting
from swarm.wire.messages import (
    Denied,
    Invite,
    Leaving,
    Order,
    Probe,
    Probed,
    Release,
    Report,
    Welcome,
    WorkerMessage,
)
from swarm.wire.sockets import Context
from swarm.wire.transport.keys import KeyPair, new_pair, with_key
from tests.integration.processes import Processes, free_ports
from tests.unit.broker.bench import FakeWorker

_OWN = [
    each.address
    for addresses in psutil.net_if_addrs().values()
    for each in addresses
    if each.family == socket.AF_INET and not is_loopback(each.address)
]
OUTSIDE = _OWN[0] if _OWN else ""  # where the broker asks for keys
pytestmark = pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but loopback")
LIMIT = 1 << 24
SOON_S = 30.0


class Swarm(Processes):
    """A broker with doors for other machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder)
        self.port = free_ports(5)
        self.url = f"tcp://127.0.0.1:{self.port}"
        self._options = {"SWARM_BROKER__LISTEN": f'["{OUTSIDE}"]', "SWARM_STATE_DIR": str(folder / "state")}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with Swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.start_broker()
        yield swarm


@asynccontextmanager
async def knocking(
    context: Context, endpoint: str, identity: str, pair: KeyPair | None = None
) -> AsyncIterator[DealerChannel]:
    channel = DealerChannel(context, endpoint, identity.encode(), LIMIT, pair)
    try:
        async with asyncio.timeout(SOON_S):
            while await anext(channel) is not ConnectionEvent.CONNECTED:
                pass
        yield channel
    finally:
        channel.close()


async def answer(channel: DealerChannel) -> Any:
    """The next thing that is said, or becomes of the connection."""
    async with asyncio.timeout(SOON_S):
        event = await anext(channel)
    return event if isinstance(event, ConnectionEvent) or read_greeting(event) is not None else ORDER.decode(event)[0]


async def told(channel: DealerChannel, message: WorkerMessage) -> Order | ConnectionEvent:
    """What comes of that."""
    assert channel.send(WORKER.encode(message))
    return await verdict(channel)


async def verdict(channel: DealerChannel) -> Order | ConnectionEvent:
    """Whether it may stay; plans come and go meanwhile."""
    while not isinstance(said := await answer(channel), Welcome | Denied | Release | ConnectionEvent):
        pass
    return said


async def joined(context: Context, swarm: Swarm, name: str) -> tuple[str, KeyPair, str]:
    """Come in by an invitation: where the workers' door is, our key, and as whom it is known."""
    invitation, own = new_pair(), new_pair()
    async with knocking(context, swarm.url, "who invites") as front:
        front.send(CLIENT.encode(Invite(key=invitation.public, role="worker")))
        async with asyncio.timeout(SOON_S):
            report, _ = SERVER.decode(await anext(front))
    assert isinstance(report, Report)
    broker = str(report.body["key"])
    address = f"tcp://{OUTSIDE}:{swarm.port}"
    found = await enrol(Invitation((address,), broker, invitation.secret, "worker"), own, name)
    return with_key(f"tcp://{OUTSIDE}:{swarm.port + 1}", broker.encode()), own, found.enrolled.name


def hello(name: str, incarnation: str, pair: KeyPair, at: str = OUTSIDE, ticket: str = "") -> Any:
    return FakeWorker(name, incarnation, key=pair.public, ticket=ticket).hello(endpoint=f"tcp://{at}:20000")


def here(swarm: Swarm) -> str:
    """The workers' door, for those of the broker's machine."""
    return f"tcp://127.0.0.1:{swarm.port + 1}"


def asks_to_leave(incarnation: str) -> Leaving:
    return Leaving(epoch=0, incarnation=incarnation, reason="whoever is not denied is let go")


async def test_a_name_of_this_machine_is_not_taken_from_outside(swarm: Swarm, context: Context) -> None:
    """Whoever joins chooses how it is called: not as a worker that is here."""
    async with knocking(context, here(swarm), "w0-here") as own:
        assert isinstance(await told(own, hello("w0", "w0-here", new_pair())), Welcome)
        assert (await joined(context, swarm, "w0"))[2] == "w0.2"


async def test_who_had_a_name_before_does_not_end_who_is_here(swarm: Swarm, context: Context) -> None:
    """The worker of the broker's machine is started, or comes back, later: it stays."""
    door, pair, name = await joined(context, swarm, "w1")
    async with knocking(context, here(swarm), "w1-here") as own, knocking(context, door, "w1-there", pair) as thief:
        assert name == "w1"
        assert isinstance(await told(thief, hello("w1", "w1-there", pair)), Welcome)
        assert isinstance(await told(own, hello("w1", "w1-here", new_pair())), Welcome)
        assert isinstance(await verdict(thief), Denied)  # replaced, and may not replace
        async with knocking(context, door, "w1-here", pair) as same:
            assert await answer(same) is ConnectionEvent.LOST
        async with knocking(context, door, "w1-again", pair) as again:
            denied = await told(again, hello("w1", "w1-again", pair))
            assert isinstance(denied, Denied)
            assert "on the broker's own machine: name this one w1-SOMETHING" in denied.reason
        assert isinstance(await told(own, asks_to_leave("w1-here")), Release)


async def test_nobody_connects_to_an_address_that_is_another_s(swarm: Swarm, context: Context) -> None:
    """A member could have the broker and other workers connect to any port of any machine. It is reached by relay, or
    sent away. Who is on the broker's machine may name what it likes."""
    door, pair, name = await joined(context, swarm, "shadow")
    for at in ("127.0.0.1", "192.0.2.99"):
        async with knocking(context, door, f"{name}-1", pair) as thief:
            denied = await told(thief, hello(name, f"{name}-1", pair, at))
            assert isinstance(denied, Denied)
            assert f"it names the address {at}, and comes from {OUTSIDE}" in denied.reason
            assert "broker.worker_networks" in denied.reason
    async with knocking(context, door, f"{name}-2", pair) as hidden:
        assert isinstance(await told(hidden, hello(name, f"{name}-2", pair, "192.0.2.99", "5" * 32)), Welcome)
        assert isinstance(await told(hidden, asks_to_leave(f"{name}-2")), Release)
    assert "worker_by_relay_only" in swarm.log("broker")
    async with knocking(context, here(swarm), "w5-here") as own:
        assert isinstance(await told(own, hello("w5", "w5-here", new_pair(), "192.0.2.99")), Welcome)
        assert isinstance(await told(own, asks_to_leave("w5-here")), Release)


async def test_nobody_speaks_for_another_process(swarm: Swarm, context: Context) -> None:
    """Under its number, which its neighbours know: no Hello, and no answer to what it was asked."""
    door, pair, name = await joined(context, swarm, "far")
    async with knocking(context, here(swarm), "w2-here") as own, knocking(context, door, "far-there", pair) as thief:
        assert isinstance(await told(own, hello("w2", "w2-here", new_pair())), Welcome)
        assert await told(thief, hello(name, "w2-here", pair)) is ConnectionEvent.LOST
        assert await answer(thief) is ConnectionEvent.CONNECTED
        assert await told(thief, FakeWorker("w2", "w2-here").prepared(1)) is ConnectionEvent.LOST
        assert isinstance(await told(own, asks_to_leave("w2-here")), Release)
    assert "hello.incarnation 'w2-here' is not the sender's, which is 'far-there'" in swarm.log("broker")


async def test_who_is_away_is_not_kept_away(swarm: Swarm, context: Context) -> None:
    """Somebody calls its connection as another's, which has to come back: that one takes its place, and not it that
    one's."""
    door, pair, _ = await joined(context, swarm, "east")
    other_door, other, _ = await joined(context, swarm, "west")
    for address, identity, own_pair in ((door, "east-1", pair), (here(swarm), "w3-here", None)):
        async with (
            knocking(context, other_door, identity, other) as thief,
            knocking(context, address, identity, own_pair) as own,
        ):
            assert own.send(WORKER.encode(Probe(ticket=7)))
            assert isinstance(await answer(own), Probed)
            assert await answer(thief) is ConnectionEvent.LOST
            assert isinstance(await answer(thief), ConnectionEvent)  # it has knocked again
            assert own.send(WORKER.encode(Probe(ticket=8)))
            assert isinstance(await answer(own), Probed)

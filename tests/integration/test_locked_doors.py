"""Doors with a lock, at which libzmq's own sockets knock: right keys, others, none; keys that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic

import psutil
import pytest
import zmq

from swarm.auth.enrol import enrol
from swarm.auth.invitation import Invitation
from swarm.errors import Unavailable
from swarm.wire.channel import BindAddress, RouterChannel
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.sockets import Context, bind_free_port
from swarm.wire.transport.keys import AuthPolicy, new_pair, with_key
from swarm.wire.transport.peers import MessageReceived, PeerDisconnected
from swarm.wire.transport.server_handshake import encode_command, encode_metadata
from swarm.wire.transport.zmtp import command_frame, encode_greeting, frame_header
from tests.integration.crowd import KINDS, Crowd, Door, recorded

HOST = "127.0.0.1"
LIMIT = 1 << 24
SOON_S = 20.0
CROWD = 600
MOST_STRANGERS = 256  # at a time
DOOR, ME, OTHER = new_pair(), new_pair(), new_pair()


async def soon(awaited: object) -> object:
    async with asyncio.timeout(SOON_S):
        return await awaited  # type: ignore[misc]


def until(holds: Callable[[], object]) -> None:
    give_up_at = monotonic() + SOON_S
    while not holds():
        assert monotonic() < give_up_at


class Front:
    """A door with a lock, and who may come in."""

    def __init__(self) -> None:
        self.known = {ME.public}
        lock = AuthPolicy(DOOR, self.known.__contains__)
        self.router = RouterChannel([BindAddress(HOST, lock)], 0, LIMIT)
        self.endpoint = with_key(self.router.endpoint, DOOR.public.encode())


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    yield front
    front.router.close()


async def test_who_has_a_key_is_served_and_known_by_it(context: Context, front: Front) -> None:
    """In frames of every size."""
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    for size in (0, 1, 255, 256, 70_000, 4 << 20):
        body = bytes(size)
        assert dealer.send([b"question", body])
        event = await soon(anext(front.router))
        assert event == MessageReceived(b"me", [memoryview(b"question"), memoryview(body)], ME.public)
        assert front.router.send(b"me", [b"answer", body])
        answer = await soon(anext(dealer))
        assert isinstance(answer, list)
        assert [bytes(frame) for frame in answer] == [b"answer", body]
    dealer.close()


async def test_a_last_word_keeps_its_key(context: Context, front: Front) -> None:
    """Whoever says something and is gone at once must not be taken for one of whom no key is asked."""
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    for _ in range(8):
        dealer.send([b"stop everything"])
    dealer.close()
    await asyncio.sleep(0.5)  # all of it is there, and the connection's end
    events = [await soon(anext(front.router)) for _ in range(9)]
    assert [event.key for event in events if isinstance(event, MessageReceived)] == [ME.public] * 8
    assert events[-1] == PeerDisconnected(b"me")


async def test_who_has_another_key_is_told_so(context: Context, front: Front) -> None:
    """And knocks no more, until it has a new socket; then it is heard, if its key is known now."""
    dealer = DealerChannel(context, front.endpoint, b"other", LIMIT, OTHER)
    assert await soon(anext(dealer)) is ConnectionEvent.AUTH_REJECTED
    front.known.add(OTHER.public)
    dealer.reconnect()
    while (event := await soon(anext(dealer))) is not ConnectionEvent.CONNECTED:
        assert isinstance(event, ConnectionEvent)
    dealer.close()


async def test_who_is_known_no_more_is_hung_up_on_at_once(context: Context, front: Front) -> None:
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    dealer.send([b"question"])
    assert isinstance(await soon(anext(front.router)), MessageReceived)
    front.known.clear()
    front.router.drop_unauthorized()
    assert not front.router.send(b"me", [b"too late"])
    assert await soon(anext(front.router)) == PeerDisconnected(b"me")
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    dealer.close()


async def test_a_name_belongs_to_a_key(context: Context, front: Front) -> None:
    """Nobody takes the place of another by calling itself so."""
    front.known.add(OTHER.public)
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    dealer.send([b"1"])
    assert isinstance(await soon(anext(front.router)), MessageReceived)
    thief = DealerChannel(context, front.endpoint, b"me", LIMIT, OTHER)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            async for event in thief:
                thief.send([b"mine"])
                assert isinstance(event, ConnectionEvent)
    dealer.send([b"2"])
    assert await soon(anext(front.router)) == MessageReceived(b"me", [memoryview(b"2")], ME.public)
    for each in (dealer, thief):
        each.close()


async def test_without_keys_nobody_is_heard(context: Context, front: Front) -> None:
    """Neither without a mechanism, nor with words, nor with another door's key; those who have one go on meanwhile."""
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    plain = front.router.endpoint
    strangers = [
        DealerChannel(context, plain, b"null", LIMIT),
        DealerChannel(context, with_key(plain, b"word"), b"plain", LIMIT),
        DealerChannel(context, with_key(plain, OTHER.public.encode()), b"wrong door", LIMIT, ME),
    ]
    for number in range(20):
        for stranger in strangers:
            stranger.send([b"let me in"])
        dealer.send([bytes([number])])
        event = await soon(anext(front.router))
        assert event == MessageReceived(b"me", [memoryview(bytes([number]))], ME.public)
        await asyncio.sleep(0.02)
    for each in (dealer, *strangers):
        each.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crowd_costs_nothing(context: Context, front: Front, kind: str) -> None:
    """Hundreds who may not come in, each badly behaved in the same way: memory stays as it was, whoever has a key is
    served meanwhile, also as a newcomer, and nothing that the crowd says is heard. (``tools/crowd.py``: tens of
    thousands, at every door of a swarm.)"""
    process = psutil.Process()
    host, port = front.router.endpoint.removeprefix("tcp://").split(":")
    door = Door("front", host, int(port), DOOR.public)
    door = replace(door, recorded=await heard_once(front, door))
    dealer = DealerChannel(context, front.endpoint, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    before = process.memory_info().rss
    crowd = Crowd(door, kind, ("127.0.0.2", "127.0.0.3"))  # it has a thread and a loop of its own
    knocking = asyncio.create_task(asyncio.to_thread(asyncio.run, crowd.knock(CROWD, stays_s=0.3)))
    num_served = 0
    while not knocking.done() or not num_served:
        newcomer = DealerChannel(context, front.endpoint, b"new %d" % num_served, LIMIT, ME)
        while (event := await soon(anext(newcomer))) is not ConnectionEvent.CONNECTED:
            assert isinstance(event, ConnectionEvent)
        for each, name in ((dealer, b"me"), (newcomer, b"new %d" % num_served)):
            each.send([b"still here"])
            assert await soon(anext(front.router)) == MessageReceived(name, [memoryview(b"still here")], ME.public)
        assert len(front.router._listener._connections) <= MOST_STRANGERS + 2
        newcomer.close()
        assert await soon(anext(front.router)) == PeerDisconnected(b"new %d" % num_served)
        num_served += 1
    counted = await knocking
    assert counted.opened == CROWD
    assert counted.hung_up or kind in ("silent", "endless")
    assert process.memory_info().rss - before < 64 << 20  # both ends are in this process
    dealer.close()


async def heard_once(front: Front, door: Door) -> bytes:
    """What a member said in a conversation of its own."""
    said = await recorded(door, ME)
    assert await soon(anext(front.router)) == MessageReceived(b"me", [memoryview(b"hello")], ME.public)
    assert await soon(anext(front.router)) == PeerDisconnected(b"me")
    return said


async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Front, heard: bytearray) -> None:
    """Pass on what goes to and fro between a peer and the door, and keep what the peer says."""
    host, port = to.router.endpoint.removeprefix("tcp://").split(":")
    door_reader, door_writer = await asyncio.open_connection(host, int(port))

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray) -> None:
        while data := await source.read(1 << 16):
            kept += data
            target.write(data)
        target.close()

    await asyncio.gather(pass_on(reader, door_writer, heard), pass_on(door_reader, writer, bytearray()))


async def test_what_was_recorded_on_the_way_is_not_heard_again(context: Context, front: Front) -> None:
    """Somebody between the two keeps every byte that libzmq's socket says, and says it once more."""
    heard = bytearray()
    between = await asyncio.start_server(lambda r, w: through(r, w, front, heard), HOST, 0)
    address = with_key(f"tcp://{HOST}:{between.sockets[0].getsockname()[1]}", DOOR.public.encode())
    dealer = DealerChannel(context, address, b"me", LIMIT, ME)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    dealer.send([b"stop everything"])
    assert await soon(anext(front.router)) == MessageReceived(b"me", [memoryview(b"stop everything")], ME.public)
    dealer.close()
    assert await soon(anext(front.router)) == PeerDisconnected(b"me")
    assert len(heard) > 64 + 202  # the greeting, HELLO and what came after it
    host, port = front.router.endpoint.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes(heard))
    with contextlib.suppress(ConnectionResetError):  # hung up on, with what it said unread
        await soon(reader.read())
    writer.close()
    assert list(front.router.pending_events()) == []
    between.close()


async def test_a_door_without_a_lock_asks_nobody_for_a_key(context: Context) -> None:
    """Whoever says that it has one, in words or in what are none, is heard as everybody there."""
    router = RouterChannel([BindAddress(HOST)], 0, LIMIT)
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    strangers = []
    for number, claimed in enumerate((b"\xff", ME.public.encode())):
        ready = encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=b"%d" % number, key=claimed))
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            encode_greeting(b"NULL", is_server=False) + command_frame(ready) + frame_header(5, more=False) + b"hello"
        )
        strangers.append(writer)
        assert await soon(anext(router)) == MessageReceived(b"%d" % number, [memoryview(b"hello")], "")
    for writer in strangers:
        writer.close()
    router.close()


def test_a_data_door_hears_who_the_plan_names(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Who comes early knocks again by itself, and is heard as soon as it is named; who is named no more is not."""
    heard: set[str] = set()
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, heard.__contains__, reject_explicitly=False))
    push = PushChannel(pull.endpoint, pair=ME)
    give_up_at = monotonic() + 0.5
    while monotonic() < give_up_at:
        assert not pull.wait(0.02)
        assert not push.send([b"early"])
    heard.add(ME.public)
    until(lambda: pull.wait(0.02) or push.send([b"now"]))
    until(lambda: pull.wait(0.02))
    assert [bytes(frame) for frame in pull.receive() or []] == [b"now"]
    assert pull.sender_key == ME.public
    assert push.send([b"under way"])
    until(lambda: pull.wait(0.02))
    heard.clear()
    pull.drop_unauthorized()
    assert pull.receive() is None
    for _ in range(20):
        push.send([b"from a former neighbour"])
        assert not pull.wait(0.02)
    push.close()
    pull.close()


def test_a_crowd_at_a_data_door_holds_up_no_step(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Some of each kind at once, while a neighbour sends: every step arrives, once and in order."""
    pull = PullChannel(HOST, LIMIT, auth=AuthPolicy(DOOR, ME.public.__eq__, reject_explicitly=False))
    push = PushChannel(pull.endpoint, pair=ME)
    until(lambda: push.send([b"0"]) or pull.wait(0.01))
    port = int(pull.endpoint.rpartition(":")[2])
    door = Door("data", HOST, port, DOOR.public, "PUSH", recorded=b"\xff" * 400)

    async def crowds() -> None:
        await asyncio.gather(*(Crowd(door, kind).knock(CROWD // len(KINDS), 0.3) for kind in KINDS))

    with ThreadPoolExecutor(1) as pool:
        knocking = pool.submit(asyncio.run, crowds())
        number = 0
        while not knocking.done() or not number:
            until(lambda: pull.wait(0.02))
            assert [bytes(frame) for frame in pull.receive() or []] == [b"%d" % number]
            number += 1
            until(partial(push.send, [b"%d" % number]))
        knocking.result()
    assert pull.num_refused >= CROWD // 2
    push.close()
    pull.close()


def test_free_ports_are_found_behind_a_lock() -> None:
    bound = bind_free_port(HOST, range(21000, 22000))
    port = bound.getsockname()[1]
    with bound:
        pull = PullChannel(HOST, LIMIT, range(port, port + 20), auth=AuthPolicy(DOOR, lambda _: True))
    where, _, other = pull.endpoint.rpartition(":")
    assert where == f"tcp://{DOOR.public}@{HOST}"
    assert port < int(other) < port + 20
    pull.close()


async def test_an_invitation_of_another_key_says_so(front: Front) -> None:
    """Whoever listens there can't hear it."""
    address = front.router.endpoint
    former = Invitation((address,), OTHER.public, ME.secret, "client")
    with pytest.raises(Unavailable, match=r"disconnects during the handshake.* ask for another"):
        await soon(enrol(former, new_pair(), "me", timeout_s=0.5))


async def test_who_was_told_the_doors_new_key_knocks_with_it(context: Context) -> None:
    """The connection that stands is kept; the next one is made with the new key, when the old one is answered to no
    more. Who was told nothing is not heard, and hears of that; it is let in when it knows better."""
    new, pairs, known = new_pair(), [DOOR], {ME.public, OTHER.public}
    lock = AuthPolicy(DOOR, known.__contains__, key_pairs=lambda: tuple(pairs))
    router = RouterChannel([BindAddress(HOST, lock)], 0, LIMIT)
    before, after = (with_key(router.endpoint, pair.public.encode()) for pair in (DOOR, new))
    told, other = (DealerChannel(context, before, name, LIMIT, pair) for name, pair in ((b"a", ME), (b"b", OTHER)))
    try:
        for dealer in (told, other):
            assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
            dealer.send([b"hello"])
            assert await soon(anext(router))
        pairs[:] = [new, DOOR]
        told.set_endpoint(after)
        told.send([b"still here"])
        assert isinstance(arrived := await soon(anext(router)), MessageReceived)
        assert bytes(arrived.frames[0]) == b"still here"
        assert {key for _, key in router.authenticated_peers()} == {ME.public, OTHER.public}
        pairs.remove(DOOR)
        for peer, _ in router.authenticated_peers():
            router.disconnect(peer)
        for _ in range(2):
            assert isinstance(await soon(anext(router)), PeerDisconnected)
        assert await soon(anext(told)) is ConnectionEvent.LOST
        assert await soon(anext(told)) is ConnectionEvent.CONNECTED
        assert await soon(anext(other)) is ConnectionEvent.LOST
        assert await soon(anext(other)) is ConnectionEvent.HANDSHAKE_FAILED
        other.set_endpoint(after)
        while await soon(anext(other)) is not ConnectionEvent.CONNECTED:
            pass
    finally:
        for channel in (told, other, router):
            channel.close()

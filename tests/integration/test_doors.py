"""What one peer can do at a door: little. Raw sockets that speak ZMTP badly, slowly, without end or without the key,
beside one that behaves and must be served as ever."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from swarm.broker.message_server import MAX_STRIKES
from swarm.wire.channel import AsyncPullChannel, BindAddress, RouterChannel
from swarm.wire.codec import CLIENT, ORDER, SERVER, WORKER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.greeting import Greeting, read_greeting
from swarm.wire.greeting import encode_greeting as greeting_of
from swarm.wire.messages import Describe, Description, Hello, Malformed, Probe, Probed
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.schema import schema
from swarm.wire.sockets import Context, bind_free_port, endpoint_of
from swarm.wire.transport import accept as strangers
from swarm.wire.transport import connection, listener
from swarm.wire.transport.accept import RESERVE, AcceptPaused
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.keys import address_and_key, is_address, with_key
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected
from swarm.wire.transport.server_handshake import encode_command, encode_metadata
from swarm.wire.transport.zmtp import command_frame, encode_greeting, frame_header
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.unit.broker.bench import FakeWorker

HOST = "127.0.0.1"
LIMIT = 1 << 20
SOON_S = 30
NULL = encode_greeting(b"NULL", is_server=False)


async def soon(awaitable: Any) -> Any:
    async with asyncio.timeout(SOON_S):
        return await awaitable


def knock(endpoint: str, identity: bytes = b"rude") -> socket.socket:
    """A connection whose handshake is through as far as it concerns us."""
    host, _, port = address_and_key(endpoint)[0].removeprefix("tcp://").rpartition(":")
    raw = socket.create_connection((host, int(port)), timeout=SOON_S)
    raw.sendall(
        NULL + command_frame(encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=identity)))
    )
    return raw


def message(*frames: bytes) -> bytes:
    return b"".join(frame_header(len(f), more=i + 1 < len(frames)) + f for i, f in enumerate(frames))


async def is_hung_up_on(raw: socket.socket) -> None:
    """Read a connection until its end."""
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while await soon(loop.sock_recv(raw, 4096)):
            pass
    raw.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits of moments."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(connection, "MESSAGE_S", 0.2)
    monkeypatch.setattr("swarm.wire.channel.SWEEP_S", 0.05)


@pytest.fixture
async def router() -> AsyncIterator[RouterChannel]:
    channel = RouterChannel([BindAddress(HOST)], 0, LIMIT)
    yield channel
    channel.close()


@pytest.fixture
async def dealer(context: Context, router: RouterChannel) -> AsyncIterator[DealerChannel]:
    channel = DealerChannel(context, router.endpoint, b"me", LIMIT)
    assert await soon(anext(channel)) is ConnectionEvent.CONNECTED
    yield channel
    channel.close()


async def served(router: RouterChannel, dealer: DealerChannel) -> None:
    """A question gets its answer."""
    assert dealer.send([b"question"])
    assert await soon(anext(router)) == MessageReceived(b"me", [b"question"])
    assert router.send(b"me", [b"answer"])
    assert await soon(anext(dealer)) == [b"answer"]


async def test_a_message_of_a_million_frames(router: RouterChannel, dealer: DealerChannel) -> None:
    """It ends at the third frame; nothing of it is kept, and it delays nobody."""
    before = psutil.Process().memory_info().rss
    with knock(router.endpoint) as raw:
        raw.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(100):
                raw.send(b"\x01\x01x" * 10_000)
        began = monotonic()
        event = await soon(anext(router))
        assert event == LimitExceeded(b"rude", "a message has at most 2 frames, more were announced")
        await served(router, dealer)
        assert await soon(anext(router)) == PeerDisconnected(b"rude")  # whatever was kept about it can go
        assert monotonic() - began < 5.0
        assert psutil.Process().memory_info().rss - before < 16 << 20
        await is_hung_up_on(raw)


async def test_many_messages_of_one_take_turns_with_others(router: RouterChannel, dealer: DealerChannel) -> None:
    """However many have come, the next of another peer waits for one of them."""
    with knock(router.endpoint) as raw:
        raw.sendall(message(b"x") * 50_000)
        assert await soon(anext(router)) == MessageReceived(b"rude", [b"x"])
        assert dealer.send([b"question"])
        await asyncio.sleep(0.1)
        waited = 0
        while (await soon(anext(router))).peer == b"rude":
            waited += 1
        assert waited < 200  # what had been taken already, and one each turn
        assert len(router._listener._connections) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", [b"", NULL[:20], NULL, b"\xff"], ids=["none", "few", "greeting", "one"])
async def test_a_handshake_that_does_not_end(router: RouterChannel, dealer: DealerChannel, words: bytes) -> None:
    """It has its time."""
    host, _, port = router.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOON_S) as raw:
        raw.sendall(words)
        reading = asyncio.create_task(soon(anext(router)))
        await is_hung_up_on(raw)
        assert dealer.send([b"question"])
        assert (await reading).peer == b"me"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", [b"\x01", frame_header(9, more=False) + b"part", b"\x01\x01x"])
async def test_a_message_that_does_not_end(router: RouterChannel, dealer: DealerChannel, words: bytes) -> None:
    """It has its time, too; who only says nothing may stay."""
    quiet = knock(router.endpoint, b"quiet")
    with knock(router.endpoint) as raw, quiet:
        raw.sendall(message(b"whole") + words)
        assert await soon(anext(router)) == MessageReceived(b"rude", [b"whole"])
        assert await soon(anext(router)) == PeerDisconnected(b"rude")
        await is_hung_up_on(raw)
        await served(router, dealer)
        quiet.sendall(message(b"here"))
        assert await soon(anext(router)) == MessageReceived(b"quiet", [b"here"])


async def test_what_strangers_leave_unfinished_is_bounded(
    router: RouterChannel, dealer: DealerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all together. The one that has been at it for longest goes; those who finish are heard."""
    monkeypatch.setattr(listener, "_MAX_HELD_BYTES", 1 << 20)
    crowd = [knock(router.endpoint, f"rude{number}".encode()) for number in range(6)]
    reading = asyncio.create_task(soon(anext(router)))
    for raw in crowd:
        raw.sendall(frame_header(LIMIT, more=False) + bytes(300_000))
        await asyncio.sleep(0.05)
    await is_hung_up_on(crowd[0])
    assert router._listener._held_bytes.total() <= 1 << 20
    crowd[-1].sendall(bytes(LIMIT - 300_000))
    assert dealer.send([b"question"])
    arrived = {(await reading).peer, (await soon(anext(router))).peer}
    assert arrived == {b"me", b"rude5"}
    assert router._listener._held_bytes.total() <= 1 << 20
    for raw in crowd[1:]:
        raw.close()


async def test_the_last_descriptors_are_not_for_newcomers(
    router: RouterChannel, dealer: DealerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door closes while there are some left, which is told once; who is in is served. Open again, it lets in."""
    crowd = [knock(router.endpoint, f"w{number}".encode()) for number in range(5)]
    with socket.socket() as probe:
        limit = probe.fileno() + RESERVE
    monkeypatch.setattr(strangers.resource, "getrlimit", lambda which: (limit, limit))
    assert await soon(anext(router)) == AcceptPaused(errno.EMFILE)
    await served(router, dealer)
    monkeypatch.undo()
    router.resume_accepting()
    crowd[-1].sendall(message(b"in"))
    assert await soon(anext(router)) == MessageReceived(b"w4", [b"in"])
    for raw in crowd:
        raw.close()


async def test_large_answers_leave_whole(router: RouterChannel, dealer: DealerChannel) -> None:
    """More than the kernel takes at once, small and large ones in turns: all come, in order."""
    await served(router, dealer)
    sent = [[bytes([number]) * size, b"p" * (number * 7919)] for number in range(24) for size in (3, 200_000)]
    for frames in sent:
        assert router.send(b"me", frames)
    for frames in sent:
        assert await soon(anext(dealer)) == frames


async def test_last_words_reach_who_is_hung_up_on(router: RouterChannel, dealer: DealerChannel) -> None:
    """It hears them, then its connection ends, and the next one is heard."""
    await served(router, dealer)
    assert router.is_connected(b"me")
    router.disconnect(b"me")
    assert router.send(b"me", [b"goodbye"])
    assert await soon(anext(dealer)) == [b"goodbye"]
    assert await soon(anext(router)) == PeerDisconnected(b"me")
    assert not router.is_connected(b"me")
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    await served(router, dealer)


async def test_who_knocks_anew_takes_its_own_place(router: RouterChannel, dealer: DealerChannel) -> None:
    """``renew``: DOWN, UP, and messages go both ways over the new connection. The former one's end is no loss."""
    await served(router, dealer)
    dealer.reconnect()
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    await until_heard(router, dealer, b"again")
    assert router.send(b"me", [b"answer"])
    assert await soon(anext(dealer)) == [b"answer"]


async def test_who_knocks_anew_without_descriptors_waits_for_some(
    router: RouterChannel, dealer: DealerChannel, descriptors: Callable[[int], None]
) -> None:
    """``renew`` says DOWN, sends nothing, and knocks as soon as there are descriptors again; it raises nothing. It can
    be renewed once more meanwhile, or closed."""
    await served(router, dealer)
    descriptors(3)  # those of the three standard streams; with less, poll() itself fails
    dealer.reconnect()
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert not dealer.send([b"lost"])
    dealer.reconnect()
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(dealer), 0.5)
    descriptors(1 << 10)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    await until_heard(router, dealer, b"again")


@pytest.fixture
def descriptors() -> Iterator[Callable[[int], None]]:
    """Lets this process have no descriptor from this number on, beside those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until_heard(router: RouterChannel, dealer: DealerChannel, words: bytes) -> None:
    """What the dealer says arrives; the end of its former connection may be told before."""
    assert dealer.send([words])
    events = [await soon(anext(router))]
    if events == [PeerDisconnected(b"me")]:
        events = [await soon(anext(router))]
    assert events == [MessageReceived(b"me", [words])]


def test_a_data_door_hears_only_who_knows_its_key(context: Context) -> None:
    """Garbage, forged steps and other keys change nothing there: no message comes out."""
    pull = PullChannel(HOST, LIMIT)
    address, key = address_and_key(pull.endpoint)
    assert len(key) == 32
    strangers = [knock(address, identity) for identity in (b"", b"me", key[:-1], b"x" * 32)]
    for raw in strangers:
        raw.sendall(message(b"garbage") * 10)
    wrong = PushChannel(with_key(address, b"y" * 32))
    assert not pull.wait(0.3)
    assert pull.receive() is None
    assert pull.num_refused >= len(strangers)
    assert not wrong.send([b"forged"])
    right = PushChannel(pull.endpoint)
    deadline = monotonic() + SOON_S
    while not right.send([b"step", b"tensor"]):
        assert monotonic() < deadline
        pull.wait(0.05)
    assert pull.wait(SOON_S)
    assert pull.receive() == [b"step", b"tensor"]
    for each in (wrong, right, pull, *strangers):
        each.close()


def test_who_is_refused_does_not_knock_for_ever(context: Context) -> None:
    """Another worker listens where one was before, with a key of its own: the sender of old is told that its key is
    wrong, once, and knocks no more. The one that knows the new key is heard."""
    former = PullChannel(HOST, LIMIT)
    old = PushChannel(former.endpoint)
    sent(old, former, b"step")
    port = int(former.endpoint.rpartition(":")[2])
    former.close()
    pull = PullChannel(HOST, LIMIT, range(port, port + 1))
    deadline = monotonic() + SOON_S
    while not pull.num_refused:
        assert monotonic() < deadline
        assert not pull.wait(0.05)
    new = PushChannel(pull.endpoint)
    sent(new, pull, b"other step")
    assert not pull.wait(1.0)  # in which libzmq would have tried again some times
    assert pull.num_refused == 1
    assert not old.send([b"step"])
    for each in (old, new, pull):
        each.close()


def test_who_is_hung_up_on_knocks_now_and_then(context: Context) -> None:
    """A door that can't listen for a while must not keep its senders busy: their pauses are a tenth of a second."""
    knocks = 0
    with bind_free_port(HOST) as bound:
        push = PushChannel(with_key(endpoint_of(bound), b"x" * 32))
        bound.settimeout(0.1)
        give_up_at = monotonic() + 1.0
        while monotonic() < give_up_at:
            with contextlib.suppress(TimeoutError):
                bound.accept()[0].close()
                knocks += 1
    assert 1 <= knocks <= 12
    push.close()


def sent(push: PushChannel, pull: PullChannel, words: bytes) -> None:
    """As soon as they are connected; and it arrives."""
    deadline = monotonic() + SOON_S
    while not push.send([words]):
        assert monotonic() < deadline
        pull.wait(0.05)
    assert pull.wait(SOON_S)
    assert pull.receive() == [words]


def test_half_a_message_keeps_nobody_waiting() -> None:
    """Sixteen megabytes are on their way and stop: whoever waits for them is woken by others, and hears the rest when
    it has come."""
    pull, wake = PullChannel(HOST, 32 << 20), WakeupFd()
    address, key = address_and_key(pull.endpoint)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    half = bytes(8 << 20)
    with socket.create_connection((host, int(port)), timeout=SOON_S) as raw:
        raw.sendall(encode_greeting(b"PLAIN", is_server=False))
        raw.sendall(command_frame(encode_command(b"HELLO", b"\x01w" + bytes([len(key)]) + key)))
        raw.sendall(command_frame(encode_command(b"INITIATE", encode_metadata(Socket_Type=b"PUSH"))))
        sender = threading.Thread(target=raw.sendall, args=(frame_header(2 * len(half), more=False) + half,))
        sender.start()
        while sender.is_alive():
            assert not pull.wait(0.01, wake=wake)
        wake.set()
        assert pull.wait(SOON_S, wake=wake)
        wake.clear()
        assert pull.receive() is None
        sender = threading.Thread(target=raw.sendall, args=(half,))
        sender.start()
        assert pull.wait(SOON_S, wake=wake)
        assert pull.receive() == [2 * half]
        sender.join()
    pull.close()
    wake.close()


async def test_a_beat_door_hears_only_who_knows_its_key(context: Context) -> None:
    """As a data door; who looks without waiting hears those that it should."""
    beats = AsyncPullChannel([BindAddress(HOST)], LIMIT, 16)
    with knock(beats.endpoint, b"stranger") as raw:
        raw.sendall(message(b"garbage"))
        push = PushChannel(beats.endpoint)
        deadline = monotonic() + SOON_S
        while not push.send([b"beat"]):
            assert monotonic() < deadline
            assert list(beats.pending_events()) == []
        while not (heard := list(beats.pending_events())):
            assert monotonic() < deadline
        assert [each.frames for each in heard if isinstance(each, MessageReceived)] == [[b"beat"]]
        await is_hung_up_on(raw)
        push.close()
    beats.close()


# --- a whole broker ---------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(random_llama: Path, zygote: Zygote, tmp_path: Path) -> Iterator[Processes]:
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        swarm.start_broker()
        yield swarm


async def test_who_says_nothing_but_garbage_must_knock_again(broker: Processes, context: Context) -> None:
    """Every message gets its answer in words; after some of them the connection ends. The log has a few lines of it."""
    dealer = DealerChannel(context, broker.url, b"rude", LIMIT)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    for _ in range(MAX_STRIKES):
        assert dealer.send([b"garbage"])
        message, _ = SERVER.decode(await soon(anext(dealer)))
        assert isinstance(message, Malformed)
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send(CLIENT.encode(Describe()))
    message, _ = SERVER.decode(await soon(anext(dealer)))
    assert isinstance(message, Description)
    dealer.close()
    assert broker.log("broker").count('"message_refused"') == 5


async def test_a_damaged_answer_of_a_worker_renews_its_connection(broker: Processes, context: Context) -> None:
    """Within seconds: it says Hello anew, and the broker goes on from there."""
    dealer = DealerChannel(context, f"tcp://{HOST}:{broker.port + 1}", b"w0.1", LIMIT)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    probe = WORKER.encode(Probe(ticket=1))
    assert dealer.send(probe)
    answer, _ = ORDER.decode(await soon(anext(dealer)))
    assert isinstance(answer, Probed)
    assert dealer.send([bytes(probe[0])[:-1] + b"?"])
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send(probe)
    answer, _ = ORDER.decode(await soon(anext(dealer)))
    assert isinstance(answer, Probed)
    dealer.close()


async def test_a_hello_with_no_address_is_refused(broker: Processes, context: Context) -> None:
    """Nobody is told to connect there, which nobody could; and nothing else is disturbed."""
    dealer = DealerChannel(context, f"tcp://{HOST}:{broker.port + 1}", b"w9.1", LIMIT)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send(WORKER.encode(FakeWorker("w9", "w9.1").hello(endpoint="nowhere")))
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send(WORKER.encode(Probe(ticket=1)))
    answer, _ = ORDER.decode(await soon(anext(dealer)))
    assert isinstance(answer, Probed)
    dealer.close()
    assert "hello.endpoint 'nowhere' is no address like tcp://127.0.0.1:20000" in broker.log("broker")


@pytest.mark.parametrize(
    ("endpoint", "is_good"),
    [
        ("tcp://127.0.0.1:20000", True),
        ("tcp://0123abcd@[fe80::1]:20000", True),
        ("tcp://host-1.example:1", False),
        ("tcp://127.0.0.1:0", False),
        ("tcp://127.0.0.1:65536", False),
        ("tcp://127.0.0.1", False),
        ("tcp://*:20000", False),
        ("tcp://..:1", False),
        ("tcp://127.0.0.1:\u0663\u0663", False),
        ("tcp://\u00e9@127.0.0.1:1", False),
        (f"tcp://{'k' * 65}@127.0.0.1:1", False),
        ("p://0123abcd@127.0.0.1:20000", False),
        ("tcp://0123 abcd@127.0.0.1:20000", False),
        ("127.0.0.1:20000", False),
        ("ipc:///etc/passwd", False),
        ("", False),
    ],
)
def test_addresses(endpoint: str, is_good: bool) -> None:
    assert is_address(endpoint) is is_good


async def test_a_damaged_order_renews_the_connection(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """It may have been what everybody waits for. The worker knocks anew, greets and says Hello with what it holds."""
    said: list[object] = []
    with Processes(random_llama, tmp_path, launch=zygote) as swarm:
        door = RouterChannel([BindAddress(HOST)], swarm.port + 1, WORKER.frame_limit_bytes)
        swarm.start_worker("w0")
        async with asyncio.timeout(60):
            while said.count(Hello) < 2:
                match await anext(door):  # its former connection may end before the new one stands, or give way to it
                    case MessageReceived(peer, frames) if read_greeting(frames) is not None:
                        door.send(peer, greeting_of(schema()))
                        said.append(Greeting)
                    case MessageReceived(peer, frames):
                        message, _ = WORKER.decode(frames)
                        if isinstance(message, Probe):
                            door.send(peer, ORDER.encode(Probed(ticket=message.ticket)))
                        elif isinstance(message, Hello):
                            said.append(Hello)
                            door.send(peer, [b"damaged"])
        door.close()
    assert said == [Greeting, Hello, Greeting, Hello]

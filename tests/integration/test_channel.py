"""Real sockets on loopback: what the channels promise when peers are absent, slow, rude or killed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, thread_time
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from swarm.errors import ConfigError
from swarm.wire import tensors
from swarm.wire.channel import HEARTBEAT_QUEUE, AsyncPullChannel, BindAddress, RouterChannel
from swarm.wire.codec import CLIENT, DATA, HEARTBEAT
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.messages import Describe, Row, Step
from swarm.wire.pull import PullChannel
from swarm.wire.push import DATA_QUEUE, PushChannel
from swarm.wire.sockets import DATA_PORTS, Context, Frames, bind_free_port
from swarm.wire.transport.io_loop import WakeupFd
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected

HOST = "127.0.0.1"
LIMIT = 1 << 20
SOON_S = 10  # a deadline, not a pause: everything below takes milliseconds


def arrived(event: object) -> Frames:
    """The message that came."""
    assert isinstance(event, MessageReceived)
    return event.frames


@pytest.fixture
def context() -> Iterator[Context]:
    """A context that can be ended: every channel that a test leaves open would hang it."""
    made = zmq.Context()
    yield made
    end = threading.Thread(target=made.term, daemon=True)
    end.start()
    end.join(SOON_S)
    assert not end.is_alive(), "a socket or a monitor was left open"


@pytest.fixture
async def router(context: Context) -> AsyncIterator[RouterChannel]:
    channel = RouterChannel([BindAddress(HOST)], 0, LIMIT)
    yield channel
    channel.close()


@pytest.fixture
async def dealer(context: Context, router: RouterChannel) -> AsyncIterator[DealerChannel]:
    channel = DealerChannel(context, router.endpoint, b"me", LIMIT)
    yield channel
    channel.close()


@pytest.fixture
def pull(context: Context) -> Iterator[PullChannel]:
    channel = PullChannel(HOST, DATA.frame_limit_bytes)
    yield channel
    channel.close()


@pytest.fixture
def push(context: Context, pull: PullChannel) -> Iterator[PushChannel]:
    channel = PushChannel(pull.endpoint)
    yield channel
    channel.close()


async def soon(awaitable: Any) -> Any:
    async with asyncio.timeout(SOON_S):
        return await awaitable


async def sendable(push: PushChannel) -> None:
    """Wait until ``send`` can work; the loop runs on, since it lets the push in."""
    await asyncio.to_thread(push.wait, SOON_S)


def sent_when_possible(pull: PullChannel, push: PushChannel, frames: Sequence[tensors.Bytes]) -> None:
    """Send, waiting for the connection if need be."""
    deadline = monotonic() + SOON_S
    while not push.send(frames):
        assert monotonic() < deadline
        pull.wait(1.0, outgoing=[push])


def received(pull: PullChannel) -> list[bytes]:
    assert pull.wait(SOON_S)
    frames = pull.receive()
    assert frames is not None
    return [bytes(frame) for frame in frames]


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that is gone afterwards, whatever happens."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait(SOON_S)
        assert child.stdout is not None
        child.stdout.close()


# --- router and dealer ------------------------------------------------------------------------------------------------


async def test_a_question_and_its_answer(router: RouterChannel, dealer: DealerChannel) -> None:
    """A dealer hears UP first; from then on it can send, and the router can answer by name."""
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send(CLIENT.encode(Describe()))
    arrived = await soon(anext(router))
    assert arrived.peer == b"me"
    assert CLIENT.decode(arrived.frames) == (Describe(), None)
    assert router.send(b"me", [b"answer", b"payload"])
    assert await soon(anext(dealer)) == [b"answer", b"payload"]


async def test_nobody_there_is_a_value(router: RouterChannel) -> None:
    """Sending to an unknown peer is False, not an exception and not silence."""
    assert router.send(b"nobody", [b"x"]) is False


async def test_a_dealer_without_a_broker_can_not_send(context: Context) -> None:
    """Nothing queues for a broker that isn't there."""
    dealer = DealerChannel(context, f"tcp://{HOST}:{free_port()}", b"me", LIMIT)
    assert dealer.send([b"x"]) is False
    dealer.close()


async def test_a_peer_that_does_not_read_fills_its_own_queue_only(
    context: Context, router: RouterChannel, dealer: DealerChannel
) -> None:
    """send() turns False after a bounded number of messages; another peer is served all the same."""
    other = DealerChannel(context, router.endpoint, b"other", LIMIT)
    for channel in (dealer, other):
        assert await soon(anext(channel)) is ConnectionEvent.CONNECTED
        assert channel.send([b"hello"])
        await soon(anext(router))
    message = [bytes(10_000)]
    taken = next(count for count in range(20_000) if not router.send(b"me", message))
    assert taken >= 1000
    assert router.send(b"other", [b"still"])
    assert await soon(anext(other)) == [b"still"]
    other.close()


async def test_a_killed_peer_is_lost_at_once(router: RouterChannel) -> None:
    """SIGKILL of a process that has spoken becomes PeerLost."""
    knock = """if True:
        import sys, zmq
        dealer = zmq.Context().socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, sys.argv[2].encode())
        dealer.connect(sys.argv[1])
        dealer.send(b"hello")
        dealer.recv()
    """
    with process(knock, router.endpoint, "w0") as first, process(knock, router.endpoint, "w1"):
        arrived = [await soon(anext(router)) for _ in range(2)]
        assert {event.peer for event in arrived} == {b"w0", b"w1"}
        first.kill()
        assert await soon(anext(router)) == PeerDisconnected(b"w0")
        assert router.send(b"w0", [b"x"]) is False
        assert router.send(b"w1", [b"x"]) is True
        assert await soon(anext(router)) == PeerDisconnected(b"w1")  # it had what it waited for, and ended


async def test_a_peer_may_come_back_under_its_name(context: Context, router: RouterChannel) -> None:
    """The same identity from a new connection is served; the old one's end takes nothing away from it."""
    for _ in range(3):
        dealer = DealerChannel(context, router.endpoint, b"me", LIMIT)
        assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
        assert dealer.send([b"hello"])
        event = await soon(anext(router))
        assert isinstance(event, MessageReceived)
        assert router.send(b"me", [b"welcome"])
        assert await soon(anext(dealer)) == [b"welcome"]
        dealer.close()
        assert await soon(anext(router)) == PeerDisconnected(b"me")


async def test_a_dealer_tells_when_its_broker_goes_and_comes(context: Context) -> None:
    """DOWN and UP again: the sign to introduce oneself anew."""
    first = RouterChannel([BindAddress(HOST)], free_port(), LIMIT)
    port = int(first.endpoint.rpartition(":")[2])
    dealer = DealerChannel(context, first.endpoint, b"me", LIMIT)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    first.close()
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    deadline = monotonic() + SOON_S
    while dealer.send([b"to nobody"]):  # the news may be quicker than the socket's own tidying up
        assert monotonic() < deadline
    second = RouterChannel([BindAddress(HOST)], port, LIMIT)
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send([b"hello"])
    assert (await soon(anext(second))).frames == [b"hello"]
    dealer.close()
    second.close()


async def test_a_port_in_use_is_said(context: Context, router: RouterChannel) -> None:
    """A second broker on the port gets a sentence with the remedy, and leaves nothing behind."""
    port = int(router.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port} on {HOST} is in use: is another broker running"):
        RouterChannel([BindAddress(HOST)], port, LIMIT)


async def test_wrong_addresses_are_said(context: Context) -> None:
    """An address of another machine, and what is no endpoint at all."""
    with pytest.raises(ConfigError, match=r"can't listen on tcp://192\.0\.2\.1:5700"):
        RouterChannel([BindAddress("192.0.2.1")], 5700, LIMIT)
    for make in (
        lambda: DealerChannel(context, "nonsense", b"me", LIMIT),
        lambda: PushChannel("nonsense"),
    ):
        with pytest.raises(ConfigError, match="'nonsense' is no endpoint like"):
            make()


async def test_too_large_a_frame_ends_the_connection(router: RouterChannel, dealer: DealerChannel) -> None:
    """It is never taken in; the router goes on with others."""
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send([bytes(LIMIT + 1)])
    overstepped = await soon(anext(router))
    assert overstepped == LimitExceeded(b"me", f"a frame of {LIMIT + 1} bytes was announced, the limit is {LIMIT}")
    assert router.send(b"me", [b"why"])  # it may be told, before it is hung up on
    assert await soon(anext(dealer)) == [b"why"]
    assert await soon(anext(router)) == PeerDisconnected(b"me")
    assert await soon(anext(dealer)) is ConnectionEvent.LOST
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    assert dealer.send([bytes(LIMIT)])
    assert len((await soon(anext(router))).frames[0]) == LIMIT


async def test_noise_on_the_port_disturbs_nobody(router: RouterChannel, dealer: DealerChannel) -> None:
    """Raw bytes that are no ZMTP, and connections that say nothing."""
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(1000)):
        with socket.create_connection((host, int(port)), timeout=SOON_S) as raw:
            raw.sendall(noise)
    assert dealer.send([b"hello"])
    assert (await soon(anext(router))).frames == [b"hello"]


async def test_an_empty_message_is_delivered_as_no_frames(context: Context, router: RouterChannel) -> None:
    """It is for the codec to refuse."""
    with context.socket(zmq.ROUTER) as rude:
        rude.set(zmq.LINGER, 0)
        rude.set(zmq.CONNECT_ROUTING_ID, b"router")
        rude.set(zmq.IDENTITY, b"rude")
        rude.set(zmq.ROUTER_MANDATORY, 1)
        rude.connect(router.endpoint)
        rude.send_multipart([b"router", b""])
        arrived = await soon(anext(router))
    assert arrived.peer == b"rude"
    assert arrived.frames == [b""]


async def test_a_flood_leaves_the_loop_its_turns(router: RouterChannel, dealer: DealerChannel) -> None:
    """A socket that is always ready yields at least every 64 messages."""
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    count = sum(dealer.send([b"x"]) for _ in range(3000))
    assert count >= 1000
    counting = asyncio.create_task(count_turns())
    for _ in range(count):
        await soon(anext(router))
    counting.cancel()
    assert turns >= count // 64


async def test_a_cancelled_wait_loses_no_message(router: RouterChannel, dealer: DealerChannel) -> None:
    """Waiting with a timeout, over and over, while messages arrive: all come, in order."""
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    seen: list[int] = []
    for number in range(300):
        waiting = asyncio.create_task(anext(router))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert dealer.send([number.to_bytes(2, "big")])
        for _ in range(number % 4):
            await asyncio.sleep(0)
        waiting.cancel()
        result = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(result, MessageReceived):
            seen.append(int.from_bytes(result.frames[0], "big"))
    while len(seen) < 300:
        seen.append(int.from_bytes((await soon(anext(router))).frames[0], "big"))
    assert seen == list(range(300))


async def test_what_waits_can_be_taken_without_waiting(context: Context) -> None:
    """``waiting`` gives what has come, in order, and no more than a queue's worth; who iterates gets the rest."""
    beats = AsyncPullChannel([BindAddress(HOST)], LIMIT, HEARTBEAT_QUEUE)
    push = PushChannel(beats.endpoint, HEARTBEAT_QUEUE)
    assert list(beats.pending_events()) == []
    await soon(sendable(push))
    num = HEARTBEAT_QUEUE + 4
    seen, sent = [], 0
    async with asyncio.timeout(SOON_S):
        while len(seen) < num:
            while sent < num and push.send([bytes([sent])]):
                sent += 1
            taken = [bytes(arrived(each)[0])[0] for each in beats.pending_events()]
            assert len(taken) <= HEARTBEAT_QUEUE
            seen += taken
            await asyncio.sleep(0)
        assert push.send([b"last"])
        assert bytes(arrived(await anext(beats))[0]) == b"last"
    assert seen == list(range(num))
    push.close()
    beats.close()


async def test_nothing_is_left_behind(context: Context) -> None:
    """Descriptors of sockets, monitors and wakes go back when channels are closed."""
    async with asyncio.timeout(SOON_S):
        me = psutil.Process()
        before = None
        for round_ in range(4):
            router = RouterChannel([BindAddress(HOST)], 0, LIMIT)
            dealer = DealerChannel(context, router.endpoint, b"me", LIMIT)
            beats = AsyncPullChannel([BindAddress(HOST)], HEARTBEAT.frame_limit_bytes, HEARTBEAT_QUEUE)
            push = PushChannel(beats.endpoint, HEARTBEAT_QUEUE)
            wake = WakeupFd()
            assert await anext(dealer) is ConnectionEvent.CONNECTED
            await sendable(push)
            for thing in (wake, dealer, router, push, beats):
                thing.close()
            if round_ == 0:  # the context's own threads exist from now on
                await settled(me, None)
                before = me.num_fds()
        await settled(me, before)
        assert me.num_fds() <= (before or 0)


async def settled(me: psutil.Process, target: int | None) -> None:
    """Sockets close in ZeroMQ's own thread: wait until the number of descriptors no longer falls, or is ``target``."""
    stable, last = 0, -1
    while stable < 20 and (target is None or me.num_fds() > target):
        stable, last = (stable + 1, last) if me.num_fds() == last else (0, me.num_fds())
        await asyncio.sleep(0.005)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_ipv6(context: Context) -> None:
    """Endpoints with brackets work at both ends."""
    try:
        router = RouterChannel([BindAddress("::1")], 0, LIMIT)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    dealer = DealerChannel(context, router.endpoint, b"me", LIMIT)
    assert router.endpoint.startswith("tcp://[::1]:")
    assert await soon(anext(dealer)) is ConnectionEvent.CONNECTED
    dealer.close()
    router.close()


# --- push and pull ----------------------------------------------------------------------------------------------------


def test_a_step_goes_through(pull: PullChannel, push: PushChannel) -> None:
    """Header and tensor arrive as they were sent."""
    hidden = np.random.default_rng(1).standard_normal((3, 100_000), np.float32)
    spec, data = tensors.pack(hidden)
    step = Step(epoch=1, step=2, rows=(Row(5, 0, 3, True),), tokens=(1, 2, 3), tensor=spec)
    sent_when_possible(pull, push, DATA.encode(step, data))
    assert pull.wait(SOON_S)
    frames = pull.receive()
    assert frames is not None
    arrived, payload = DATA.decode(frames)
    assert arrived == step
    assert payload is not None
    assert np.array_equal(tensors.unpack(spec, payload), hidden)
    assert pull.receive() is None


def test_a_push_without_receiver_can_not_send(context: Context) -> None:
    """IMMEDIATE: nothing queues for the absent."""
    push = PushChannel(f"tcp://{HOST}:{free_port()}")
    assert push.send([b"x"]) is False
    push.close()


def test_a_receiver_that_does_not_read_stops_the_sender(pull: PullChannel, push: PushChannel) -> None:
    """At the high-water mark send() is False, after a few messages and without waiting; order is kept."""
    sent_when_possible(pull, push, [b"\x00", bytes(4_000_000)])
    count = 1
    while push.send([bytes([count]), bytes(4_000_000)]):
        count += 1
    assert count <= 2 * DATA_QUEUE + 4  # two queues, and what the kernel's buffers hold
    assert [received(pull)[0] for _ in range(count)] == [bytes([number]) for number in range(count)]
    sent_when_possible(pull, push, [b"again"])
    assert received(pull) == [b"again"]


CONSUMER = """if True:
    import sys, zmq
    from swarm.wire.pull import PullChannel
    port = int(sys.argv[1])
    pull = PullChannel("127.0.0.1", 1 << 20, range(port, port + 1), key=b"")
    print("ready", flush=True)
    while pull.wait(60):
        print(bytes(pull.receive()[0]).decode(), flush=True)
"""


def test_a_killed_receiver_is_noticed_and_its_successor_gets_nothing_stale(context: Context, pull: PullChannel) -> None:
    """After SIGKILL send() turns False and stays so; a new process at the endpoint gets only what comes after."""
    port = free_port()
    push = PushChannel(f"tcp://{HOST}:{port}")
    with process(CONSUMER, str(port)) as first:
        sent_when_possible(pull, push, [b"one"])
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == [b"ready\n", b"one\n"]
        first.kill()
        first.wait(SOON_S)
        deadline = monotonic() + SOON_S
        while push.send([b"lost"]):  # a send is no delivery: a few may still be taken
            assert monotonic() < deadline
        assert push.send([b"lost"]) is False
    with process(CONSUMER, str(port)) as second:
        sent_when_possible(pull, push, [b"two"])
        assert second.stdout is not None
        assert [second.stdout.readline() for _ in range(2)] == [b"ready\n", b"two\n"]
    push.close()


def test_any_thread_can_wake_the_data_thread(pull: PullChannel) -> None:
    """A set wake ends the wait at once and until it is cleared; without one, the time passes."""
    wake = WakeupFd()
    assert pull.wait(0.01, wake=wake) is False
    threads = [threading.Thread(target=wake.set) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert pull.wait(SOON_S, wake=wake) is True
    for thread in threads:
        thread.join()
    assert pull.wait(SOON_S, wake=wake) is True
    wake.clear()
    assert pull.wait(0, wake=wake) is False
    wake.clear()  # twice does no harm
    wake.close()


def test_who_takes_no_message_now_is_not_woken_by_one(pull: PullChannel, push: PushChannel) -> None:
    """The time passes, without work, as if none were there; a wake ends it. Then all of them are there, in order."""
    for word in (b"one", b"two", b"three"):
        sent_when_possible(pull, push, [word])
    assert pull.wait(SOON_S)
    wake = WakeupFd()
    began, worked_s = monotonic(), thread_time()
    assert not pull.wait(0.5, wake=wake, incoming=False)
    assert monotonic() - began >= 0.45
    assert thread_time() - worked_s < 0.2
    wake.set()
    assert pull.wait(SOON_S, wake=wake, incoming=False)
    assert [received(pull) for _ in range(3)] == [[b"one"], [b"two"], [b"three"]]
    wake.close()


def test_a_wake_works_without_eventfd(pull: PullChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux it is a pipe; setting it for ever does not block."""
    monkeypatch.delattr("os.eventfd", raising=False)
    wake = WakeupFd()
    for _ in range(100_000):
        wake.set()
    assert pull.wait(SOON_S, wake=wake) is True
    while pull.wait(0, wake=wake):
        wake.clear()
    wake.close()


def test_data_ports_are_below_the_ephemeral_range(context: Context, pull: PullChannel) -> None:
    """A connect to a dead local port in the ephemeral range could meet itself."""
    assert int(pull.endpoint.rpartition(":")[2]) in DATA_PORTS
    assert max(DATA_PORTS) < 32768


def test_no_free_port_is_said(context: Context, pull: PullChannel) -> None:
    """All ports of the range taken: one sentence, and nothing stays open."""
    taken = int(pull.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"no free port on {HOST} between {taken} and {taken}"):
        PullChannel(HOST, LIMIT, range(taken, taken + 1))


async def test_beats_of_several_workers(context: Context) -> None:
    """One pull takes in what many push."""
    beats = AsyncPullChannel([BindAddress(HOST)], HEARTBEAT.frame_limit_bytes, HEARTBEAT_QUEUE)
    pushes = [PushChannel(beats.endpoint, HEARTBEAT_QUEUE) for _ in range(3)]
    for number, push in enumerate(pushes):
        await soon(sendable(push))
        assert push.send([bytes([number])])
    assert sorted([bytes(arrived(await soon(anext(beats)))[0]) for _ in pushes]) == [b"\x00", b"\x01", b"\x02"]
    for channel in (*pushes, beats):
        channel.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with bind_free_port(HOST) as probe:
        return int(probe.getsockname()[1])

"""A door decides between its peers: whose turn it is, who has had time enough, who is let in. Real connections over
loopback, a clock that the test moves, and no loop."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swarm.wire.sockets import bind, endpoint_of
from swarm.wire.transport import accept, listener, peers
from swarm.wire.transport.accept import RESERVE, AcceptPaused
from swarm.wire.transport.connection import MESSAGE_S
from swarm.wire.transport.io_loop import PollLoop
from swarm.wire.transport.listener import HANDSHAKE_S, Listener
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected
from swarm.wire.transport.server_handshake import (
    ROUTER,
    Mechanism,
    NullServer,
    Reply,
    encode_command,
    encode_metadata,
    server_mechanism,
)
from swarm.wire.transport.zmtp import command_frame, encode_greeting, frame_header

READY = encode_greeting(b"NULL", is_server=False)
ANYBODY = server_mechanism(ROUTER, b"")
ENOUGH = 200  # looks; what is sent over loopback is there after one or two


class Door:
    """One that a test looks at when it likes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asking: Callable[[], Mechanism] = ANYBODY) -> None:
        self.now = 0.0
        monkeypatch.setattr(listener.time, "monotonic", lambda: self.now)
        bound = bind("127.0.0.1", 0)
        self.port = int(endpoint_of(bound).rpartition(":")[2])
        self.poll = PollLoop()
        self.listener = Listener([(bound, asking)], 1 << 20, self.poll, lambda: None)
        self.peers: list[socket.socket] = []

    def knock(self, name: str, *messages: bytes, shakes: bool = True, source: str = "127.0.0.1") -> socket.socket:
        """Messages are sent with the handshake."""
        raw = socket.create_connection(("127.0.0.1", self.port), source_address=(source, 0))
        self.peers.append(raw)
        words = command_frame(encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=name.encode())))
        raw.sendall((READY + words if shakes else READY) + b"".join(map(message, messages)))
        return raw

    def look(self) -> None:
        """Until all that was sent is there."""
        for _ in range(ENOUGH):
            self.poll.run_ready()

    def taken(self) -> list[Any]:
        self.look()
        events = []
        while (event := self.listener.next_event()) is not None:
            events.append(event)
        return events

    def passes(self, seconds: float) -> list[Any]:
        """It looks every second meanwhile."""
        events = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self.listener.enforce_deadlines()
            events += self.taken()
        return events

    def close(self) -> None:
        for each in (*self.peers, self.listener, self.poll):
            each.close()


def message(*frames: bytes) -> bytes:
    return b"".join(frame_header(len(f), more=index + 1 < len(frames)) + f for index, f in enumerate(frames))


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    made = Door(monkeypatch)
    yield made
    made.close()


def test_peers_take_turns(door: Door) -> None:
    """However many messages one of them has sent at once."""
    door.knock("many", *[b"x"] * 50)
    door.look()
    door.knock("one", b"y")
    arrived = [event.peer for event in door.taken()]
    assert len(arrived) == 51
    assert arrived.index(b"one") <= 1


def test_who_does_not_finish_in_time_goes(door: Door) -> None:
    """A handshake has seconds, a message more of them, and who says nothing may stay."""
    door.knock("late", shakes=False)
    door.knock("quiet", b"hello")
    door.knock("half", b"hello").sendall(frame_header(9, more=False) + b"part")
    assert len(door.taken()) == 2
    assert len(door.listener._connections) == 3
    assert door.passes(HANDSHAKE_S + 1) == []
    assert len(door.listener._connections) == 2
    assert door.passes(MESSAGE_S) == [PeerDisconnected(b"half")]
    assert door.listener.num_refused == 2
    assert door.listener.is_connected(b"quiet")


def test_a_crowd_pushes_nobody_out(door: Door) -> None:
    """Whoever shakes hands slowly, from elsewhere, gets through it."""
    slow = door.knock("slow", shakes=False)
    door.look()
    for number in range(listener._MAX_HANDSHAKES + 20):
        door.knock(f"crowd {number}", shakes=False, source="127.0.0.2")
        door.poll.run_ready()
    door.look()
    assert len(door.listener._connections) == listener._MAX_HANDSHAKES
    assert door.listener.num_refused == 21
    slow.sendall(
        command_frame(encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=b"slow")))
        + message(b"in")
    )
    assert door.taken() == [MessageReceived(b"slow", [b"in"])]


def test_time_in_which_nobody_looked_does_not_count(door: Door) -> None:
    """This process stood still for an hour: what came meanwhile is read before anybody is judged."""
    raw = door.knock("half", b"hello")
    raw.sendall(frame_header(4, more=False) + b"pa")
    assert len(door.taken()) == 1
    door.now += 3600.0
    door.listener.enforce_deadlines()
    raw.sendall(b"rt")
    assert door.taken() == [MessageReceived(b"half", [b"part"])]


def test_the_last_descriptors_are_not_for_newcomers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The door closes while there are some left, and says so once; opened when there are more, it lets in who waits."""
    with socket.socket() as probe:
        limit = probe.fileno() + RESERVE + 2
    monkeypatch.setattr(accept.resource, "getrlimit", lambda _: (limit, limit))
    for number in range(4):
        door.knock(f"w{number}")
    assert door.taken() == [AcceptPaused(errno.EMFILE)]
    assert not door.listener.is_accepting
    monkeypatch.setattr(accept.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    door.listener.resume_accepting()
    door.peers[-1].sendall(message(b"in"))
    assert door.taken() == [MessageReceived(b"w3", [b"in"])]


def test_what_oversteps_is_heard_no_further(door: Door) -> None:
    """Whoever takes is told why; what came before it counts, and what comes after it does not."""
    raw = door.knock("rude", b"fine")
    raw.sendall(b"\x01\x01a" * 3 + message(b"and more"))
    assert door.taken() == [
        MessageReceived(b"rude", [b"fine"]),
        LimitExceeded(b"rude", "a message has at most 2 frames, more were announced"),
    ]
    assert door.passes(3) == [PeerDisconnected(b"rude")]


def test_who_rests_is_neither_read_nor_taken(door: Door) -> None:
    """Until its rest is over; then nothing of what it said is lost, and nothing was read beyond what lay there."""
    raw = door.knock("a", b"1", b"2")
    door.look()
    assert door.listener.next_event() == MessageReceived(b"a", [memoryview(b"1")])
    goes_on = door.listener.pause_reading(b"a")
    assert goes_on is not None
    assert door.listener.pause_reading(b"a") is None  # it rests already
    raw.sendall(message(b"3"))
    assert door.taken() == []
    door.knock("b", b"4")
    assert door.taken() == [MessageReceived(b"b", [memoryview(b"4")])]
    goes_on()
    came = door.taken() + door.taken()  # what lay there; what waited with itself
    assert [bytes(event.frames[0]) for event in came] == [b"2", b"3"]
    # One that has gone meanwhile is noticed then.
    goes_on = door.listener.pause_reading(b"a")
    raw.close()
    assert door.taken() == []
    assert goes_on is not None
    goes_on()
    assert door.taken() + door.taken() == [PeerDisconnected(b"a")]


def test_who_is_hung_up_on_while_it_rests(door: Door) -> None:
    """Is heard no more when its rest is over."""
    door.knock("a", b"1", b"2")
    door.look()
    door.listener.next_event()
    goes_on = door.listener.pause_reading(b"a")
    door.listener.disconnect(b"a")
    assert goes_on is not None
    goes_on()
    assert door.taken() == []
    assert door.listener.pause_reading(b"a") is None
    assert door.listener.pause_reading(b"nobody") is None


class Keyed(NullServer):
    """Who knocks has the key that its name begins with."""

    def handle(self, command: bytes) -> Reply:
        reply = super().handle(command)
        assert self.metadata is not None
        self.key = self.metadata[b"identity"][:1].decode()
        return reply


def test_one_key_has_no_more_connections_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest gives way, and is lost; nobody else's does. Those that have gone count no more."""
    monkeypatch.setattr(peers, "MAX_PER_KEY", 3)
    door = Door(monkeypatch, lambda: Keyed(ROUTER))
    other = door.knock("b1", b"x")
    for number in range(1, 6):
        door.knock(f"a{number}", b"x")
        door.look()
    news = door.taken()
    assert [event.peer for event in news if isinstance(event, MessageReceived)] == [
        b"b1",
        *(b"a%d" % n for n in range(3, 6)),
    ]
    assert sorted(name for name, _ in door.listener.authenticated_peers()) == [b"a3", b"a4", b"a5", b"b1"]
    door.peers[3].close()  # a3
    door.taken()
    door.knock("a6", b"x")
    door.taken()
    assert sorted(name for name, _ in door.listener.authenticated_peers()) == [b"a4", b"a5", b"a6", b"b1"]
    other.close()
    door.taken()
    assert set(door.listener._peers._by_key) == {"a"}
    for each in (*door.peers, door.listener, door.poll):
        each.close()


def test_what_one_key_leaves_unfinished_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all its connections together, and nobody else's goes for it. It may hold two of the largest messages."""
    monkeypatch.setattr(listener, "_MAX_HELD_BYTES", 1 << 16)
    door = Door(monkeypatch, lambda: Keyed(ROUTER))
    for name in ("b1", *(f"a{number}" for number in range(5))):
        door.knock(name).sendall(message(b"x") + frame_header(1 << 20, more=False) + bytes(500_000))
        door.taken()
    assert sum(connection.inlet.num_held for connection in door.listener._connections) < 6 << 20
    assert sorted(name for name, _ in door.listener.authenticated_peers()) == [b"a1", b"a2", b"a3", b"a4", b"b1"]
    door.peers[0].sendall(bytes((1 << 20) - 500_000))
    news = [event for _ in range(9) for event in door.taken()]
    assert [event.peer for event in news if isinstance(event, MessageReceived)] == [b"b1"]
    door.close()


class Kept(PollLoop):
    """Writes at the end of the turn, as a loop does."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        callback(*args)

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Nobody reads: it can't be written."""

    def remove_writer(self, fd: int) -> None:
        """See ``add_writer``."""


def test_what_one_key_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all its connections together; who has another key is told all the same."""
    monkeypatch.setattr(listener, "_MAX_UNREAD_BYTES", 20 << 20)
    monkeypatch.setattr(f"{__name__}.PollLoop", Kept)
    door = Door(monkeypatch, lambda: Keyed(ROUTER))
    for name in ("b1", *(f"a{number}" for number in range(6))):
        door.knock(name, b"x")
    door.taken()
    answer = bytes(8 << 20)
    sent = [door.listener.send(b"a%d" % (number % 6), [answer]) for number in range(60)]
    unread = sum(connection.queued_bytes for connection in door.listener._connections)
    assert 20 << 20 < unread <= (20 << 20) + len(answer) + 64
    assert not any(sent[-40:])
    assert door.listener.send(b"b1", [b"answer"])
    door.close()

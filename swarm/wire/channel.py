"""The sockets that carry messages: every option set here, each with its reason.

Control plane, on an asyncio loop; sends are plain calls that never wait::

    router = RouterChannel([Place(host)], port, CLIENT.frame_limit_bytes)
    async for event in router:                       # Arrived(peer, frames, key) | PeerLost | Overstepped | GateClosed
        router.send(event.peer, SERVER.encode(...))  # False: nobody there, or its queue is full

    dealer = DealerChannel(context, endpoint, identity, SERVER.frame_limit_bytes)
    async for event in dealer:                       # Frames | Link
        dealer.send(CLIENT.encode(...))              # False: not connected, or the queue is full

    beats = AsyncPullChannel([Place(host)], BEAT.frame_limit_bytes, BEAT_QUEUE)
    async for event in beats: ...                    # Arrived | Overstepped | GateClosed

Data plane, all of it in one plain thread::

    wake = Wake()                                    # any thread may call wake.set()
    pull = PullChannel(host, DATA.frame_limit_bytes)
    push = PushChannel(endpoint)                     # one per directed edge and epoch
    pull.wait(timeout_s, wake=wake, outgoing=[push]) # returns when any of them is ready; incoming=False: but for pull
    frames = pull.receive()                          # None: nothing there
    push.send(frames)                                # False: can't be sent now, keep it

Who knocks on the control plane uses libzmq; who listens reads the connections itself (``listener``), within bounds that
libzmq doesn't have; who hands steps on writes them itself (``push``), without a thread in between.
Doors of one direction (``*PullChannel``) have a key, a part of their ``endpoint``: only who was told it is heard.

Every channel is closed with ``close()``, by the thread (or loop) that uses it; then ``context.term()`` returns. The
context is a plain ``zmq.Context``, one per process.

A send that returned True is no delivery: whatever must arrive is acknowledged by messages.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from math import ceil
from typing import Generic, NamedTuple, Self, TypeVar

import zmq

from swarm.errors import ConfigError
from swarm.wire.door.curve import Curve
from swarm.wire.door.keys import KeyPair, Lock, keyed, new_key
from swarm.wire.door.listener import SWEEP_S, Arrived, GateClosed, Listener, Overstepped, PeerLost
from swarm.wire.door.mechanisms import PULL, ROUTER, Kind, Mechanism, asks
from swarm.wire.door.nearby import BackDoor
from swarm.wire.door.nearby import listen as listen_nearby
from swarm.wire.door.relay.outreach import Outreach
from swarm.wire.door.watch import Poll
from swarm.wire.messages import PROTOCOL_VERSION
from swarm.wire.push import PushChannel
from swarm.wire.sockets import (
    DATA_PORTS,
    Context,
    Frames,
    Monitor,
    Socket,
    bind,
    bind_free_port,
    connect,
    descriptor,
    endpoint_of,
    has,
    receive_now,
    send_now,
    set_options,
    unlocked,
)
from swarm.wire.tensors import Bytes
from swarm.wire.wake import Wake

_CONTROL_QUEUE = 1000  # messages per peer; a client that reads slower than this is told so by send() returning False
BEAT_QUEUE = 16  # old beats are worthless
_CONTROL_LINGER_MS = 1000  # a last word (a denial, an end of stream) should still leave when a socket closes
_KNOCK_AGAIN_S = 0.1  # without a descriptor for a new connection
_BATCH = 64  # receiving from a ready socket does not yield to the loop: do it ourselves, every so many messages


class Link(Enum):
    """What became of a dealer's connection. Whoever sees UP introduces itself (again): the peer may be a new one."""

    UP = "up"
    DOWN = "down"
    TURNED_AWAY = "turned away"  # our key does not open that door; nobody knocks any more
    UNHEARD = "unheard"  # hung up on while knocking, which goes on: perhaps the door's key is another one by now


class Place(NamedTuple):
    """Where a door listens; without a lock, whoever reaches it is heard."""

    host: str
    lock: Lock | None = None


# --- control plane: asyncio -------------------------------------------------------------------------------------------

Event = TypeVar("Event")


class _AsyncChannel(Generic[Event]):
    """An asynchronous iterator over what arrives. ``await anext(channel)`` may be cancelled, say by a timeout, at any
    time without losing a message. Made and used within one running loop."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._arrived: deque[Event] = deque()  # never more than _BATCH messages and what became of connections

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._arrived:
            if self._ready.is_set():
                await asyncio.sleep(0)  # a socket that is always ready must not keep the loop for itself
            await self._ready.wait()
            self._ready.clear()
            for _ in range(_BATCH):
                if not self._take():
                    break
            self._look_again()
        return self._arrived.popleft()

    def waiting(self) -> Iterator[Event]:
        """Yield what is there already, in order, without waiting: a queue's worth at most."""
        self._look()
        for _ in range(self._queue):
            while not self._arrived and self._take():
                pass
            if not self._arrived:
                break
            yield self._arrived.popleft()
        if self._arrived:
            self._ready.set()
        self._look_again()

    def _look(self) -> None:
        """Read what is there, where nobody else does."""

    def _take(self) -> bool:
        """Receive one message into ``_arrived``; False if there was none."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """Set ``_ready`` if there is more to take."""
        raise NotImplementedError


class _ListeningChannel(_AsyncChannel[Event]):
    """A channel that listens for those who knock."""

    def __init__(
        self,
        listening: Sequence[tuple[Place, socket.socket]],
        kind: Kind,
        limit_bytes: int,
        queue: int,
        *,
        word: bytes = b"",
    ) -> None:
        super().__init__(queue)
        self._listener = Listener(
            [(bound, _asks(kind, place.lock, word)) for place, bound in listening],
            limit_bytes,
            self._loop,
            self._ready.set,
            lambda key: any(place.lock is not None and place.lock.opens(key) for place, _ in listening),
            names=next(
                (place.lock.names for place, _ in listening if place.lock is not None and place.lock.names), None
            ),
        )
        self._sweeps = self._loop.call_later(SWEEP_S, self._sweep)

    def let_in(self) -> None:
        """Accept whoever knocks again, after GateClosed; it may be told again."""
        self._listener.let_in()

    def reconsider(self) -> None:
        """Hang up on everybody whose key does not open this door any more."""
        self._listener.reconsider()

    def close(self) -> None:
        """End the task that receives first: nothing will wake it any more."""
        self._sweeps.cancel()
        self._listener.close()

    def _look(self) -> None:
        self._listener.look()

    def _look_again(self) -> None:
        if self._listener.has_more:
            self._ready.set()

    def _sweep(self) -> None:
        self._listener.sweep()
        self._sweeps = self._loop.call_later(SWEEP_S, self._sweep)


def _asks(kind: Kind, lock: Lock | None, word: bytes) -> Callable[[], Mechanism]:
    return asks(kind, word) if lock is None else partial(Curve, kind, lock)


def _bound(places: Sequence[Place], port: int) -> list[socket.socket]:
    """All of them, or none. Raises ConfigError."""
    bound: list[socket.socket] = []
    try:
        for place in places:
            bound.append(bind(place.host, port))
    except ConfigError:
        for each in bound:
            each.close()
        raise
    return bound


class RouterChannel(_ListeningChannel[Arrived | PeerLost | Overstepped | GateClosed]):
    """The listening end of a door: messages of many peers, and the news that one has gone. Port 0: any free one; then
    there is one place. ``endpoint``: that of the first place."""

    def __init__(self, places: Sequence[Place], port: int, limit_bytes: int) -> None:
        bound = _bound(places, port)
        super().__init__(list(zip(places, bound, strict=True)), ROUTER, limit_bytes, _CONTROL_QUEUE)
        self.endpoint = endpoint_of(bound[0])
        self._older: dict[bytes, int] = {}  # peers that speak an older version of the protocol, until they are lost

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """False: the peer is not connected, or it does not read and its queue is full."""
        return self._listener.send(peer, frames)

    def has(self, peer: bytes) -> bool:
        """Is it connected, as far as is known?"""
        return self._listener.has(peer)

    def known(self) -> list[tuple[bytes, str]]:
        """Who is connected and has shown a key, with it."""
        return self._listener.known()

    def speaks(self, peer: bytes, version: int) -> None:
        """A peer has said what it understands."""
        if version < PROTOCOL_VERSION and self.has(peer):
            self._older[peer] = version

    def version_of(self, peer: bytes) -> int:
        """In which version a peer is to be spoken to."""
        return self._older.get(peer, PROTOCOL_VERSION)

    def hang_up(self, peer: bytes) -> None:
        """Read a peer no more; it is lost a moment later. What it was told still leaves. Who knocks again is heard."""
        self._listener.hang_up(peer)

    def rest(self, peer: bytes, for_s: float) -> None:
        """Read a peer no more for so long: what it says waits with itself."""
        if (go_on := self._listener.rest(peer)) is not None:
            self._loop.call_later(for_s, go_on)

    def _take(self) -> bool:
        event = self._listener.take()
        if event is not None:
            self._arrived.append(event)
        if isinstance(event, PeerLost):
            self._older.pop(event.peer, None)
        return event is not None


class DealerChannel(_AsyncChannel[Frames | Link]):
    """The knocking end of a door. Connects, and connects again, by itself; says so each time.

    The socket is a plain one that the loop watches. A ZeroMQ descriptor tells of news once (it is edge-triggered), and
    any call on the socket may swallow that; so after every call the socket is asked again whether something is there.
    """

    def __init__(
        self, context: Context, endpoint: str, identity: bytes, limit_bytes: int, pair: KeyPair | None = None
    ) -> None:
        """``pair``: ours, for a door that has a lock (its public key is in the endpoint)."""
        super().__init__(_CONTROL_QUEUE)
        self._context, self._identity, self._limit_bytes = context, identity, limit_bytes
        self._endpoint, self._pair = endpoint, pair
        self._is_lost = False  # the connection
        self._moves = False  # the next connection is to be made with another key of the door's
        self._socket: Socket | None = None  # None: there was no descriptor for a new one
        self._knocks_again: asyncio.TimerHandle | None = None
        self._knock()

    def _knock(self) -> None:
        self._moves = self._is_lost = False
        made = self._context.socket(zmq.DEALER)
        set_options(made, self._limit_bytes, _CONTROL_QUEUE, _CONTROL_LINGER_MS)
        made.set(zmq.IDENTITY, self._identity)
        address = unlocked(made, self._endpoint, self._pair)
        # Nothing queues for a broker that isn't there, to reach it before UP is told.
        made.set(zmq.IMMEDIATE, 1)
        try:
            self._monitor = Monitor(self._context, made)
        except zmq.ZMQError:
            made.close()
            raise
        self._socket = made
        for each in (made, self._monitor.socket):
            self._loop.add_reader(descriptor(each), self._look_again)
        try:
            connect(made, address)
        except ConfigError:
            self.close()
            raise
        self._look_again()

    def send(self, frames: Sequence[Bytes]) -> bool:
        """False: not connected, or the other end does not read and the queue is full."""
        sent = self._socket is not None and send_now(self._socket, frames)
        self._look_again()
        return sent

    def move(self, endpoint: str) -> None:
        """Knock there from the next connection on; the one that stands is kept."""
        self._moves |= endpoint != self._endpoint
        self._endpoint = endpoint

    def renew(self, pair: KeyPair | None = None) -> None:
        """Hang up and knock again: DOWN at once, UP when the new connection stands. With a new socket: the former
        connection's end may come late, and must not be taken for the new one's. ``pair``: ours from now on."""
        self._pair = pair or self._pair
        self.close()
        self._arrived.append(Link.DOWN)
        self._ready.set()
        self._knock_as_soon_as_possible()

    def _knock_as_soon_as_possible(self) -> None:
        """Where there is no descriptor for it, again and again until there is one."""
        try:
            self._knock()
        except zmq.ZMQError:
            self._knocks_again = self._loop.call_later(_KNOCK_AGAIN_S, self._knock_as_soon_as_possible)

    def close(self) -> None:
        """Close the socket. End the task that receives first: nothing will wake it any more."""
        if self._knocks_again is not None:
            self._knocks_again.cancel()
        if self._socket is None:
            return
        for each in (self._socket, self._monitor.socket):
            self._loop.remove_reader(descriptor(each))
        self._monitor.close()
        self._socket.close()
        self._socket = None

    def _take(self) -> bool:
        if self._socket is None:
            return False
        frames = receive_now(self._socket)
        for event in self._monitor.events():  # after the message: UP is told before what came over that connection
            if event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._arrived.append(Link.UP)
            elif event is zmq.Event.DISCONNECTED:
                self._arrived.append(Link.DOWN)
            elif event is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._arrived.append(Link.UNHEARD)
            else:
                self._arrived.append(Link.TURNED_AWAY)
            self._is_lost = event is not zmq.Event.HANDSHAKE_SUCCEEDED
        if frames is not None:
            self._arrived.append([frame.buffer for frame in frames])
        elif self._is_lost and self._moves:
            self.close()
            self._knock_as_soon_as_possible()
        return frames is not None

    def _look_again(self) -> None:
        if self._socket is not None and (has(self._socket, zmq.POLLIN) or has(self._monitor.socket, zmq.POLLIN)):
            self._ready.set()


class AsyncPullChannel(_ListeningChannel[Arrived | Overstepped | GateClosed]):
    """Receives from many senders on an asyncio loop (beats; finished steps), from those who know its key.

    Either at one place without a lock, any free port of ``ports``, or at places that all have the same lock, at
    ``port``: then ``endpoint`` names no host, for each sender has its own way here."""

    def __init__(
        self,
        places: Sequence[Place],
        limit_bytes: int,
        queue: int,
        *,
        ports: range = DATA_PORTS,
        port: int | None = None,
    ) -> None:
        lock = places[0].lock
        if lock is None or port is None:
            word = new_key()
            bound = [bind_free_port(places[0].host, ports)]
            self.endpoint = keyed(endpoint_of(bound[0]), word)
        else:
            word = b""
            bound = _bound(places, port)
            self.endpoint = keyed(f"tcp://*:{port}", lock.pair.public.encode())
        super().__init__(list(zip(places, bound, strict=True)), PULL, limit_bytes, queue, word=word)

    def _take(self) -> bool:
        event = self._listener.take()
        if isinstance(event, Arrived | Overstepped | GateClosed):
            self._arrived.append(event)
        return event is not None


# --- data plane: one plain thread -------------------------------------------------------------------------------------


class PullChannel:
    """The receiving end of data edges, for one plain thread, from those who know its key. Nothing is read but while
    that thread waits or receives: what comes meanwhile is kept by the kernel, and stops the sender when that is
    full."""

    def __init__(
        self,
        host: str,
        limit_bytes: int,
        ports: range = DATA_PORTS,
        *,
        key: bytes | None = None,
        lock: Lock | None = None,
        nearby: bool = False,
    ) -> None:
        """``nearby``: with a back door for this host (``door.nearby``); ``not_nearby`` says why there is none."""
        word = new_key() if key is None else key
        bound = bind_free_port(host, ports)
        shown = word if lock is None else lock.pair.public.encode()
        self.endpoint = keyed(endpoint_of(bound), shown)
        self._poll = Poll()
        self._asks = _asks(PULL, lock, word)
        self._outreach: Outreach | None = None
        doors: list[tuple[socket.socket, Callable[[], Mechanism]]] = [(bound, self._asks)]
        self._back, self.not_nearby = _back_door(shown, bound.getsockname()[1]) if nearby else (None, "")
        if self._back is not None:
            doors.append((self._back.listening, asks(PULL, shown)))
        opens = _anybody if lock is None else lock.opens
        self._listener = Listener(doors, limit_bytes, self._poll, _nothing, opens)
        self._message: Frames | None = None
        self._sender = b""  # of that message
        self.sender_key = ""  # that it has shown; who needs none here has none. Of the message received last
        self._swept_at = time.monotonic()
        self.num_shut = 0  # times that there was no descriptor for who knocked
        self._watch(None, ())

    @property
    def num_refused(self) -> int:
        """Counts who knocked and did not know the key, was too slow or went over a bound."""
        return self._listener.num_refused

    def reconsider(self) -> None:
        """Hang up on everybody whose key does not open this door any more; what waits of theirs is dropped."""
        self._listener.reconsider()
        self._message = None if self._sender and not self._listener.has(self._sender) else self._message

    def reach_out(self, relay: str) -> None:
        """Hear also those who are joined with us at ``tcp://HOST:PORT/TICKET`` from now on, beside those who knock;
        empty: nobody new there. Who is connected stays so. Waits for nothing; raises ConfigError if it is none."""
        if self._outreach is None:
            if not relay:
                return
            self._outreach = Outreach()
            self._poll.add_reader(self._outreach.arrived.fileno(), self._welcome_joined, self._outreach)
        self._outreach.aim(relay)

    def _welcome_joined(self, outreach: Outreach) -> None:
        for connected in outreach.take():
            self._listener.welcome_outside(connected, self._asks)

    def receive(self) -> Frames | None:
        """The next message, None if there is none now."""
        self._look()
        message, self._message = self._message, None
        return message

    def wait(
        self,
        timeout_s: float,
        *,
        wake: Wake | None = None,
        outgoing: Sequence[PushChannel] = (),
        incoming: bool = True,
    ) -> bool:
        """Wait until a message is there, ``wake`` is set or one of ``outgoing`` can send. False: the time passed.
        Without ``incoming``, for who would not take it now, a message ends no wait: one is kept, the rest comes no
        further than the kernel."""
        if wake is not self._wake or outgoing != self._outgoing:
            self._watch(wake, outgoing)
        give_up_at, left_s = time.monotonic() + timeout_s, timeout_s
        while not (incoming and self._has_message()):
            if outgoing and any(channel.asks_for_room() for channel in outgoing):
                return True
            poll = self._all if self._message is None else self._others
            found = poll.poll(ceil(max(0.0, left_s) * 1000))
            if any(each != self._own for each, _ in found) or (found and self._look() and incoming):
                return True
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return self._look() and incoming
        return True

    def _has_message(self) -> bool:
        """Is there one among what was read already?"""
        return self._message is not None or (self._listener.has_more and self._look())

    def _look(self) -> bool:
        """Read what is there, until it is a whole message."""
        for _ in range(_BATCH):
            if self._message is not None:
                break
            event = self._listener.take()
            if isinstance(event, Arrived):
                self._message, self._sender, self.sender_key = event.frames, event.peer, event.key
            elif isinstance(event, GateClosed):
                self.num_shut += 1
            elif event is None and not self._poll.turn():
                break
        if (now := time.monotonic()) - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._listener.sweep()
            self._listener.let_in()
        return self._message is not None

    def _watch(self, wake: Wake | None, outgoing: Sequence[PushChannel]) -> None:
        """Set what ends the waits from now on. Kept, because it seldom changes and every hop waits."""
        self._wake, self._outgoing = wake, outgoing
        self._own = self._poll.fileno()
        self._all, self._others = select.poll(), select.poll()
        self._all.register(self._own, select.POLLIN)
        others: list[PushChannel | Wake] = [*outgoing] if wake is None else [*outgoing, wake]
        for each in others:
            self._all.register(each, select.POLLIN)
            self._others.register(each, select.POLLIN)

    def close(self) -> None:
        if self._back is not None:
            self._back.remove()
        if self._outreach is not None:
            self._poll.remove_reader(self._outreach.arrived.fileno())
            self._outreach.close()
        self._listener.close()
        self._poll.close()


def _back_door(key: bytes, port: int) -> tuple[BackDoor | None, str]:
    """Open it; or why that is not possible."""
    try:
        return listen_nearby(key, port), ""
    except ConfigError as error:
        return None, str(error)


def _anybody(_key: str) -> bool:
    return True


def _nothing() -> None:
    """Wake nobody: who waits in a plain thread asks."""

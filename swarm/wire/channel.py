"""The ends of doors on an asyncio loop; every option of a socket is set in these modules, each with its reason.

Sends are plain calls that never wait::

    router = RouterChannel([Place(host)], port, CLIENT.frame_limit_bytes)
    async for event in router:                       # Arrived(peer, frames, key) | PeerLost | Overstepped | GateClosed
        router.send(event.peer, SERVER.encode(...))  # False: nobody there, or its queue is full

    beats = AsyncPullChannel([Place(host)], BEAT.frame_limit_bytes, BEAT_QUEUE)
    async for event in beats: ...                    # Arrived | Overstepped | GateClosed

Who knocks is a ``DealerChannel`` (``dealer``), which uses libzmq. Who listens reads the connections itself
(``door.listener``), within bounds that libzmq doesn't have. Steps go another way: ``pull`` and ``push``.
Doors of one direction (``*PullChannel``) have a key, a part of their ``endpoint``: only who was told it is heard.

Every channel is closed with ``close()``, by the thread (or loop) that uses it; then ``context.term()`` returns. The
context is a plain ``zmq.Context``, one per process.

A send that returned True is no delivery: whatever must arrive is acknowledged by messages.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from swarm.errors import ConfigError
from swarm.wire.door.curve import asking
from swarm.wire.door.keys import Lock, keyed, new_key
from swarm.wire.door.listener import SWEEP_S, Listener
from swarm.wire.door.mechanisms import PULL, ROUTER, Kind
from swarm.wire.door.peers import Arrived, Overstepped, PeerLost
from swarm.wire.door.strangers import GateClosed
from swarm.wire.messages import PROTOCOL_VERSION
from swarm.wire.sockets import (
    DATA_PORTS,
    bind,
    bind_free_port,
    endpoint_of,
)
from swarm.wire.tensors import Bytes

CONTROL_QUEUE = 1000  # messages per peer; a client that reads slower than this is told so by send() returning False
BEAT_QUEUE = 16  # old beats are worthless
_BATCH = 64  # receiving from a ready socket does not yield to the loop: do it ourselves, every so many messages


class Place(NamedTuple):
    """Where a door listens; without a lock, whoever reaches it is heard."""

    host: str
    lock: Lock | None = None


Event = TypeVar("Event")


class AsyncChannel(Generic[Event]):
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


class _ListeningChannel(AsyncChannel[Event]):
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
            [(bound, asking(kind, place.lock, word)) for place, bound in listening],
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


def _bound(places: Sequence[Place], port: int) -> list[socket.socket]:
    """Bind all of them, or none. Raises ConfigError."""
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
        super().__init__(list(zip(places, bound, strict=True)), ROUTER, limit_bytes, CONTROL_QUEUE)
        self.endpoint = endpoint_of(bound[0])
        self._older: dict[bytes, int] = {}  # peers that speak an older version of the protocol, until they are lost

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """False: the peer is not connected, or it does not read and its queue is full."""
        return self._listener.send(peer, frames)

    def has(self, peer: bytes) -> bool:
        """Is it connected, as far as is known?"""
        return self._listener.has(peer)

    def comes_from(self, peer: bytes) -> str:
        """Return the remote address of its connection; empty: it has none any more."""
        return self._listener.comes_from(peer)

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

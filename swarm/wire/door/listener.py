"""A listening socket and its accepted connections (``connection``), read within limits.

It never blocks. Its owner provides an event loop (``io_loop``) and takes one event after the other: whole messages,
taking turns between the peers, and changes of peers and of the listener.

Limits of every listener
------------------------
* *Frames and bytes* of a message: ``zmtp``. If a peer sends faster than its messages are taken, at most ``_READ_BYTES``
  bytes of it are read; the rest stays with the sender.
* *Bytes of unfinished messages*: ``_MAX_HELD_BYTES`` for all unauthenticated peers of a listener together; the same, or
  two messages of maximum size, for all connections of one key. Beyond that, the oldest unfinished one is disconnected.
* *Time*: ``HANDSHAKE_S`` for the handshake; for a message ``MESSAGE_S`` plus a second per 16 KiB received. Only time in
  which this process was running counts: after a stall, waiting data is read first.
* *Handshakes in progress*: ``_MAX_HANDSHAKES``; ``accept`` decides which one is dropped. Accepting also keeps the last
  ``RESERVE`` descriptors free.
* *Connections* of one key: ``peers``; the oldest is dropped. (It may be half-open.)
* *Unsent data* for one peer: ``connection``; for all connections of one key: ``_MAX_UNREAD_BYTES``.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from swarm.errors import WireError
from swarm.wire.door.connection import Connection, Read
from swarm.wire.door.mechanisms import Mechanism
from swarm.wire.door.peers import Arrived, Overstepped, PeerLost, Peers
from swarm.wire.door.strangers import Entrance, GateClosed, Strangers
from swarm.wire.door.watch import Watch
from swarm.wire.door.zmtp import Inlet, greeting
from swarm.wire.tensors import Bytes

HANDSHAKE_S: Final = 3.0
SWEEP_S: Final = 1.0
_MOST_HELD: Final = 64 << 20
_MOST_UNREAD: Final = 64 << 20  # Per key: one key may have 128 connections and read none of them.
_MOST_SHAKING: Final = 256
_AT_ONCE: Final = 256 << 10  # Bytes of one read.
# Buckets of peers without a key: unauthenticated ones, and those that presented the token.
_STRANGERS, _WORD = "", "word"
_LEAVE_S: Final = 1.0  # Time for sending final messages before a disconnect.

Event = Arrived | PeerLost | Overstepped | GateClosed


class Listener:
    """Listening socket with its connections. ``bound``: listening sockets, each with a factory for the server-side
    handshake. ``on_ready``: called when ``next_event`` may have something. ``is_authorized``: whether the owner of this
    key is still authorized. ``may_use_identity``: see ``keys.AuthPolicy``."""

    def __init__(
        self,
        bound: Sequence[tuple[socket.socket, Callable[[], Mechanism]]],
        limit_bytes: int,
        watch: Watch,
        wake: Callable[[], None],
        opens: Callable[[str], bool] = lambda _: True,
        *,
        names: Callable[[str, bytes], bool] | None = None,
    ) -> None:
        self._opens = opens
        self._limit_bytes = limit_bytes
        self._watch = watch
        self._wake = wake
        self._scratch = memoryview(bytearray(_AT_ONCE))
        self._lent: Connection | None = None  # Connection with unprocessed data in ``_scratch``.
        self._connections: set[Connection] = set()
        self._peers = Peers(names)
        self._shaking: Strangers[Connection] = Strangers(_MOST_SHAKING)  # Handshakes in progress.
        self._unfinished: dict[Connection, None] = {}  # Connections with part of a message; the oldest first.
        self._leaving: list[Connection] = []  # Connections that are to be disconnected at their ``leaves_at``.
        self._ready: deque[Connection] = deque()  # Connections with unprocessed data, in turn.
        self._news: deque[PeerLost | GateClosed] = deque()
        self._held: Counter[str] = Counter()  # Bytes of unfinished messages by bucket, see ``_bucket``.
        self._clock = 0.0  # Seconds in which this process was running and swept.
        self._swept_at = time.monotonic()
        self.num_refused = 0  # Connections that were closed for an exceeded limit, a missed deadline or a wrong key.
        self._entrance = Entrance(bound, watch, begin=self._newcomer, shut=self._shut)
        self.let_in()

    # --- what came ---------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether ``next_event`` may return something now."""
        return bool(self._news or self._ready)

    def take(self) -> Event | None:
        """Return the next event; None until more has arrived."""
        while self._news or self._ready:
            if self._news:
                return self._news.popleft()
            connection = self._ready.popleft()
            connection.is_ready = False
            if connection in self._connections and (event := self._next_of(connection)) is not None:
                return event
        return None

    def has(self, peer: bytes) -> bool:
        return self._peers.get(peer) is not None

    def comes_from(self, peer: bytes) -> str:
        """Return the remote address of the peer's connection; empty if it has none any more."""
        connection = self._peers.get(peer)
        return "" if connection is None else connection.comes_from

    def known(self) -> list[tuple[bytes, str]]:
        """Return the identity and key of every connected peer that authenticated with a key."""
        return self._peers.known()

    def reconsider(self) -> None:
        """Disconnect all peers whose keys are no longer authorized, and drop their unread messages."""
        for connection in [c for c in self._connections if c.inlet.key and not self._opens(c.inlet.key)]:
            self._end(connection, refused=True)

    def look(self) -> None:
        """Accept and read everything that is available, without a notification by the loop."""
        self._entrance.look()
        for connection in list(self._connections):
            if connection.is_watched and not connection.is_ready:
                self._receive(connection)

    def _next_of(self, connection: Connection) -> Event | None:
        """Return the next event of this connection: a message, or an exceeded limit."""
        frames, reason = None, ""
        try:
            frames = connection.inlet.next()
        except WireError as error:
            reason = str(error)
        if reason:
            return self._refuse(connection, reason)
        if frames is None:
            self._wait_for_more(connection)
            return None
        connection.has_spoken = True
        self._unfinished.pop(connection, None)
        self._count(connection)
        if connection.is_over or not connection.is_watched or not connection.inlet.is_empty:
            self._make_ready(connection)  # Its next message takes its turn after those of other peers.
        return Arrived(connection.name, frames, connection.inlet.key)

    def _wait_for_more(self, connection: Connection) -> None:
        if connection.is_over:
            self._end(connection)
            return
        if connection.inlet.num_held and connection not in self._shaking:
            if connection not in self._unfinished:
                self._unfinished[connection] = None
                connection.begins(self._clock)
            self._count(connection)
            if (gives_way := self._beyond(connection)) is not None:
                self._end(gives_way, refused=True)
        if not connection.is_watched and connection in self._connections:
            self._watch_for(connection)

    def _count(self, connection: Connection) -> None:
        """Update the total of bytes in unfinished messages for the connection's bucket."""
        held = connection.inlet.num_held if connection in self._unfinished else 0
        bucket = _bucket(connection)
        self._held[bucket] += held - connection.counted
        connection.counted = held
        if not self._held[bucket]:
            del self._held[bucket]

    def _beyond(self, connection: Connection) -> Connection | None:
        """Return the connection to drop if the bucket of this one exceeds its limit of unfinished data."""
        bucket = _bucket(connection)
        most = _MOST_HELD if bucket == _STRANGERS else max(_MOST_HELD, 2 * self._limit_bytes)
        alike = (each for each in self._unfinished if _bucket(each) == bucket)
        return next(alike) if self._held[bucket] > most else None

    def _shake(self, connection: Connection) -> None:
        """Continue the handshake immediately, regardless of when the owner takes messages."""
        try:
            is_through, refused = connection.inlet.shake(), False
        except WireError:
            is_through, refused = False, True
        answer, connection.inlet.answer = connection.inlet.answer, b""
        if (answer and not connection.say(answer)) or refused:
            self._end(connection, refused=refused)
        elif is_through:
            self._welcome(connection)
            if connection in self._connections:
                self._make_ready(connection)  # A message may have arrived together with the end of the handshake.

    def _welcome(self, connection: Connection) -> None:
        """Register a connection whose handshake is complete."""
        self._shaking.passes(connection)
        if not connection.inlet.identity:
            connection.inlet.identity = secrets.token_bytes(16)
        gives_way = self._peers.enter(connection)
        if gives_way is None:
            self._end(connection, refused=True)
            return
        if gives_way.oldest is not None:
            self._end(gives_way.oldest, refused=True)
        if gives_way.former is not None:
            self._end(gives_way.former)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _watch_for(self, connection: Connection) -> None:
        connection.is_watched = True
        self._watch.add_reader(connection.fd, self._readable, connection)

    def _unwatch(self, connection: Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._watch.remove_reader(connection.fd)

    def _readable(self, connection: Connection) -> None:
        if connection.is_ready:  # Earlier data is not processed yet: pause reading.
            self._unwatch(connection)
        elif connection.is_watched:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        if self._lent is not None:
            self._lent.inlet.keep()
        self._lent = connection
        match connection.receive(self._scratch):
            case Read.SOME if connection in self._shaking:
                self._shake(connection)
            case Read.SOME:
                self._make_ready(connection)
            case Read.PART:
                self._wait_for_more(connection)
            case Read.END:
                connection.is_over = True
                self._unwatch(connection)
                self._make_ready(connection)

    def _make_ready(self, connection: Connection) -> None:
        if not connection.is_ready:
            connection.is_ready = True
            self._ready.append(connection)
            self._wake()

    # --- coming and going --------------------------------------------------------------------------------------------

    def let_in(self) -> None:
        self._entrance.open()

    @property
    def is_open(self) -> bool:
        return self._entrance.is_open

    def welcome_outside(self, connected: socket.socket, asks: Callable[[], Mechanism]) -> None:
        """Add a connection that this process opened itself (to a relay), for a peer that shall be accepted here."""
        try:
            came_from = connected.getpeername()
        except OSError:  # Gone already.
            connected.close()
            return
        self._entrance.take(connected, came_from, asks)

    def _shut(self, code: int) -> None:
        self._news.append(GateClosed(code))
        self._wake()

    def _newcomer(self, connected: socket.socket, source: str, asks: Callable[[], Mechanism]) -> bool:
        """Start the handshake of a new connection, unless its source has failed too often."""
        if not self._shaking.is_heard(source, self._clock):
            self.num_refused += 1
            connected.close()
            return False
        self._begin(connected, source, asks())
        return True

    def _begin(self, connected: socket.socket, source: str, how: Mechanism) -> None:
        try:
            connection = Connection(connected, Inlet(self._limit_bytes, how), self._clock)
        except OSError:  # Gone already.
            connected.close()
            return
        if not connection.say(greeting(how.name)):
            connection.close()
            return
        self._connections.add(connection)
        self._watch_for(connection)
        if (gives_way := self._shaking.add(connection, source, self._clock)) is not None:
            self._end(gives_way, refused=True)

    def _refuse(self, connection: Connection, reason: str) -> Overstepped:
        self.num_refused += 1
        connection.has_spoken = True  # Its loss must be reported, too.
        self._unfinished.pop(connection, None)
        self._count(connection)
        self.hang_up(connection.name)
        return Overstepped(connection.name, reason)

    def hang_up(self, peer: bytes) -> None:
        """Stop reading from a peer and disconnect it a moment later, after queued messages have been sent."""
        connection = self._peers.get(peer)
        if connection is not None and connection.leaves_at is None:
            self._put_aside(connection)
            connection.leaves_at = self._clock + _LEAVE_S
            self._leaving.append(connection)

    def rest(self, peer: bytes) -> Callable[[], None] | None:
        """Stop reading and processing a peer. Return a function that resumes it, or None if it is not connected or
        paused already."""
        connection = self._peers.get(peer)
        if connection is None or connection.leaves_at is not None or connection.rests:
            return None
        self._put_aside(connection)
        connection.rests = True
        return lambda: self._go_on(connection)

    def _go_on(self, connection: Connection) -> None:
        connection.rests = False
        if connection in self._connections and connection.leaves_at is None:
            connection.is_ready = False
            self._make_ready(connection)

    def _put_aside(self, connection: Connection) -> None:
        self._unwatch(connection)
        connection.is_ready = True  # A connection that counts as ready is not read.
        with contextlib.suppress(ValueError):
            self._ready.remove(connection)

    def _end(self, connection: Connection, *, refused: bool = False) -> None:
        if connection not in self._connections:
            return
        self.num_refused += refused
        self._connections.discard(connection)
        self._shaking.fails(connection, self._clock)
        self._unfinished.pop(connection, None)
        self._count(connection)
        self._unwatch(connection)
        if connection.writes:
            self._watch.remove_writer(connection.fd)
        connection.close()
        if self._peers.leave(connection) and connection.has_spoken:
            self._news.append(PeerLost(connection.name))
            self._wake()

    def sweep(self) -> None:
        """Close connections that missed a deadline. Call it about every ``SWEEP_S``."""
        now = time.monotonic()
        self._clock += min(now - self._swept_at, 2 * SWEEP_S)
        self._swept_at = now
        for connection in [c for c in self._shaking if self._clock - c.since > HANDSHAKE_S]:
            self._end(connection, refused=True)
        for connection in [c for c in self._unfinished if self._clock > c.give_up_at]:
            self._end(connection, refused=True)
        for connection in self._leaving:
            if connection.leaves_at is not None and self._clock >= connection.leaves_at:
                self._end(connection)
        self._leaving = [c for c in self._leaving if c in self._connections]

    def close(self) -> None:
        """Close the listener. Sent messages may still leave for one second in total; slow readers don't delay
        others."""
        self._entrance.close()
        for connection in self._connections:
            connection.write()
        give_up_at = time.monotonic() + _LEAVE_S
        for connection in list(self._connections):
            connection.finish(give_up_at)
            self._end(connection)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """Queue a message; all queued messages are written at the end of this turn of the loop. Return False if the
        peer is not connected, or does not read and its queue is full."""
        connection = self._peers.get(peer)
        if connection is None or connection.is_full or self._peers.num_queued(connection) > _MOST_UNREAD:
            return False
        if not connection.out:
            self._watch.call_soon(self._flush, connection)
        connection.queue(frames)
        return True

    def _flush(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        if not connection.write():
            connection.is_over = True
            if connection.leaves_at is None:
                self._unwatch(connection)
                self._make_ready(connection)
        if bool(connection.out) is not connection.writes:
            connection.writes = bool(connection.out)
            if connection.writes:
                self._watch.add_writer(connection.fd, self._flush, connection)
            else:
                self._watch.remove_writer(connection.fd)


def _bucket(connection: Connection) -> str:
    """Return the group that shares this connection's limit for unfinished messages: its key, or a constant."""
    return connection.inlet.key or (_WORD if connection.inlet.is_believed else _STRANGERS)

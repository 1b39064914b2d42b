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
from swarm.wire.tensors import Bytes
from swarm.wire.transport.accept import Acceptor, AcceptPaused, HandshakeLimiter
from swarm.wire.transport.connection import Connection, ReadResult
from swarm.wire.transport.io_loop import IoLoop
from swarm.wire.transport.peers import LimitExceeded, MessageReceived, PeerDisconnected, PeerTable
from swarm.wire.transport.server_handshake import Mechanism
from swarm.wire.transport.zmtp import ZmtpDecoder, encode_greeting

HANDSHAKE_S: Final = 3.0
SWEEP_S: Final = 1.0
_MAX_HELD_BYTES: Final = 64 << 20
_MAX_UNREAD_BYTES: Final = 64 << 20  # Per key: one key may have 128 connections and read none of them.
_MAX_HANDSHAKES: Final = 256
_READ_BYTES: Final = 256 << 10  # Bytes of one read.
# Buckets of peers without a key: unauthenticated ones, and those that presented the token.
_UNAUTHENTICATED, _WITH_TOKEN = "", "word"
_LEAVE_S: Final = 1.0  # Time for sending final messages before a disconnect.

Event = MessageReceived | PeerDisconnected | LimitExceeded | AcceptPaused


class Listener:
    """Listening socket with its connections. ``bound``: listening sockets, each with a factory for the server-side
    handshake. ``on_ready``: called when ``next_event`` may have something. ``is_authorized``: whether the owner of this
    key is still authorized. ``may_use_identity``: see ``keys.AuthPolicy``."""

    def __init__(
        self,
        bound: Sequence[tuple[socket.socket, Callable[[], Mechanism]]],
        limit_bytes: int,
        io_loop: IoLoop,
        on_ready: Callable[[], None],
        is_authorized: Callable[[str], bool] = lambda _: True,
        *,
        may_use_identity: Callable[[str, bytes], bool] | None = None,
    ) -> None:
        self._is_authorized = is_authorized
        self._limit_bytes = limit_bytes
        self._io_loop = io_loop
        self._on_ready = on_ready
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._scratch_user: Connection | None = None  # Connection with unprocessed data in ``_scratch``.
        self._connections: set[Connection] = set()
        self._peers = PeerTable(may_use_identity)
        self._handshaking: HandshakeLimiter[Connection] = HandshakeLimiter(_MAX_HANDSHAKES)  # Handshakes in progress.
        self._unfinished: dict[Connection, None] = {}  # Connections with part of a message; the oldest first.
        self._leaving: list[Connection] = []  # Connections that are to be disconnected at their ``leaves_at``.
        self._ready: deque[Connection] = deque()  # Connections with unprocessed data, in turn.
        self._pending_events: deque[PeerDisconnected | AcceptPaused] = deque()
        self._held_bytes: Counter[str] = Counter()  # Bytes of unfinished messages by bucket, see ``_bucket``.
        self._clock = 0.0  # Seconds in which this process was running and swept.
        self._swept_at = time.monotonic()
        self.num_refused = 0  # Connections that were closed for an exceeded limit, a missed deadline or a wrong key.
        self._acceptor = Acceptor(bound, io_loop, on_connection=self._on_connection, on_paused=self._on_accept_paused)
        self.resume_accepting()

    # --- what came ---------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether ``next_event`` may return something now."""
        return bool(self._pending_events or self._ready)

    def next_event(self) -> Event | None:
        """Return the next event; None until more has arrived."""
        while self._pending_events or self._ready:
            if self._pending_events:
                return self._pending_events.popleft()
            connection = self._ready.popleft()
            connection.is_ready = False
            if connection in self._connections and (event := self._next_event_of(connection)) is not None:
                return event
        return None

    def is_connected(self, peer: bytes) -> bool:
        return self._peers.get(peer) is not None

    def remote_address(self, peer: bytes) -> str:
        """Return the remote address of the peer's connection; empty if it has none any more."""
        connection = self._peers.get(peer)
        return "" if connection is None else connection.remote_address

    def authenticated_peers(self) -> list[tuple[bytes, str]]:
        """Return the identity and key of every connected peer that authenticated with a key."""
        return self._peers.authenticated_peers()

    def drop_unauthorized(self) -> None:
        """Disconnect all peers whose keys are no longer authorized, and drop their unread messages."""
        for connection in [c for c in self._connections if c.inlet.key and not self._is_authorized(c.inlet.key)]:
            self._close_connection(connection, refused=True)

    def poll(self) -> None:
        """Accept and read everything that is available, without a notification by the loop."""
        self._acceptor.accept_pending()
        for connection in list(self._connections):
            if connection.is_watched and not connection.is_ready:
                self._receive(connection)

    def _next_event_of(self, connection: Connection) -> Event | None:
        """Return the next event of this connection: a message, or an exceeded limit."""
        frames, reason = None, ""
        try:
            frames = connection.inlet.next()
        except WireError as error:
            reason = str(error)
        if reason:
            return self._reject(connection, reason)
        if frames is None:
            self._wait_for_more(connection)
            return None
        connection.has_spoken = True
        self._unfinished.pop(connection, None)
        self._count(connection)
        if connection.is_over or not connection.is_watched or not connection.inlet.is_empty:
            self._make_ready(connection)  # Its next message takes its turn after those of other peers.
        return MessageReceived(connection.name, frames, connection.inlet.key)

    def _wait_for_more(self, connection: Connection) -> None:
        if connection.is_over:
            self._close_connection(connection)
            return
        if connection.inlet.num_held and connection not in self._handshaking:
            if connection not in self._unfinished:
                self._unfinished[connection] = None
                connection.start_message(self._clock)
            self._count(connection)
            if (gives_way := self._over_limit(connection)) is not None:
                self._close_connection(gives_way, refused=True)
        if not connection.is_watched and connection in self._connections:
            self._start_reading(connection)

    def _count(self, connection: Connection) -> None:
        """Update the total of bytes in unfinished messages for the connection's bucket."""
        held = connection.inlet.num_held if connection in self._unfinished else 0
        bucket = _bucket(connection)
        self._held_bytes[bucket] += held - connection.counted
        connection.counted = held
        if not self._held_bytes[bucket]:
            del self._held_bytes[bucket]

    def _over_limit(self, connection: Connection) -> Connection | None:
        """Return the connection to drop if the bucket of this one exceeds its limit of unfinished data."""
        bucket = _bucket(connection)
        limit = _MAX_HELD_BYTES if bucket == _UNAUTHENTICATED else max(_MAX_HELD_BYTES, 2 * self._limit_bytes)
        same_bucket = (each for each in self._unfinished if _bucket(each) == bucket)
        return next(same_bucket) if self._held_bytes[bucket] > limit else None

    def _advance_handshake(self, connection: Connection) -> None:
        """Continue the handshake immediately, regardless of when the owner takes messages."""
        try:
            is_through, refused = connection.inlet.advance_handshake(), False
        except WireError:
            is_through, refused = False, True
        answer, connection.inlet.answer = connection.inlet.answer, b""
        if (answer and not connection.send_handshake(answer)) or refused:
            self._close_connection(connection, refused=refused)
        elif is_through:
            self._register(connection)
            if connection in self._connections:
                self._make_ready(connection)  # A message may have arrived together with the end of the handshake.

    def _register(self, connection: Connection) -> None:
        """Register a connection whose handshake is complete."""
        self._handshaking.on_success(connection)
        if not connection.inlet.identity:
            connection.inlet.identity = secrets.token_bytes(16)
        evicted = self._peers.register(connection)
        if evicted is None:
            self._close_connection(connection, refused=True)
            return
        if evicted.oldest is not None:
            self._close_connection(evicted.oldest, refused=True)
        if evicted.former is not None:
            self._close_connection(evicted.former)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _start_reading(self, connection: Connection) -> None:
        connection.is_watched = True
        self._io_loop.add_reader(connection.fd, self._readable, connection)

    def _unwatch(self, connection: Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._io_loop.remove_reader(connection.fd)

    def _readable(self, connection: Connection) -> None:
        if connection.is_ready:  # Earlier data is not processed yet: pause reading.
            self._unwatch(connection)
        elif connection.is_watched:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        if self._scratch_user is not None:
            self._scratch_user.inlet.copy_unread()
        self._scratch_user = connection
        match connection.receive(self._scratch):
            case ReadResult.SOME if connection in self._handshaking:
                self._advance_handshake(connection)
            case ReadResult.SOME:
                self._make_ready(connection)
            case ReadResult.PART:
                self._wait_for_more(connection)
            case ReadResult.END:
                connection.is_over = True
                self._unwatch(connection)
                self._make_ready(connection)

    def _make_ready(self, connection: Connection) -> None:
        if not connection.is_ready:
            connection.is_ready = True
            self._ready.append(connection)
            self._on_ready()

    # --- coming and going --------------------------------------------------------------------------------------------

    def resume_accepting(self) -> None:
        self._acceptor.resume()

    @property
    def is_accepting(self) -> bool:
        return self._acceptor.is_accepting

    def add_outgoing(self, connected: socket.socket, new_mechanism: Callable[[], Mechanism]) -> None:
        """Add a connection that this process opened itself (to a relay), for a peer that shall be accepted here."""
        try:
            address = connected.getpeername()
        except OSError:  # Gone already.
            connected.close()
            return
        self._acceptor.start(connected, address, new_mechanism)

    def _on_accept_paused(self, code: int) -> None:
        self._pending_events.append(AcceptPaused(code))
        self._on_ready()

    def _on_connection(self, connected: socket.socket, source: str, new_mechanism: Callable[[], Mechanism]) -> bool:
        """Start the handshake of a new connection, unless its source has failed too often."""
        if not self._handshaking.is_allowed(source, self._clock):
            self.num_refused += 1
            connected.close()
            return False
        self._start(connected, source, new_mechanism())
        return True

    def _start(self, connected: socket.socket, source: str, mechanism: Mechanism) -> None:
        try:
            connection = Connection(connected, ZmtpDecoder(self._limit_bytes, mechanism), self._clock)
        except OSError:  # Gone already.
            connected.close()
            return
        if not connection.send_handshake(encode_greeting(mechanism.name)):
            connection.close()
            return
        self._connections.add(connection)
        self._start_reading(connection)
        if (gives_way := self._handshaking.add(connection, source, self._clock)) is not None:
            self._close_connection(gives_way, refused=True)

    def _reject(self, connection: Connection, reason: str) -> LimitExceeded:
        self.num_refused += 1
        connection.has_spoken = True  # Its loss must be reported, too.
        self._unfinished.pop(connection, None)
        self._count(connection)
        self.disconnect(connection.name)
        return LimitExceeded(connection.name, reason)

    def disconnect(self, peer: bytes) -> None:
        """Stop reading from a peer and disconnect it a moment later, after queued messages have been sent."""
        connection = self._peers.get(peer)
        if connection is not None and connection.leaves_at is None:
            self._stop_reading(connection)
            connection.leaves_at = self._clock + _LEAVE_S
            self._leaving.append(connection)

    def pause_reading(self, peer: bytes) -> Callable[[], None] | None:
        """Stop reading and processing a peer. Return a function that resumes it, or None if it is not connected or
        paused already."""
        connection = self._peers.get(peer)
        if connection is None or connection.leaves_at is not None or connection.rests:
            return None
        self._stop_reading(connection)
        connection.rests = True
        return lambda: self._resume_reading(connection)

    def _resume_reading(self, connection: Connection) -> None:
        connection.rests = False
        if connection in self._connections and connection.leaves_at is None:
            connection.is_ready = False
            self._make_ready(connection)

    def _stop_reading(self, connection: Connection) -> None:
        self._unwatch(connection)
        connection.is_ready = True  # A connection that counts as ready is not read.
        with contextlib.suppress(ValueError):
            self._ready.remove(connection)

    def _close_connection(self, connection: Connection, *, refused: bool = False) -> None:
        if connection not in self._connections:
            return
        self.num_refused += refused
        self._connections.discard(connection)
        self._handshaking.on_failure(connection, self._clock)
        self._unfinished.pop(connection, None)
        self._count(connection)
        self._unwatch(connection)
        if connection.writes:
            self._io_loop.remove_writer(connection.fd)
        connection.close()
        if self._peers.remove(connection) and connection.has_spoken:
            self._pending_events.append(PeerDisconnected(connection.name))
            self._on_ready()

    def enforce_deadlines(self) -> None:
        """Close connections that missed a deadline. Call it about every ``SWEEP_S``."""
        now = time.monotonic()
        self._clock += min(now - self._swept_at, 2 * SWEEP_S)
        self._swept_at = now
        for connection in [c for c in self._handshaking if self._clock - c.since > HANDSHAKE_S]:
            self._close_connection(connection, refused=True)
        for connection in [c for c in self._unfinished if self._clock > c.message_deadline]:
            self._close_connection(connection, refused=True)
        for connection in self._leaving:
            if connection.leaves_at is not None and self._clock >= connection.leaves_at:
                self._close_connection(connection)
        self._leaving = [c for c in self._leaving if c in self._connections]

    def close(self) -> None:
        """Close the listener. Sent messages may still leave for one second in total; slow readers don't delay
        others."""
        self._acceptor.close()
        for connection in self._connections:
            connection.write()
        give_up_at = time.monotonic() + _LEAVE_S
        for connection in list(self._connections):
            connection.finish(give_up_at)
            self._close_connection(connection)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """Queue a message; all queued messages are written at the end of this turn of the loop. Return False if the
        peer is not connected, or does not read and its queue is full."""
        connection = self._peers.get(peer)
        if connection is None or connection.is_full or self._peers.num_queued(connection) > _MAX_UNREAD_BYTES:
            return False
        if not connection.out:
            self._io_loop.call_soon(self._flush, connection)
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
                self._io_loop.add_writer(connection.fd, self._flush, connection)
            else:
                self._io_loop.remove_writer(connection.fd)


def _bucket(connection: Connection) -> str:
    """Return the group that shares this connection's limit for unfinished messages: its key, or a constant."""
    return connection.inlet.key or (_WITH_TOKEN if connection.inlet.is_authenticated else _UNAUTHENTICATED)

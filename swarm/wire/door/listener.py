"""A door: a listening socket and the connections that came in there (``connection``), read within bounds.

It waits for nobody. Its owner watches descriptors for it (``watch``) and takes one event after the other: whole
messages, in turns between the peers, and what became of peers and of the door.

Bounds, at every door
---------------------
* *Parts and bytes* of a message: ``zmtp``. Of a peer that sends faster than its messages are taken, nothing is read
  beyond ``_AT_ONCE``; the rest stays with the sender.
* *Bytes of unfinished messages*: ``_MOST_HELD`` for all strangers of a door together, and as much, or two messages of
  the largest size, for all connections of one key. Beyond that, the one that has been under way for longest goes.
* *Time*: the handshake has ``HANDSHAKE_S``, a message ``MESSAGE_S`` and a second more for each 16 KiB that came. Only
  time in which we looked counts: if this process stood still, what came meanwhile is read first.
* *Strangers*: ``_MOST_SHAKING`` handshakes at a time; who gives way, ``strangers`` says. There, too, newcomers are
  accepted: the last ``RESERVE`` descriptors are not for them.
* *Connections* of one key: ``peers``; the oldest gives way. (It may be half of one that nobody has ended.)
* *What waits to be sent* to one peer: ``connection``; to all connections of one key: ``_MOST_UNREAD``.
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
_MOST_UNREAD: Final = 64 << 20  # of one key: it may have 128 connections, and read none of them
_MOST_SHAKING: Final = 256
_AT_ONCE: Final = 256 << 10  # bytes of one reading
_STRANGERS, _WORD = "", "word"  # who has shown nothing; who has named the door's word
_LEAVE_S: Final = 1.0  # for last words to who is hung up on

Event = Arrived | PeerLost | Overstepped | GateClosed


class Listener:
    """See the module's text. ``bound``: the sockets that listen, and for each what makes the mechanism by which the
    next newcomer there shows whether it may be heard. ``wake`` is called when there may be something to take.
    ``opens``: may who has shown this key still speak here? ``names``: see ``keys.Lock``."""

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
        self._lent: Connection | None = None  # what it has not taken yet of what came may lie there
        self._connections: set[Connection] = set()
        self._peers = Peers(names)
        self._shaking: Strangers[Connection] = Strangers(_MOST_SHAKING)
        self._unfinished: dict[Connection, None] = {}  # has part of a message; the oldest first
        self._leaving: list[Connection] = []
        self._ready: deque[Connection] = deque()
        self._news: deque[PeerLost | GateClosed] = deque()
        self._held: Counter[str] = Counter()  # by key
        self._clock = 0.0  # of time in which we looked
        self._swept_at = time.monotonic()
        self.num_refused = 0  # who overstepped, was too slow or did not know the key
        self._entrance = Entrance(bound, watch, begin=self._newcomer, shut=self._shut)
        self.let_in()

    # --- what came ---------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """May there be something to take?"""
        return bool(self._news or self._ready)

    def take(self) -> Event | None:
        """The next event; None until more has come."""
        while self._news or self._ready:
            if self._news:
                return self._news.popleft()
            connection = self._ready.popleft()
            connection.is_ready = False
            if connection in self._connections and (event := self._next_of(connection)) is not None:
                return event
        return None

    def has(self, peer: bytes) -> bool:
        """Is it connected?"""
        return self._peers.get(peer) is not None

    def comes_from(self, peer: bytes) -> str:
        """Return the remote address of its connection; empty: it has none any more."""
        connection = self._peers.get(peer)
        return "" if connection is None else connection.comes_from

    def known(self) -> list[tuple[bytes, str]]:
        """Who is connected and has shown a key, with it."""
        return self._peers.known()

    def reconsider(self) -> None:
        """Hang up at once on everybody whose key does not open this door any more; what came of them is not heard."""
        for connection in [c for c in self._connections if c.inlet.key and not self._opens(c.inlet.key)]:
            self._end(connection, refused=True)

    def look(self) -> None:
        """Read whatever is there, without waiting to be told."""
        self._entrance.look()
        for connection in list(self._connections):
            if connection.is_watched and not connection.is_ready:
                self._receive(connection)

    def _next_of(self, connection: Connection) -> Event | None:
        """A message of this peer, or what became of it."""
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
            self._make_ready(connection)  # its next one, if there is one already, comes after those of others
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
        """Count what has come of unfinished messages: it is bounded for all strangers together, and for each key."""
        held = connection.inlet.num_held if connection in self._unfinished else 0
        bucket = _bucket(connection)
        self._held[bucket] += held - connection.counted
        connection.counted = held
        if not self._held[bucket]:
            del self._held[bucket]

    def _beyond(self, connection: Connection) -> Connection | None:
        """Whose unfinished message is dropped, if too much has come of messages like this one's."""
        bucket = _bucket(connection)
        most = _MOST_HELD if bucket == _STRANGERS else max(_MOST_HELD, 2 * self._limit_bytes)
        alike = (each for each in self._unfinished if _bucket(each) == bucket)
        return next(alike) if self._held[bucket] > most else None

    def _shake(self, connection: Connection) -> None:
        """The handshake goes on: at once, whoever takes messages when."""
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
                self._make_ready(connection)  # a message may have come with it

    def _welcome(self, connection: Connection) -> None:
        """The handshake is through."""
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
        if connection.is_ready:  # not all that came before has been taken: no more for now
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
        """Accept whoever knocks (again)."""
        self._entrance.open()

    @property
    def is_open(self) -> bool:
        return self._entrance.is_open

    def welcome_outside(self, connected: socket.socket, asks: Callable[[], Mechanism]) -> None:
        """Take a connection that did not come in at the door, but was opened outwards for who shall be heard here."""
        try:
            came_from = connected.getpeername()
        except OSError:  # gone already
            connected.close()
            return
        self._entrance.take(connected, came_from, asks)

    def _shut(self, code: int) -> None:
        self._news.append(GateClosed(code))
        self._wake()

    def _newcomer(self, connected: socket.socket, source: str, asks: Callable[[], Mechanism]) -> bool:
        """Begin with a newcomer, if its source is heard."""
        if not self._shaking.is_heard(source, self._clock):
            self.num_refused += 1
            connected.close()
            return False
        self._begin(connected, source, asks())
        return True

    def _begin(self, connected: socket.socket, source: str, how: Mechanism) -> None:
        try:
            connection = Connection(connected, Inlet(self._limit_bytes, how), self._clock)
        except OSError:  # gone already
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
        connection.has_spoken = True  # that it is lost will be told, too
        self._unfinished.pop(connection, None)
        self._count(connection)
        self.hang_up(connection.name)
        return Overstepped(connection.name, reason)

    def hang_up(self, peer: bytes) -> None:
        """No more is read from it; what it was told still leaves. It is lost a moment later."""
        connection = self._peers.get(peer)
        if connection is not None and connection.leaves_at is None:
            self._put_aside(connection)
            connection.leaves_at = self._clock + _LEAVE_S
            self._leaving.append(connection)

    def rest(self, peer: bytes) -> Callable[[], None] | None:
        """Read it no more, nor take what has come of it, until what is returned is called."""
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
        connection.is_ready = True  # so that it is read no more
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
        """Hang up on who takes too long. To be called about every ``SWEEP_S``."""
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
        """Close the door. What was sent may still leave, for a second; who does not read takes no time from others."""
        self._entrance.close()
        for connection in self._connections:
            connection.write()
        give_up_at = time.monotonic() + _LEAVE_S
        for connection in list(self._connections):
            connection.finish(give_up_at)
            self._end(connection)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """Put a message behind those that wait; all leave at the end of this turn. False: the peer is not there, or it
        does not read and enough waits for it."""
        connection = self._peers.get(peer)
        if connection is None or connection.is_full or self._peers.num_queued(connection) > _MOST_UNREAD:
            return False
        if not connection.out:
            self._watch.call_soon(self._flush, connection)
        connection.queue(frames)
        return True

    def _flush(self, connection: Connection) -> None:
        """Send what can be sent now."""
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
    """With which others a connection shares its bound of unfinished messages."""
    return connection.inlet.key or (_WORD if connection.inlet.is_believed else _STRANGERS)

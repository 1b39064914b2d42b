"""A door: a listening socket and the connections that came in there, read within bounds (``zmtp``).

It waits for nobody. Whoever owns it watches descriptors for it (an asyncio loop, or ``Poll`` in a plain thread) and
takes one event after the other: whole messages, in turns between the peers, and what became of peers and of the door.

Bounds, at every door
---------------------
* *Parts and bytes* of a message: ``zmtp``. Of a peer that sends faster than its messages are taken, nothing is read
  beyond ``_AT_ONCE``; the rest stays with the sender.
* *Bytes of unfinished messages*, all of a door together: ``_MOST_HELD``. Beyond that, the one that has been under way
  for longest goes. (Who has named a door's key may hold one message each, as large as the door takes.)
* *Time*: the handshake has ``HANDSHAKE_S``, a message ``MESSAGE_S`` and a second more for each ``_SLOWEST`` bytes that
  came. Only time in which we looked counts: if this process stood still, what came meanwhile is read first.
* *Strangers*: ``_MOST_SHAKING`` handshakes at a time; the oldest gives way.
* *Descriptors*: the last ``RESERVE`` are not for newcomers. A process that has none left can neither write its files
  nor open the connections that it needs itself. The door then lets nobody in until ``let_in``.
* *What waits to be sent*: ``_MOST_QUEUED`` messages and ``_MOST_QUEUED_BYTES`` for each peer; then ``send`` is False.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from swarm.errors import WireError
from swarm.wire.sockets import Frames
from swarm.wire.tensors import Bytes
from swarm.wire.zmtp import WELCOME, Inlet, framed

HANDSHAKE_S: Final = 3.0
MESSAGE_S: Final = 15.0
RESERVE: Final = 16
SWEEP_S: Final = 1.0
_SLOWEST: Final = 16 << 10  # bytes a second
_MOST_HELD: Final = 64 << 20
_MOST_SHAKING: Final = 256
_MOST_QUEUED: Final = 1000
_MOST_QUEUED_BYTES: Final = 16 << 20
_AT_ONCE: Final = 256 << 10  # bytes of one reading
_ACCEPT_AT_ONCE: Final = 32
_LEAVE_S: Final = 1.0  # for last words to who is hung up on
_JOIN_BYTES: Final = 64 << 10  # frames below this are copied together into one write
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # else a failed accept is that peer's matter


class Arrived(NamedTuple):
    """A message, and who sent it."""

    peer: bytes
    frames: Frames


class PeerLost(NamedTuple):
    """A peer that had sent something has no connection any more. It may come back under the same name."""

    peer: bytes


class Overstepped(NamedTuple):
    """A peer went over a bound, or speaks no ZMTP. Nothing more is read from it; it may be told why, and is hung up on
    a moment later."""

    peer: bytes
    reason: str


class GateClosed(NamedTuple):
    """Accepting failed with this error number, for want of a descriptor or of memory: nobody new is let in until
    ``let_in()``. Who is connected stays so, and who knocks waits."""

    code: int


Event = Arrived | PeerLost | Overstepped | GateClosed


class Watch(Protocol):
    """Calls back when a descriptor can be read or written. An asyncio loop is one."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_reader(self, fd: int) -> Any: ...
    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_writer(self, fd: int) -> Any: ...
    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...


class Poll:
    """For a plain thread that only listens: what can be read is read when ``turn`` is called."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Readable while there is something to do."""
        return self._selector.fileno()

    def turn(self) -> bool:
        """Do what can be done without waiting; was there anything?"""
        found = self._selector.select(0)
        for key, _ in found:
            callback, args = key.data
            callback(*args)
        return bool(found)

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self._selector.register(fd, selectors.EVENT_READ, (callback, args))

    def remove_reader(self, fd: int) -> None:
        self._selector.unregister(fd)

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def remove_writer(self, fd: int) -> None:
        raise NotImplementedError("nothing is sent from here")

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        raise NotImplementedError("nothing is sent from here")

    def close(self) -> None:
        self._selector.close()


class _Connection:
    """One that came in."""

    __slots__ = (
        "counted",
        "fd",
        "has_spoken",
        "inlet",
        "is_over",
        "is_ready",
        "is_watched",
        "leaves_at",
        "num_since",
        "out",
        "out_bytes",
        "since",
        "socket",
        "writes",
    )

    def __init__(self, connected: socket.socket, inlet: Inlet) -> None:
        self.socket = connected
        self.fd = connected.fileno()
        self.inlet = inlet
        self.is_watched = False  # for what comes
        self.is_ready = False  # something came that was not looked at
        self.is_over = False  # nothing comes any more
        self.has_spoken = False
        self.leaves_at: float | None = None  # hung up on then
        self.since = 0.0  # when the handshake or the message under way began …
        self.num_since = 0  # … and how many bytes came since
        self.counted = 0  # of what is held, the part that the door knows of
        self.out: deque[Bytes] = deque()
        self.out_bytes = 0
        self.writes = False  # it is waited for that it takes more


class Listener:
    """See the module's text. ``wake`` is called when there may be something to take."""

    def __init__(
        self, bound: socket.socket, limit_bytes: int, watch: Watch, wake: Callable[[], None], key: bytes = b""
    ) -> None:
        self._socket = bound
        self._limit_bytes = limit_bytes
        self._watch = watch
        self._wake = wake
        self._key = key
        self._scratch = memoryview(bytearray(_AT_ONCE))
        self._connections: set[_Connection] = set()
        self._peers: dict[bytes, _Connection] = {}
        self._shaking: dict[_Connection, None] = {}  # the oldest first
        self._unfinished: dict[_Connection, None] = {}  # has part of a message; the oldest first
        self._leaving: list[_Connection] = []
        self._ready: deque[_Connection] = deque()
        self._news: deque[PeerLost | GateClosed] = deque()
        self._held = 0
        self._clock = 0.0  # of time in which we looked
        self._swept_at = time.monotonic()
        self._is_open = False
        self.num_refused = 0  # who overstepped, was too slow or did not know the key
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
        return peer in self._peers

    def look(self) -> None:
        """Read whatever is there, without waiting to be told."""
        if self._is_open:
            self._accept()
        for connection in list(self._connections):
            if connection.is_watched and not connection.is_ready:
                self._receive(connection)

    def _next_of(self, connection: _Connection) -> Event | None:
        """A message of this peer, or what became of it."""
        frames, reason = None, ""
        try:
            frames = connection.inlet.next()
        except WireError as error:
            reason = str(error)
        if connection.inlet.identity is not None and connection in self._shaking:
            self._welcome(connection)
        if reason:
            return self._refuse(connection, reason)
        if frames is None:
            self._wait_for_more(connection)
            return None
        connection.has_spoken = True
        self._unfinished.pop(connection, None)
        self._count(connection)
        self._make_ready(connection)  # its next one, if there is one already, comes after those of others
        return Arrived(self._name(connection), frames)

    def _wait_for_more(self, connection: _Connection) -> None:
        if connection.is_over:
            self._end(connection)
            return
        if connection.inlet.num_held and connection not in self._shaking:
            if connection not in self._unfinished:
                self._unfinished[connection] = None
                connection.since, connection.num_since = self._clock, 0
            self._count(connection)
            if self._held > _MOST_HELD:
                self._end(next(iter(self._unfinished)), refused=True)
        if not connection.is_watched and connection in self._connections:
            self._watch_for(connection)

    def _count(self, connection: _Connection) -> None:
        """What strangers have sent of unfinished messages is bounded for all of them together."""
        if not self._key:
            held = connection.inlet.num_held if connection in self._unfinished else 0
            self._held += held - connection.counted
            connection.counted = held

    def _name(self, connection: _Connection) -> bytes:
        identity = connection.inlet.identity
        assert identity is not None
        return identity

    def _welcome(self, connection: _Connection) -> None:
        """The handshake is through. Who comes back under its name takes the place of its former connection."""
        del self._shaking[connection]
        if not connection.inlet.identity:
            connection.inlet.identity = secrets.token_bytes(16)
        name = self._name(connection)
        former = self._peers.get(name)
        self._peers[name] = connection
        if former is not None:
            connection.has_spoken |= former.has_spoken
            self._end(former)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _watch_for(self, connection: _Connection) -> None:
        connection.is_watched = True
        self._watch.add_reader(connection.fd, self._readable, connection)

    def _unwatch(self, connection: _Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._watch.remove_reader(connection.fd)

    def _readable(self, connection: _Connection) -> None:
        if connection.is_ready:  # not all that came before has been taken: no more for now
            self._unwatch(connection)
        elif connection.is_watched:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        """Read once."""
        inlet = connection.inlet
        room = inlet.room()
        try:
            num_bytes = connection.socket.recv_into(self._scratch if room is None else room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # reset, or timed out
            num_bytes = 0
        connection.num_since += num_bytes
        if not num_bytes:
            connection.is_over = True
            self._unwatch(connection)
        elif room is None:
            inlet.feed(bytes(self._scratch[:num_bytes]))
        else:
            inlet.filled(num_bytes)
            if num_bytes < len(room) or inlet.room() is not None:
                self._wait_for_more(connection)
                return
        self._make_ready(connection)

    def _make_ready(self, connection: _Connection) -> None:
        if not connection.is_ready:
            connection.is_ready = True
            self._ready.append(connection)
            self._wake()

    # --- coming and going --------------------------------------------------------------------------------------------

    def let_in(self) -> None:
        """Whoever knocks is accepted (again)."""
        if not self._is_open:
            self._is_open = True
            self._watch.add_reader(self._socket.fileno(), self._accept)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def _shut(self, code: int) -> None:
        self._is_open = False
        self._watch.remove_reader(self._socket.fileno())
        self._news.append(GateClosed(code))
        self._wake()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE if self._is_open else 0):
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._shut(error.errno)
                return
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if limit != resource.RLIM_INFINITY and connected.fileno() >= limit - RESERVE:
                connected.close()
                self._shut(errno.EMFILE)
                return
            self._begin(connected)

    def _begin(self, connected: socket.socket) -> None:
        try:
            _set_options(connected)
            connected.send(WELCOME)
        except OSError:  # gone already
            connected.close()
            return
        if len(self._shaking) >= _MOST_SHAKING:
            self._end(next(iter(self._shaking)), refused=True)
        connection = _Connection(connected, Inlet(self._limit_bytes, self._key))
        connection.since = self._clock
        self._connections.add(connection)
        self._shaking[connection] = None
        self._watch_for(connection)

    def _refuse(self, connection: _Connection, reason: str) -> Overstepped | None:
        if connection in self._shaking:
            self._end(connection, refused=True)
            return None
        self.num_refused += 1
        connection.has_spoken = True  # that it is lost will be told, too
        self._unfinished.pop(connection, None)
        self._count(connection)
        self.hang_up(self._name(connection))
        return Overstepped(self._name(connection), reason)

    def hang_up(self, peer: bytes) -> None:
        """No more is read from it; what it was told still leaves. It is lost a moment later."""
        connection = self._peers.get(peer)
        if connection is not None and connection.leaves_at is None:
            self._unwatch(connection)
            connection.is_ready = True  # so that it is read no more
            with contextlib.suppress(ValueError):
                self._ready.remove(connection)
            connection.leaves_at = self._clock + _LEAVE_S
            self._leaving.append(connection)

    def _end(self, connection: _Connection, *, refused: bool = False) -> None:
        if connection not in self._connections:
            return
        self.num_refused += refused
        self._connections.discard(connection)
        self._shaking.pop(connection, None)
        self._unfinished.pop(connection, None)
        self._count(connection)
        self._unwatch(connection)
        if connection.writes:
            self._watch.remove_writer(connection.fd)
        connection.socket.close()
        name = connection.inlet.identity
        if name and self._peers.get(name) is connection:
            del self._peers[name]
            if connection.has_spoken:
                self._news.append(PeerLost(name))
                self._wake()

    def sweep(self) -> None:
        """Hang up on who takes too long. To be called about every ``SWEEP_S``."""
        now = time.monotonic()
        self._clock += min(now - self._swept_at, 2 * SWEEP_S)
        self._swept_at = now
        for connection in [c for c in self._shaking if self._clock - c.since > HANDSHAKE_S]:
            self._end(connection, refused=True)
        for connection in [c for c in self._unfinished if self._clock > _give_up_at(c)]:
            self._end(connection, refused=True)
        for connection in self._leaving:
            if connection.leaves_at is not None and self._clock >= connection.leaves_at:
                self._end(connection)
        self._leaving = [c for c in self._leaving if c in self._connections]

    def close(self) -> None:
        """What was sent may still leave, for a second."""
        if self._is_open:
            self._is_open = False
            self._watch.remove_reader(self._socket.fileno())
        self._socket.close()
        give_up_at = time.monotonic() + _LEAVE_S
        for connection in list(self._connections):
            _finish(connection, give_up_at)
            self._end(connection)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> bool:
        """Put a message behind those that wait; all leave at the end of this turn. False: the peer is not there, or it
        does not read and enough waits for it."""
        connection = self._peers.get(peer)
        if connection is None or len(connection.out) >= _MOST_QUEUED or connection.out_bytes > _MOST_QUEUED_BYTES:
            return False
        if not connection.out:
            self._watch.call_soon(self._flush, connection)
        small: list[Bytes] = []
        for index, frame in enumerate(frames):
            small.append(framed(len(frame), more=index + 1 < len(frames)))
            if len(frame) > _JOIN_BYTES:
                _queue(connection, b"".join(small))
                _queue(connection, frame)
                small = []
            else:
                small.append(frame)
        if small:
            _queue(connection, b"".join(small))
        return True

    def _flush(self, connection: _Connection) -> None:
        """Send what can be sent now."""
        if connection not in self._connections:
            return
        if not _write(connection):
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


def _give_up_at(connection: _Connection) -> float:
    return connection.since + MESSAGE_S + connection.num_since / _SLOWEST


def _queue(connection: _Connection, data: Bytes) -> None:
    connection.out.append(data)
    connection.out_bytes += len(data)


def _write(connection: _Connection) -> bool:
    """As much as the kernel takes. False: there is nobody any more; what waits is dropped."""
    out = connection.out
    while out:
        some = [out.popleft()]
        size = len(some[0])
        while out and size + len(out[0]) <= _JOIN_BYTES:
            some.append(out.popleft())
            size += len(some[-1])
        data = some[0] if len(some) == 1 else b"".join(some)
        try:
            sent = connection.socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            out.clear()
            connection.out_bytes = 0
            return False
        connection.out_bytes -= sent
        if sent < size:
            out.appendleft(memoryview(data)[sent:])
            return True
    return True


def _finish(connection: _Connection, give_up_at: float) -> None:
    """The last words, before it is closed."""
    with contextlib.suppress(OSError):
        while connection.out and (left_s := give_up_at - time.monotonic()) > 0:
            connection.socket.settimeout(left_s)
            _write(connection)
        connection.socket.shutdown(socket.SHUT_RDWR)


def _set_options(connected: socket.socket) -> None:
    """As ``sockets.set_options`` has it for those that knock."""
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 120_000)):
        if (option := getattr(socket, name, None)) is not None:  # not all systems have all of them
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

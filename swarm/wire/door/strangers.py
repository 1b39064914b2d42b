"""Acceptance of new connections, and a limit on concurrent handshakes that no single source can exhaust.

The last ``RESERVE`` file descriptors are not used for new connections. A process without free descriptors can neither
write its files nor open its own connections. When only those are left, accepting pauses until it is resumed.

At the limit of concurrent handshakes, the oldest one of the source with most of them is dropped. A client that opens a
thousand connections therefore displaces its own, and others complete their handshakes meanwhile, even over slow links.
A source is an IP address; for IPv6 its network half, because a machine there can use all addresses of its network.

Connections from a source whose handshakes fail again and again are closed right after accept, which costs little. Its
count of failures decreases over time, and is reset as soon as one handshake from there succeeds. Connections from this
machine are always allowed.
"""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from swarm.wire.door.mechanisms import Mechanism
from swarm.wire.door.watch import Watch

C = TypeVar("C", bound=Hashable)
RESERVE: Final = 16  # File descriptors.
_ACCEPT_AT_ONCE: Final = 8  # Takes about a millisecond; a burst of connections must not delay a step for longer.
_KNOCKS_AT_ONCE: Final = 64  # Including connections that are closed immediately because of their source.
# Errors that concern this process; any other failure of accept concerns only that peer.
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NETWORK_BITS: Final = 64  # Of an IPv6 address.
_MOST_FAILED: Final = 64  # Failed handshakes of one source before its connections are refused.
_FORGIVEN_A_SECOND: Final = 8  # By which a source's count of failures decreases.
_MOST_SOURCES: Final = 4096  # Sources with failures that are remembered; beyond that, the first one is dropped.
_THIS_MACHINE: Final = ""


def source_of(came_from: object) -> str:
    """Return the source that a connection counts for, given its remote address from ``accept``. Empty: this machine."""
    if not isinstance(came_from, tuple):
        return _THIS_MACHINE
    address = ipaddress.ip_address(str(came_from[0]).partition("%")[0])
    if str(address) in ("127.0.0.1", "::1"):
        return _THIS_MACHINE
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


class GateClosed(NamedTuple):
    """Accepting has paused until ``let_in()``, for lack of a file descriptor or of memory; ``code`` is the errno.

    Existing connections stay, and new ones wait in the kernel's queue; the connection that got one of the last
    descriptors has been closed.
    """

    code: int


class Entrance:
    """Accepts connections on listening sockets, each paired with a factory for the server-side handshake.

    ``on_connection``: called with a new connection, its source and the handshake factory; returns False if it is
    refused. ``on_paused``: called with the errno when accepting pauses.
    """

    def __init__(
        self,
        bound: Sequence[tuple[socket.socket, Callable[[], Mechanism]]],
        watch: Watch,
        *,
        begin: Callable[[socket.socket, str, Callable[[], Mechanism]], bool],
        shut: Callable[[int], None],
    ) -> None:
        self._bound = tuple(bound)
        self._watch = watch
        self._begin = begin
        self._tell_shut = shut
        self.is_open = False

    def open(self) -> None:
        """Start or resume accepting."""
        if not self.is_open:
            self.is_open = True
            for bound, asks in self._bound:
                self._watch.add_reader(bound.fileno(), self._accept, bound, asks)

    def look(self) -> None:
        """Accept the connections that are waiting, without a notification by the loop."""
        for bound, asks in self._bound if self.is_open else ():
            self._accept(bound, asks)

    def take(self, connected: socket.socket, came_from: object, asks: Callable[[], Mechanism]) -> bool:
        """Start a new connection if a file descriptor is left for it and its source is allowed."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and connected.fileno() >= limit - RESERVE:
            connected.close()
            self._shut(errno.EMFILE)
            return False
        return self._begin(connected, source_of(came_from), asks)

    def close(self) -> None:
        """Stop accepting and close the listening sockets."""
        self._stop()
        for bound, _ in self._bound:
            bound.close()

    def _accept(self, bound: socket.socket, asks: Callable[[], Mechanism]) -> None:
        num_begun = 0
        for _ in range(_KNOCKS_AT_ONCE):
            if num_begun == _ACCEPT_AT_ONCE or not self.is_open:
                return
            try:
                connected, came_from = bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._shut(error.errno)
                return
            num_begun += self.take(connected, came_from, asks)

    def _shut(self, code: int) -> None:
        self._stop()
        self._tell_shut(code)

    def _stop(self) -> None:
        if self.is_open:
            self.is_open = False
            for bound, _ in self._bound:
                self._watch.remove_reader(bound.fileno())


class Strangers(Generic[C]):
    """Limiter of handshakes in progress, by source; see the module's docstring."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._source: dict[C, str] = {}
        self._of: dict[str, dict[C, None]] = {}  # The oldest first.
        # Count of failures, and the time at which that count was valid.
        self._failed: dict[str, tuple[float, float]] = {}

    def __contains__(self, stranger: C) -> bool:
        return stranger in self._source

    def __iter__(self) -> Iterator[C]:
        return iter(self._source)

    def is_heard(self, source: str, now: float) -> bool:
        """Whether this source has not had too many failed handshakes."""
        return source == _THIS_MACHINE or self._num_failed(source, now) < _MOST_FAILED

    def add(self, stranger: C, source: str, now: float) -> C | None:
        """Add a connection. Return the one that must be dropped for it, which is already removed here; it may be the
        same one."""
        self._source[stranger] = source
        self._of.setdefault(source, {})[stranger] = None
        if len(self._source) <= self._most:
            return None
        crowd = max(self._of.values(), key=len)
        gives_way = next(iter(crowd))
        self.fails(gives_way, now)
        return gives_way

    def passes(self, stranger: C) -> None:
        """Remove a connection whose handshake succeeded."""
        source = self._source.get(stranger)
        if source is not None:
            self._discard(stranger, source)
            self._failed.pop(source, None)

    def fails(self, stranger: C, now: float) -> None:
        """Remove a connection that ended or was dropped; an incomplete handshake counts as a failure of its source."""
        source = self._source.get(stranger)
        if source is None:
            return
        self._discard(stranger, source)
        self._failed[source] = (self._num_failed(source, now) + 1, now)
        if len(self._failed) > _MOST_SOURCES:
            del self._failed[next(iter(self._failed))]

    def _num_failed(self, source: str, now: float) -> float:
        count, at = self._failed.get(source, (0.0, now))
        return max(0.0, count - (now - at) * _FORGIVEN_A_SECOND)

    def _discard(self, stranger: C, source: str) -> None:
        del self._source[stranger]
        same = self._of[source]
        del same[stranger]
        if not same:
            del self._of[source]

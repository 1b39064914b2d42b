"""Acceptance of new connections, and a limit on concurrent handshakes that no single source can exhaust.

The last ``RESERVE`` file descriptors are not used for new connections. A process without free descriptors can neither
write its files nor open its own connections. When only those are left, accepting pauses until it is resumed.

At the limit of concurrent handshakes, the source with the most handshakes loses its oldest one. A client that opens a
thousand connections therefore displaces its own connections, and other clients complete their handshakes meanwhile,
even over slow links. A source is an IP address; for IPv6 its network half, because a machine there can use all
addresses of its network.

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

from swarm.wire.transport.io_loop import IoLoop
from swarm.wire.transport.server_handshake import Mechanism

C = TypeVar("C", bound=Hashable)
RESERVE: Final = 16  # File descriptors that are not used for new connections.
_STARTS_PER_TURN: Final = 8  # Takes about a millisecond; a burst of connections must not delay a step for longer.
_ACCEPTS_PER_TURN: Final = 64  # Includes connections that are closed immediately because of their source.
# Errors that concern this process; any other failure of accept concerns only that peer.
_OUT_OF_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NETWORK_BITS: Final = 64  # Prefix length of an IPv6 source; all addresses in it count as one source.
_MAX_FAILURES: Final = 64  # Failed handshakes of one source before its connections are refused.
_FAILURES_FORGIVEN_PER_S: Final = 8  # Rate at which a source's count of failures decreases.
_MAX_SOURCES: Final = 4096  # Sources with failures that are remembered; at the limit, the first source is dropped.
LOCAL: Final = ""


def source_of(peer_address: object) -> str:
    """Return the source that a connection counts for, given its remote address from ``accept``. Empty: this machine."""
    if not isinstance(peer_address, tuple):
        return LOCAL
    address = ipaddress.ip_address(str(peer_address[0]).partition("%")[0])
    if str(address) in ("127.0.0.1", "::1"):
        return LOCAL
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


class AcceptPaused(NamedTuple):
    """Accepting has paused until ``resume()``, for lack of a file descriptor or of memory; ``code`` is the errno.

    Existing connections stay, and new ones wait in the kernel's queue. The connection that got one of the last
    descriptors has been closed.
    """

    code: int


class Acceptor:
    """Accepts connections on listening sockets, each paired with a factory for the server-side handshake.

    ``on_connection``: called with a new connection, its source and the handshake factory; returns False if it is
    refused. ``on_paused``: called with the errno when accepting pauses.
    """

    def __init__(
        self,
        bound: Sequence[tuple[socket.socket, Callable[[], Mechanism]]],
        io_loop: IoLoop,
        *,
        on_connection: Callable[[socket.socket, str, Callable[[], Mechanism]], bool],
        on_paused: Callable[[int], None],
    ) -> None:
        self._bound = tuple(bound)
        self._io_loop = io_loop
        self._on_connection = on_connection
        self._on_paused = on_paused
        self.is_accepting = False

    def resume(self) -> None:
        """Start or resume accepting."""
        if not self.is_accepting:
            self.is_accepting = True
            for bound, asks in self._bound:
                self._io_loop.add_reader(bound.fileno(), self._accept, bound, asks)

    def accept_pending(self) -> None:
        """Accept the connections that are waiting, without a notification by the loop."""
        for bound, asks in self._bound if self.is_accepting else ():
            self._accept(bound, asks)

    def start(self, connected: socket.socket, address: object, new_mechanism: Callable[[], Mechanism]) -> bool:
        """Start a new connection if a file descriptor is left for it and its source is allowed."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and connected.fileno() >= limit - RESERVE:
            connected.close()
            self._pause(errno.EMFILE)
            return False
        return self._on_connection(connected, source_of(address), new_mechanism)

    def close(self) -> None:
        """Stop accepting and close the listening sockets."""
        self._stop()
        for bound, _ in self._bound:
            bound.close()

    def _accept(self, bound: socket.socket, new_mechanism: Callable[[], Mechanism]) -> None:
        num_begun = 0
        for _ in range(_ACCEPTS_PER_TURN):
            if num_begun == _STARTS_PER_TURN or not self.is_accepting:
                return
            try:
                connected, address = bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(error.errno)
                return
            num_begun += self.start(connected, address, new_mechanism)

    def _pause(self, code: int) -> None:
        self._stop()
        self._on_paused(code)

    def _stop(self) -> None:
        if self.is_accepting:
            self.is_accepting = False
            for bound, _ in self._bound:
                self._io_loop.remove_reader(bound.fileno())


class HandshakeLimiter(Generic[C]):
    """Limiter of handshakes in progress, by source; see the module's docstring."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._source: dict[C, str] = {}
        self._by_source: dict[str, dict[C, None]] = {}  # The oldest first.
        # Count of failures, and the time at which that count was valid.
        self._failures: dict[str, tuple[float, float]] = {}

    def __contains__(self, connection: C) -> bool:
        return connection in self._source

    def __iter__(self) -> Iterator[C]:
        return iter(self._source)

    def is_allowed(self, source: str, now: float) -> bool:
        """Whether this source has not had too many failed handshakes."""
        return source == LOCAL or self._num_failures(source, now) < _MAX_FAILURES

    def add(self, connection: C, source: str, now: float) -> C | None:
        """Add a connection. Return the connection that must be closed because of the limit, which is already removed
        from this object; it may be the new connection itself."""
        self._source[connection] = source
        self._by_source.setdefault(source, {})[connection] = None
        if len(self._source) <= self._limit:
            return None
        largest = max(self._by_source.values(), key=len)
        dropped = next(iter(largest))
        self.on_failure(dropped, now)
        return dropped

    def on_success(self, connection: C) -> None:
        """Remove a connection whose handshake succeeded."""
        source = self._source.get(connection)
        if source is not None:
            self._discard(connection, source)
            self._failures.pop(source, None)

    def on_failure(self, connection: C, now: float) -> None:
        """Remove a connection that ended or was dropped; an incomplete handshake counts as a failure of its source."""
        source = self._source.get(connection)
        if source is None:
            return
        self._discard(connection, source)
        self._failures[source] = (self._num_failures(source, now) + 1, now)
        if len(self._failures) > _MAX_SOURCES:
            del self._failures[next(iter(self._failures))]

    def _num_failures(self, source: str, now: float) -> float:
        count, at = self._failures.get(source, (0.0, now))
        return max(0.0, count - (now - at) * _FAILURES_FORGIVEN_PER_S)

    def _discard(self, connection: C, source: str) -> None:
        del self._source[connection]
        same = self._by_source[source]
        del same[connection]
        if not same:
            del self._by_source[source]

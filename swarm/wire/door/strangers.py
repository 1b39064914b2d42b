"""Newcomers at a door: who is accepted, and connections whose handshake is under way: so many at a time, and who gives
way to a newcomer.

The last ``RESERVE`` descriptors are not for newcomers. A process that has none left can neither write its files nor
open the connections that it needs itself. The door then lets nobody in until it is opened again.

The one gives way that has waited for longest, of the source that has most of them: whoever knocks a thousand times
pushes out itself, and others get through their handshakes meanwhile, also over a slow link. A source is an address; of
IPv6 the half of it that names a network, for whoever has a machine there has all of its addresses.

A source from which handshakes fail again and again is hung up on before it says a word, which costs little: some are
forgiven each second, and all as soon as one from there gets through. This machine's own addresses are always heard.
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
RESERVE: Final = 16
_ACCEPT_AT_ONCE: Final = 8  # a millisecond; a crowd at every door must not hold up a step for longer
_KNOCKS_AT_ONCE: Final = 64  # with those that are hung up on unheard
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # else a failed accept is that peer's matter
_NETWORK_BITS: Final = 64
_MOST_FAILED: Final = 64  # of one source, beyond those that are forgiven
_FORGIVEN_A_SECOND: Final = 8
_MOST_SOURCES: Final = 4096  # that are remembered; the one that began to fail first is forgotten
_THIS_MACHINE: Final = ""


def source_of(came_from: object) -> str:
    """As whose a connection counts, by what ``accept`` says of it. Empty: of this machine."""
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
    """Nobody new is let in until ``let_in()``, for want of a descriptor or of memory, by this error number. Who is
    connected stays so, and who knocks waits; the one who got a descriptor that is not for newcomers is hung up on."""

    code: int


class Entrance:
    """The sockets that listen, and for each what makes the mechanism by which the next newcomer there shows whether it
    may be heard. ``begin``: with who came, the source that it counts as, and that; False: it is not heard. ``shut``:
    nobody is let in any more, by this error number."""

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
        """Accept whoever knocks (again)."""
        if not self.is_open:
            self.is_open = True
            for bound, asks in self._bound:
                self._watch.add_reader(bound.fileno(), self._accept, bound, asks)

    def look(self) -> None:
        """Accept whoever is there, without waiting to be told."""
        for bound, asks in self._bound if self.is_open else ():
            self._accept(bound, asks)

    def take(self, connected: socket.socket, came_from: object, asks: Callable[[], Mechanism]) -> bool:
        """Begin with a newcomer, if there is a descriptor for it and its source is heard."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and connected.fileno() >= limit - RESERVE:
            connected.close()
            self._shut(errno.EMFILE)
            return False
        return self._begin(connected, source_of(came_from), asks)

    def close(self) -> None:
        """Listen no more."""
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
    """See the module's text."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._source: dict[C, str] = {}
        self._of: dict[str, dict[C, None]] = {}  # the oldest first
        self._failed: dict[str, tuple[float, float]] = {}  # how many, and when that was true

    def __contains__(self, stranger: C) -> bool:
        return stranger in self._source

    def __iter__(self) -> Iterator[C]:
        return iter(self._source)

    def is_heard(self, source: str, now: float) -> bool:
        """Have not too many handshakes failed from there?"""
        return source == _THIS_MACHINE or self._num_failed(source, now) < _MOST_FAILED

    def add(self, stranger: C, source: str, now: float) -> C | None:
        """Take it in. Returns the one that has to give way for it, which is here no more; it may be itself."""
        self._source[stranger] = source
        self._of.setdefault(source, {})[stranger] = None
        if len(self._source) <= self._most:
            return None
        crowd = max(self._of.values(), key=len)
        gives_way = next(iter(crowd))
        self.fails(gives_way, now)
        return gives_way

    def passes(self, stranger: C) -> None:
        """Let it through: its handshake is done."""
        source = self._source.get(stranger)
        if source is not None:
            self._discard(stranger, source)
            self._failed.pop(source, None)

    def fails(self, stranger: C, now: float) -> None:
        """Forget one that is gone or gives way: if its handshake was not through, that counts."""
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

"""Connections whose handshake is under way: so many at a time, and who gives way to a newcomer.

The one that has waited for longest, of the source that has most of them: whoever knocks a thousand times pushes out
itself, and others get through their handshakes meanwhile, also over a slow link. A source is an address; of IPv6 the
half of it that names a network, for whoever has a machine there has all of its addresses.

A source from which handshakes fail again and again is hung up on before it says a word, which costs little: some are
forgiven each second, and all as soon as one from there gets through. This machine's own addresses are always heard.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

C = TypeVar("C", bound=Hashable)
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
        """Its handshake is through."""
        source = self._source.get(stranger)
        if source is not None:
            self._discard(stranger, source)
            self._failed.pop(source, None)

    def fails(self, stranger: C, now: float) -> None:
        """It is gone, or gives way: if its handshake was not through, that counts."""
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

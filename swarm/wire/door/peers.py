"""Peers of a door: what it tells of them, and who is connected under which name: who may take another one's place, and
how many show the same key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.wire.door.connection import Connection
from swarm.wire.sockets import Frames

MOST_OF_KEY: Final = 128  # processes of one machine; a thousand descriptors are for all of them together


class Arrived(NamedTuple):
    """A message, who sent it, and the public key that it has shown (empty where none is asked for). The key goes with
    the message: its sender may be gone when somebody looks at it, and must not be taken for one without a key then."""

    peer: bytes
    frames: Frames
    key: str = ""


class PeerLost(NamedTuple):
    """A peer that had sent something has no connection any more. It may come back under the same name."""

    peer: bytes


class Overstepped(NamedTuple):
    """A peer went over a bound, or speaks no ZMTP. Nothing more is read from it; it may be told why, and is hung up on
    a moment later."""

    peer: bytes
    reason: str


class GiveWay(NamedTuple):
    """Those whose places a newcomer takes: who had its name, and the oldest with its key, if there are too many."""

    former: Connection | None
    oldest: Connection | None


class Peers:
    """Connections whose handshake is through. ``names``: see ``keys.Lock``."""

    def __init__(self, names: Callable[[str, bytes], bool] | None) -> None:
        self._names = names
        self._named: dict[bytes, Connection] = {}
        self._of_key: dict[str, dict[Connection, None]] = {}  # the oldest first

    def get(self, name: bytes) -> Connection | None:
        return self._named.get(name)

    def known(self) -> list[tuple[bytes, str]]:
        """Who has shown a key, with it."""
        return [(name, each.inlet.key) for name, each in self._named.items() if each.inlet.key]

    def num_queued(self, connection: Connection) -> int:
        """Bytes that wait for all connections with the same key; for this one, where none is asked for."""
        same = self._of_key.get(connection.inlet.key) or (connection,)
        return sum(each.num_queued for each in same)

    def enter(self, connection: Connection) -> GiveWay | None:
        """Let it have its name; None if that is somebody else's. Who comes back under its name takes the place of its
        former connection."""
        name, key = connection.name, connection.inlet.key
        former = self._named.get(name)
        if former is not None and not self._takes_over(key, former):
            return None
        self._named[name] = connection
        if former is not None:
            connection.has_spoken |= former.has_spoken
        return GiveWay(former, self._too_many(connection) if key else None)

    def leave(self, connection: Connection) -> bool:
        """Forget it. True: nobody has its name any more."""
        key, name = connection.inlet.key, connection.inlet.identity
        same = self._of_key.get(key, {})
        same.pop(connection, None)
        if not same:
            self._of_key.pop(key, None)
        if not name or self._named.get(name) is not connection:
            return False
        del self._named[name]
        return True

    def _too_many(self, connection: Connection) -> Connection | None:
        same = self._of_key.setdefault(connection.inlet.key, {})
        same[connection] = None
        return next(iter(same)) if len(same) > MOST_OF_KEY else None

    def _takes_over(self, key: str, former: Connection) -> bool:
        """Who has this key, the place of who is called so? Whoever shows none came in where none is asked for; others
        can't drive it out."""
        if key == former.inlet.key:
            return True
        return bool(former.inlet.key) and self._names is not None and self._names(key, former.name)

"""Events about a listener's peers, and the table of authenticated peers: which identity each has, and how many
connections share a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.wire.door.connection import Connection
from swarm.wire.sockets import Frames

MOST_OF_KEY: Final = 128  # Connections per key. All peers together share about a thousand descriptors.


class Arrived(NamedTuple):
    """A received message, its sender, and the public key that authenticated the sender (empty without authentication).

    The key is stored with the message because its sender may be gone when the message is handled, and must not pass for
    a peer without a key then.
    """

    peer: bytes
    frames: Frames
    key: str = ""


class PeerLost(NamedTuple):
    """A peer that had sent messages has no connection any more. It may reconnect under the same identity."""

    peer: bytes


class Overstepped(NamedTuple):
    """A peer exceeded a limit or does not use ZMTP. It is not read any more; the owner may send it the reason before it
    is disconnected, a moment later."""

    peer: bytes
    reason: str


class GiveWay(NamedTuple):
    """Connections that a new one displaces: the former one with its identity, and the oldest with its key if there are
    too many."""

    former: Connection | None
    oldest: Connection | None


class Peers:
    """Authenticated connections by identity and by key. ``may_use_identity``: see ``keys.AuthPolicy``."""

    def __init__(self, names: Callable[[str, bytes], bool] | None) -> None:
        self._names = names
        self._named: dict[bytes, Connection] = {}
        self._of_key: dict[str, dict[Connection, None]] = {}  # In order of arrival, the oldest first.

    def get(self, name: bytes) -> Connection | None:
        return self._named.get(name)

    def known(self) -> list[tuple[bytes, str]]:
        """Return the identity and key of every peer that authenticated with a key."""
        return [(name, each.inlet.key) for name, each in self._named.items() if each.inlet.key]

    def num_queued(self, connection: Connection) -> int:
        """Return the unsent bytes of all connections with the same key (without a key: of this connection)."""
        same = self._of_key.get(connection.inlet.key) or (connection,)
        return sum(each.num_queued for each in same)

    def enter(self, connection: Connection) -> GiveWay | None:
        """Register a connection under its identity. Return the connections that it displaces, or None if it may not
        have the identity because that belongs to another key. A reconnecting peer displaces its own former connection.
        """
        name, key = connection.name, connection.inlet.key
        former = self._named.get(name)
        if former is not None and not self._takes_over(key, former):
            return None
        self._named[name] = connection
        if former is not None:
            connection.has_spoken |= former.has_spoken
        return GiveWay(former, self._too_many(connection) if key else None)

    def leave(self, connection: Connection) -> bool:
        """Remove a connection. Return whether its identity is now unused."""
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
        """Whether the owner of this key may displace the former connection with its identity.

        A peer without a key was accepted where no authentication is required; others can't displace it.
        """
        if key == former.inlet.key:
            return True
        return bool(former.inlet.key) and self._names is not None and self._names(key, former.name)

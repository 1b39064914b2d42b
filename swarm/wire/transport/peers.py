"""Events about a listener's peers, and the table of authenticated peers: which identity each has, and how many
connections share a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.wire.sockets import Frames
from swarm.wire.transport.connection import Connection

MAX_PER_KEY: Final = 128  # Connections per key. All peers together share about a thousand descriptors.


class MessageReceived(NamedTuple):
    """A received message, its sender, and the public key that authenticated the sender (empty without authentication).

    The key is stored with the message because its sender may be gone when the message is handled, and must not pass for
    a peer without a key then.
    """

    peer: bytes
    frames: Frames
    key: str = ""


class PeerDisconnected(NamedTuple):
    """A peer that had sent messages has no connection any more. It may reconnect under the same identity."""

    peer: bytes


class LimitExceeded(NamedTuple):
    """A peer exceeded a limit or does not use ZMTP. It is not read any more; the owner may send it the reason before it
    is disconnected, a moment later."""

    peer: bytes
    reason: str


class Evicted(NamedTuple):
    """Connections that a new one displaces: the former one with its identity, and the oldest with its key if there are
    too many."""

    former: Connection | None
    oldest: Connection | None


class PeerTable:
    """Authenticated connections by identity and by key. ``may_use_identity``: see ``keys.AuthPolicy``."""

    def __init__(self, may_use_identity: Callable[[str, bytes], bool] | None) -> None:
        self._may_use_identity = may_use_identity
        self._by_identity: dict[bytes, Connection] = {}
        self._by_key: dict[str, dict[Connection, None]] = {}  # In order of arrival, the oldest first.

    def get(self, name: bytes) -> Connection | None:
        return self._by_identity.get(name)

    def authenticated_peers(self) -> list[tuple[bytes, str]]:
        """Return the identity and key of every peer that authenticated with a key."""
        return [(name, connection.inlet.key) for name, connection in self._by_identity.items() if connection.inlet.key]

    def num_queued(self, connection: Connection) -> int:
        """Return the unsent bytes of all connections with the same key (without a key: of this connection)."""
        same = self._by_key.get(connection.inlet.key) or (connection,)
        return sum(connected.queued_bytes for connected in same)

    def register(self, connection: Connection) -> Evicted | None:
        """Register a connection under its identity. Return the connections that it displaces, or None if it may not
        have the identity because that belongs to another key. A reconnecting peer displaces its own former connection.
        """
        name, key = connection.name, connection.inlet.key
        former = self._by_identity.get(name)
        if former is not None and not self._may_displace(key, former):
            return None
        self._by_identity[name] = connection
        if former is not None:
            connection.has_spoken |= former.has_spoken
        return Evicted(former, self._oldest_if_too_many(connection) if key else None)

    def remove(self, connection: Connection) -> bool:
        """Remove a connection. Return whether its identity is now unused."""
        key, name = connection.inlet.key, connection.inlet.identity
        same = self._by_key.get(key, {})
        same.pop(connection, None)
        if not same:
            self._by_key.pop(key, None)
        if not name or self._by_identity.get(name) is not connection:
            return False
        del self._by_identity[name]
        return True

    def _oldest_if_too_many(self, connection: Connection) -> Connection | None:
        same = self._by_key.setdefault(connection.inlet.key, {})
        same[connection] = None
        return next(iter(same)) if len(same) > MAX_PER_KEY else None

    def _may_displace(self, key: str, former: Connection) -> bool:
        """Whether the owner of this key may displace the former connection with its identity.

        A peer without a key was accepted where no authentication is required; others can't displace it.
        """
        if key == former.inlet.key:
            return True
        return (
            bool(former.inlet.key) and self._may_use_identity is not None and self._may_use_identity(key, former.name)
        )

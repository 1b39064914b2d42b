"""Rotation of a machine's key, which survives an interruption at any point.

1. The new secret is written next to the old one. 2. The broker receives the new public key, over a connection with the
old one; both are valid from now on. 3. The new secret replaces the old one in the file. 4. A connection authenticates
with it, which invalidates the old one. Other processes here that use the old key are disconnected then, read the file
again (``CredentialStore.newer``), and continue with the new key.

The broker may rotate its own key, too (``broker_keys``): it sends the new one to connected members, and they store it
(``CredentialStore.set_broker_key``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarm.auth import memberships
from swarm.auth.memberships import JoinedSwarm
from swarm.errors import ConfigError
from swarm.wire.transport.keys import new_pair, public_of

SendNextKey = Callable[[JoinedSwarm, str], None]  # Sends the member's next public key to the broker.


@dataclass(slots=True)
class CredentialStore:
    """Storage of the keys with which this process and a broker on another machine authenticate each other."""

    state_dir: Path
    membership: JoinedSwarm  # The membership that this process uses.

    def newer(self) -> JoinedSwarm | None:
        """Return the membership that has replaced ours in the file; None if there is none, or the file is
        unreadable."""
        try:
            same = [each for each in memberships.read_all(self.state_dir) if each.is_same_membership(self.membership)]
        except ConfigError:
            return None
        own = self.membership.secret, self.membership.broker
        return next((each for each in same if (each.secret, each.broker) != own), None)

    def switch_to_newer(self) -> JoinedSwarm | None:
        """Switch to the membership that has replaced ours in the file, and return it; None if there is none."""
        newer = self.newer()
        self.membership = newer or self.membership
        return newer

    def stored(self) -> JoinedSwarm:
        """Return the stored membership. Raises ConfigError."""
        return memberships.update(self.state_dir, self.membership, lambda found: found)

    def next_secret(self) -> str:
        """Return the next secret; generate it if there is none yet. Raises ConfigError."""
        secret = memberships.update(self.state_dir, self.membership, _add_next_secret).next
        assert secret is not None
        return secret

    def replace_secret(self, secret: str) -> JoinedSwarm:
        """Replace the current secret by this one. Raises ConfigError."""
        return memberships.update(
            self.state_dir, self.membership, lambda found: msgspec.structs.replace(found, secret=secret, next=None)
        )

    def set_broker_key(self, key: str) -> JoinedSwarm:
        """Store the broker's new public key. Raises ConfigError if that is not possible here."""
        memberships.update(self.state_dir, self.membership, lambda found: msgspec.structs.replace(found, broker=key))
        self.membership = msgspec.structs.replace(self.membership, broker=key)
        return self.membership


def rotate(store: CredentialStore, send_next_key: SendNextKey, connect: Callable[[JoinedSwarm], None]) -> JoinedSwarm:
    """Rotate this machine's key; after a failure, calling it again continues where it stopped.

    ``connect``: connects once as this member. Raises ConfigError if the key isn't stored here, and whatever
    ``send_next_key`` and ``connect`` raise.
    """
    secret = store.next_secret()
    send_next_key(store.stored(), public_of(secret))
    successor = store.replace_secret(secret)
    connect(successor)
    return successor


def _add_next_secret(joined: JoinedSwarm) -> JoinedSwarm:
    return joined if joined.next is not None else msgspec.structs.replace(joined, next=new_pair().secret)

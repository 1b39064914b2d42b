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

from swarm.errors import ConfigError
from swarm.lock import known
from swarm.lock.known import Known
from swarm.wire.door.keys import new_pair, public_of

Tell = Callable[[Known, str], None]  # Sends the member's next public key to the broker.


@dataclass(slots=True)
class Home:
    """Storage of the keys with which this process and a broker on another machine authenticate each other."""

    state_dir: Path
    joined: Known  # The membership that this process uses.

    def renewed(self) -> Known | None:
        """Return the membership that has replaced ours in the file; None if there is none, or the file is
        unreadable."""
        try:
            found = [each for each in known.every(self.state_dir) if each.is_same(self.joined)]
        except ConfigError:
            return None
        own = self.joined.secret, self.joined.broker
        return next((each for each in found if (each.secret, each.broker) != own), None)

    def take_up(self) -> Known | None:
        """Switch to the membership that has replaced ours in the file, and return it; None if there is none."""
        found = self.renewed()
        self.joined = found or self.joined
        return found

    def now(self) -> Known:
        """Return the stored membership. Raises ConfigError."""
        return known.change(self.state_dir, self.joined, lambda found: found)

    def announced(self) -> str:
        """Return the next secret; generate it if there is none yet. Raises ConfigError."""
        secret = known.change(self.state_dir, self.joined, _with_a_next).next
        assert secret is not None
        return secret

    def takes_place(self, secret: str) -> Known:
        """Replace the current secret by this one. Raises ConfigError."""
        return known.change(
            self.state_dir, self.joined, lambda found: msgspec.structs.replace(found, secret=secret, next=None)
        )

    def broker_is(self, key: str) -> Known:
        """Store the broker's new public key. Raises ConfigError if that is not possible here."""
        known.change(self.state_dir, self.joined, lambda found: msgspec.structs.replace(found, broker=key))
        self.joined = msgspec.structs.replace(self.joined, broker=key)
        return self.joined


def rotate(home: Home, tell: Tell, knock: Callable[[Known], None]) -> Known:
    """Rotate this machine's key; after a failure, calling it again continues where it stopped.

    ``connect``: connects once as this member. Raises ConfigError if the key isn't stored here, and whatever
    ``send_next_key`` and ``connect`` raise.
    """
    secret = home.announced()
    tell(home.now(), public_of(secret))
    successor = home.takes_place(secret)
    knock(successor)
    return successor


def _with_a_next(joined: Known) -> Known:
    return joined if joined.next is not None else msgspec.structs.replace(joined, next=new_pair().secret)

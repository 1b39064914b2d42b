"""Changing a machine's key, so that nothing is lost whenever it stops half-way.

1. The new secret is written beside the old one. 2. The broker is told the new public key, over a connection with the
old one: both count from now on. 3. The new secret takes the old one's place in the file. 4. Somebody knocks with it:
the old one opens nothing any more. Who runs here with the old one is hung up on then, reads the file again
(``Home.renewed``), and goes on with the new one.

The broker may change its own key, too (``ownkeys``): it tells who is connected, and they keep it (``Home.broker_is``).
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

Tell = Callable[[Known, str], None]  # tells the broker, as this member, the public key to come


@dataclass(slots=True)
class Home:
    """Where the keys are kept by which this process and a broker on another machine know each other."""

    state_dir: Path
    joined: Known  # as this process knocks

    def renewed(self) -> Known | None:
        """Return what has taken its place in the file meanwhile; None: nothing has, or there is no telling."""
        try:
            found = [each for each in known.every(self.state_dir) if each.is_same(self.joined)]
        except ConfigError:
            return None
        own = self.joined.secret, self.joined.broker
        return next((each for each in found if (each.secret, each.broker) != own), None)

    def take_up(self) -> Known | None:
        """Go on with what has taken its place in the file, if something has."""
        found = self.renewed()
        self.joined = found or self.joined
        return found

    def now(self) -> Known:
        """As it is kept by now. Raises ConfigError."""
        return known.change(self.state_dir, self.joined, lambda found: found)

    def announced(self) -> str:
        """Draw the secret that shall take the present one's place, unless there is one already. Raises ConfigError."""
        secret = known.change(self.state_dir, self.joined, _with_a_next).next
        assert secret is not None
        return secret

    def takes_place(self, secret: str) -> Known:
        """Put it in the present one's place. Raises ConfigError."""
        return known.change(
            self.state_dir, self.joined, lambda found: msgspec.structs.replace(found, secret=secret, next=None)
        )

    def broker_is(self, key: str) -> Known:
        """Keep the key by which the broker is known from now on. Raises ConfigError if that is not possible here."""
        known.change(self.state_dir, self.joined, lambda found: msgspec.structs.replace(found, broker=key))
        self.joined = msgspec.structs.replace(self.joined, broker=key)
        return self.joined


def rotate(home: Home, tell: Tell, knock: Callable[[Known], None]) -> Known:
    """Give this machine a new key there; said again after a failure, it goes on where it stopped. ``knock``: knocks as
    this member. Raises ConfigError if the key isn't kept here, and whatever ``tell`` and ``knock`` raise."""
    secret = home.announced()
    tell(home.now(), public_of(secret))
    successor = home.takes_place(secret)
    knock(successor)
    return successor


def _with_a_next(joined: Known) -> Known:
    return joined if joined.next is not None else msgspec.structs.replace(joined, next=new_pair().secret)

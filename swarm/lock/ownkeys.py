"""The broker's own key, and how another one takes its place, so that nothing is lost whenever it stops half-way.

1. The new secret is written beside the old one. From now on the doors answer to both, and everybody who is connected is
told the new public key. 2. When all know it, or who governs says so, the new secret takes the old one's place. A broker
that starts and finds both goes on as if it had not stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from swarm import private
from swarm.errors import ConfigError
from swarm.lock.identity import handed_over, load, load_or_make, make
from swarm.wire.door.keys import KeyPair

NAME: Final = "broker.key"
NEXT: Final = "broker.next"


class OwnKeys:
    """See the module's text. ``begin`` and ``finish`` wait for the disk; who reads meanwhile, in another thread, finds
    what was so before, or is so after."""

    def __init__(self, directory: Path) -> None:
        """Read them; make the first one if there is none. Raises ConfigError."""
        self._path, self._next_path = directory / NAME, directory / NEXT
        self._is_handed_over = handed_over() is not None
        own = load_or_make(self._path)
        coming = None if self._is_handed_over else load(self._next_path)
        self._pairs = (own,) if coming is None else (coming, own)

    @property
    def pairs(self) -> tuple[KeyPair, ...]:
        """Those that the doors answer to, the newest first."""
        return self._pairs

    @property
    def public(self) -> str:
        """The key by which others shall know the broker from now on."""
        return self._pairs[0].public

    @property
    def former(self) -> str | None:
        """The one that is answered to still; None: there is no other."""
        return self._pairs[1].public if len(self._pairs) > 1 else None

    def demand_own(self) -> None:
        """Raises ConfigError for a key that is not ours to change."""
        if self._is_handed_over:
            raise ConfigError(
                "the broker's key was handed over by whoever started it (systemd's credential swarm.key): change it "
                "where it comes from"
            )

    def begin(self) -> None:
        """Draw the next one. Raises ConfigError if it can't be written: then nothing has changed."""
        if self.former is None:
            self._pairs = (make(self._next_path), self._pairs[0])

    def finish(self) -> None:
        """Put the old one away. Raises ConfigError if the disk does not take that: then both count."""
        if self.former is None:
            return
        try:
            private.put_in_place(self._next_path, self._path)
        except OSError as error:
            if self._next_path.exists():
                raise ConfigError(f"the old key can't be put away ({error.strerror}): both are answered to") from None
            # It is done, and a power cut may undo it: then the next start finds both again.
        self._pairs = self._pairs[:1]

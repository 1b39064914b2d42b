"""The broker's own key, and its rotation, which survives an interruption at any point.

1. The new secret is written next to the old one. From now on the listeners accept both keys, and all connected peers
receive the new public key. 2. When all members have confirmed it, or the operator decides so, the new secret replaces
the old one. A broker that starts and finds both files continues the rotation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from swarm import private_files
from swarm.auth.identity import load, load_credential, load_or_make, make
from swarm.errors import ConfigError
from swarm.wire.transport.keys import KeyPair

NAME: Final = "broker.key"
NEXT_NAME: Final = "broker.next"


class BrokerKeys:
    """The broker's key pairs. ``begin_rotation`` and ``finish_rotation`` block on the disk; other threads that read
    meanwhile see the state before or after."""

    def __init__(self, directory: Path) -> None:
        """Read the keys; generate the first one if there is none. Raises ConfigError."""
        self._path, self._next_path = directory / NAME, directory / NEXT_NAME
        self._is_credential = load_credential() is not None
        current = load_or_make(self._path)
        successor = None if self._is_credential else load(self._next_path)
        # The newest first; two during a rotation.
        self._pairs = (current,) if successor is None else (successor, current)

    @property
    def pairs(self) -> tuple[KeyPair, ...]:
        """Return the key pairs that the listeners accept, the newest first."""
        return self._pairs

    @property
    def public(self) -> str:
        """Return the public key that peers shall use from now on."""
        return self._pairs[0].public

    @property
    def former(self) -> str | None:
        """Return the old public key that is still accepted; None outside of a rotation."""
        return self._pairs[1].public if len(self._pairs) > 1 else None

    def check_changeable(self) -> None:
        """Raise ConfigError if the key came from systemd, so that the broker can't change it."""
        if self._is_credential:
            raise ConfigError("the broker's key is systemd's credential swarm.key: change it there")

    def begin_rotation(self) -> None:
        """Start a rotation: generate the next key. Raises ConfigError if it can't be written; then nothing has
        changed."""
        if self.former is None:
            self._pairs = (make(self._next_path), self._pairs[0])

    def finish_rotation(self) -> None:
        """Retire the old key. Raises ConfigError if the disk fails; then both stay valid."""
        if self.former is None:
            return
        try:
            private_files.replace_durably(self._next_path, self._path)
        except OSError as error:
            if self._next_path.exists():
                raise ConfigError(f"the old key can't be retired ({error.strerror}): both stay valid") from None
            # The rename is done but may not be durable: after a power cut the next start finds both keys again.
        self._pairs = self._pairs[:1]

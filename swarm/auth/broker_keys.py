"""The broker's own key: its file, and its rotation, which survives an interruption at any point.

The secret half never leaves the machine. A rotation has two steps:

1. The new secret is written next to the old one. From now on the listeners accept both keys, and all connected peers
receive the new public key. 2. When all members have confirmed it, or the operator decides so, the new secret replaces
the old one. A broker that starts and finds both files continues the rotation.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from swarm import private_files
from swarm.errors import ConfigError
from swarm.wire.transport.keys import KeyPair, new_pair, public_of

NAME: Final = "broker.key"
NEXT_NAME: Final = "broker.next"
CREDENTIAL: Final = "swarm.key"  # Name of the systemd credential.
_FILE_NAME: Final = "the key file"
_REMEDY: Final = "make a new key: move the file away"
_SECRET: Final = re.compile(rb"[0-9a-f]{64}")
_MAX_BYTES: Final = 1024


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


def load_or_make(path: Path) -> KeyPair:
    """Return the key pair: from systemd's credential, else from the file at ``path``, which is created if missing.
    Raises ConfigError if it is invalid, or readable by others."""
    return load_credential() or load(path) or make(path)


def load_credential() -> KeyPair | None:
    """Return the key pair from systemd's credential; None if there is none. Raises ConfigError."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return _read(Path(directory) / CREDENTIAL, True) if directory else None


def load(path: Path) -> KeyPair | None:
    """Return the key pair in a file; None if the file does not exist. Raises ConfigError."""
    return _read(path)


def make(path: Path) -> KeyPair:
    """Generate a key pair and write it, unless the file exists by now. Raises ConfigError."""
    pair = new_pair()
    try:
        private_files.make_private_directory(path.parent)
        private_files.write(path, pair.secret.encode() + b"\n", is_new=True)
    except FileExistsError:  # Another process has created it meanwhile.
        existing = _read(path)
        if existing is not None:
            return existing
        raise ConfigError(f"{_FILE_NAME} {path} appears and disappears: does another process write there?") from None
    except OSError as error:
        raise ConfigError(f"{_FILE_NAME} {path} can't be written ({error.strerror})") from None
    return pair


def _read(path: Path, is_credential: bool = False) -> KeyPair | None:
    content = private_files.read(path, _FILE_NAME, _MAX_BYTES, remedy=_REMEDY, is_credential=is_credential)
    if content is None:
        return None
    if _SECRET.fullmatch(content.strip()) is None:
        raise ConfigError(f"{path} is no key, which is 64 hexadecimal digits: give back the right one, or move it away")
    secret = content.strip().decode()
    return KeyPair(public_of(secret), secret)

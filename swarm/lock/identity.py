"""A machine's own key pair. The secret half never leaves the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from swarm import private
from swarm.errors import ConfigError
from swarm.wire.door.keys import KeyPair, new_pair, public_of

CREDENTIAL: Final = "swarm.key"  # Name of the systemd credential.
_WHAT: Final = "the key file"
_REMEDY: Final = "make a new key: move the file away"
_SECRET: Final = re.compile(rb"[0-9a-f]{64}")
_MAX_BYTES: Final = 1024


def load_or_make(path: Path) -> KeyPair:
    """Return the key pair: from systemd's credential, else from the file at ``path``, which is created if missing.
    Raises ConfigError if it is invalid, or readable by others."""
    return handed_over() or load(path) or make(path)


def handed_over() -> KeyPair | None:
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
        private.make_directory(path.parent)
        private.write(path, pair.secret.encode() + b"\n", is_new=True)
    except FileExistsError:  # Another process has created it meanwhile.
        found = _read(path)
        if found is not None:
            return found
        raise ConfigError(f"{_WHAT} {path} appears and disappears: does another process write there?") from None
    except OSError as error:
        raise ConfigError(f"{_WHAT} {path} can't be written ({error.strerror})") from None
    return pair


def _read(path: Path, is_credential: bool = False) -> KeyPair | None:
    content = private.read(path, _WHAT, _MAX_BYTES, remedy=_REMEDY, is_credential=is_credential)
    if content is None:
        return None
    if _SECRET.fullmatch(content.strip()) is None:
        raise ConfigError(f"{path} is no key, which is 64 hexadecimal digits: give back the right one, or move it away")
    secret = content.strip().decode()
    return KeyPair(public_of(secret), secret)

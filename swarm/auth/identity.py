"""A machine's own key pair. The secret half never leaves the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from swarm import private_files
from swarm.errors import ConfigError
from swarm.wire.transport.keys import KeyPair, new_pair, public_of

CREDENTIAL: Final = "swarm.key"  # Name of the systemd credential.
_FILE_NAME: Final = "the key file"
_REMEDY: Final = "make a new key: move the file away"
_SECRET: Final = re.compile(rb"[0-9a-f]{64}")
_MAX_BYTES: Final = 1024


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

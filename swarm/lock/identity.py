"""A machine's own pair of keys. The secret half never leaves it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from swarm import private
from swarm.errors import ConfigError
from swarm.wire.door.keys import KeyPair, new_pair, public_of

CREDENTIAL: Final = "swarm.key"  # its name among the credentials that systemd hands to a service
_WHAT: Final = "the key file"
_REMEDY: Final = "make a new key: move the file away"
_SECRET: Final = re.compile(rb"[0-9a-f]{64}")
_MAX_BYTES: Final = 1024


def load_or_make(path: Path) -> KeyPair:
    """Read the pair: what systemd hands over goes first, then the file at ``path``, which is made if there is none.
    Raises ConfigError if it is no key, or others may read it."""
    return handed_over() or load(path) or make(path)


def handed_over() -> KeyPair | None:
    """The pair that systemd hands to this service. Raises ConfigError."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return _read(Path(directory) / CREDENTIAL, True) if directory else None


def load(path: Path) -> KeyPair | None:
    """The pair in a file; None: there is no such file. Raises ConfigError."""
    return _read(path)


def make(path: Path) -> KeyPair:
    """Draw a pair and write it, unless there is one by now. Raises ConfigError."""
    pair = new_pair()
    try:
        private.make_directory(path.parent)
        private.write(path, pair.secret.encode() + b"\n", is_new=True)
    except FileExistsError:  # somebody else has made one meanwhile
        found = _read(path)
        if found is not None:
            return found
        raise ConfigError(f"{_WHAT} {path} comes and goes: who else writes there?") from None
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

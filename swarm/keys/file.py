"""File of API keys: readable by its owner alone, written as a whole, reloaded by running gateways."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarm import private
from swarm.errors import ConfigError
from swarm.keys.keys import Key, Ring

_VERSION = 1
_MAX_BYTES = 16 << 20
NAME = "keys.json"  # In a state directory.


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: tuple[Key, ...]


def read(path: Path) -> Ring | None:
    """Read the keys; None if there is no file. Raises ConfigError if it isn't private or is invalid."""
    content = private.read(path, "the keys' file", _MAX_BYTES, remedy="rotate its keys")
    if content is None:
        return None
    try:
        written = msgspec.json.decode(content, type=_Written)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a file of keys ({error}); swarmctl keys writes one") from None
    if written.version != _VERSION:
        raise ConfigError(f"{path} is of version {written.version}, and this build reads {_VERSION}")
    return Ring(written.keys)


def change(path: Path, edit: Callable[[Ring], Ring]) -> Ring:
    """Apply ``edit`` to the keys under an exclusive lock, and write the result. Raises ConfigError."""
    try:
        private.make_directory(path.parent)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_written(path, error) from None
    with os.fdopen(lock, "r+"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        ring = edit(read(path) or Ring())
        try:
            private.write(
                path, msgspec.json.format(msgspec.json.encode(_Written(_VERSION, ring.keys)), indent=2) + b"\n"
            )
        except OSError as error:
            raise _not_written(path, error) from None
    return ring


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the keys' file {path} can't be written ({error.strerror})")


Stamp = tuple[int, int, int, int]  # Inode, modification time, size and mode of a file.


class Watched:
    """API keys that follow changes of their file. An unreadable or deleted file changes nothing: the last keys stay
    valid, so that a mishap never disables authentication."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError if the file exists but is invalid."""
        self.path = path
        self._stamp = self._look()
        self.ring = None if path is None else read(path)  # None: no keys are configured, so none are required.

    def refresh(self) -> str | None:
        """Reload the file if it has changed. Return an error text (once), empty text for new keys, or None if nothing
        changed."""
        stamp = self._look()
        if stamp == self._stamp or self.path is None:
            return None
        self._stamp = stamp
        try:
            ring = read(self.path)
        except ConfigError as error:
            return str(error)
        if ring is None:
            return f"the keys' file {self.path} is gone; its keys stay valid until a new one is there"
        self.ring = ring
        return ""

    def _look(self) -> Stamp | None:
        if self.path is None:
            return None
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode

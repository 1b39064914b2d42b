"""File of API keys: readable by its owner alone, written as a whole, reloaded by running gateways."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarm import private_files
from swarm.api_keys.keys import ApiKey, KeySet
from swarm.errors import ConfigError

_VERSION = 1
_MAX_BYTES = 16 << 20
NAME = "keys.json"  # In a state directory.


class _StoredKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: tuple[ApiKey, ...]


def read_keys(path: Path) -> KeySet | None:
    """Read the keys; None if there is no file. Raises ConfigError if it isn't private or is invalid."""
    content = private_files.read(path, "the keys' file", _MAX_BYTES, remedy="rotate its keys")
    if content is None:
        return None
    try:
        stored = msgspec.json.decode(content, type=_StoredKeys)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a file of keys ({error}); swarmctl keys writes one") from None
    if stored.version != _VERSION:
        raise ConfigError(f"{path} is of version {stored.version}, and this build reads {_VERSION}")
    return KeySet(stored.keys)


def update_keys(path: Path, edit: Callable[[KeySet], KeySet]) -> KeySet:
    """Apply ``edit`` to the keys under an exclusive lock, and write the result. Raises ConfigError."""
    try:
        private_files.make_private_directory(path.parent)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _write_error(path, error) from None
    with os.fdopen(lock, "r+"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = edit(read_keys(path) or KeySet())
        try:
            private_files.write(
                path, msgspec.json.format(msgspec.json.encode(_StoredKeys(_VERSION, keys.keys)), indent=2) + b"\n"
            )
        except OSError as error:
            raise _write_error(path, error) from None
    return keys


def _write_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the keys' file {path} can't be written ({error.strerror})")


FileStamp = tuple[int, int, int, int]  # Inode, modification time, size and mode of a file.


class ReloadingKeyFile:
    """API keys that follow changes of their file. An unreadable or deleted file changes nothing: the last keys stay
    valid, so that a mishap never disables authentication."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError if the file exists but is invalid."""
        self.path = path
        self._file_stamp = self._stat()
        self.keys = None if path is None else read_keys(path)  # None: no keys are configured, so none are required.

    def refresh(self) -> str | None:
        """Reload the file if it has changed. Return an error text (once), empty text for new keys, or None if nothing
        changed."""
        stamp = self._stat()
        if stamp == self._file_stamp or self.path is None:
            return None
        self._file_stamp = stamp
        try:
            ring = read_keys(self.path)
        except ConfigError as error:
            return str(error)
        if ring is None:
            return f"the keys' file {self.path} is gone; its keys stay valid until a new one is there"
        self.keys = ring
        return ""

    def _stat(self) -> FileStamp | None:
        if self.path is None:
            return None
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode

"""Private files: read only if no other user can access them, written as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from swarm.errors import ConfigError


def read(path: Path, what: str, max_bytes: int, *, remedy: str, is_credential: bool = False) -> bytes | None:
    """Return the content; None if there is no file. Raises ConfigError if others may read or replace it.

    ``what`` names the file and ``remedy`` the action after a disclosure, for errors. ``is_credential``: systemd created
    it, and its service reads it as a member of root's group.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{what} {path} can't be read ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        _check_private(path, what, os.fstat(fd), remedy, is_credential)
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{what} {path} can't be read ({error.strerror})") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{what} {path} has more than {max_bytes} bytes: it is none")
    return content


def _check_private(path: Path, what: str, status: os.stat_result, remedy: str, is_credential: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what} {path} is no regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{what} {path} belongs to another user ({status.st_uid})")
    by_group = stat.S_IRGRP if is_credential and status.st_uid == status.st_gid == 0 else 0
    if status.st_mode & 0o077 & ~by_group:
        raise ConfigError(f"others may read {what} {path}: chmod 600 {path}, and {remedy}")
    parent = path.parent.stat()
    if parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX:
        raise ConfigError(f"others may write the directory {path.parent} of {what}: chmod 700 {path.parent}")


def make_private_directory(path: Path) -> None:
    """Create a directory for its owner alone. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def replace_durably(new: Path, path: Path) -> None:
    """Replace ``path`` by the already written file ``new``, atomically and durably. Raises OSError."""
    new.replace(path)
    _sync_directory(path.parent)


def write(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Write a file atomically and durably. Raises OSError.

    ``is_new``: raises FileExistsError, and changes nothing, if the file exists.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            os.link(new, path)
            new.unlink()
        else:
            new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

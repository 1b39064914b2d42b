"""The back door of a data door, for who runs on the same host as the same user: a Unix socket (ipc), which costs less.

Nobody tells where it is. Whoever knows the door's address finds it by that: its name is made of the door's key and port
and of the network that this process lives in, and it lies in a directory that only this user may enter. So who runs on
another host, as another user, with another file system (a container) or in another network finds none, and takes the
door itself. The directory is the lock: nothing is encrypted here. Both ends ask the kernel, too, whose process the
other end is, and who knocks names the door's key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from swarm.errors import ConfigError

MOST_PATH: Final = 107  # bytes of a Unix socket's name, as the kernel has it
_BACKLOG: Final = 16
_NAME_DIGITS: Final = 32
_MOST_SWEPT: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class BackDoor(NamedTuple):
    """One that is listened at, and where."""

    listening: socket.socket
    path: Path

    def remove(self) -> None:
        """Leave no file behind. The socket is for its door to close."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def listen(key: bytes, port: int) -> BackDoor:
    """Listen at the back door of the door with this key and port. Raises ConfigError: why there can be none."""
    path = _path(key, port)
    new = path.with_name(f".{os.getpid()}-{port}")  # so that its place is never taken by one that does not listen yet
    if max(len(os.fsencode(each)) for each in (path, new)) > MOST_PATH:
        raise ConfigError(f"the name of a socket in {path.parent} would be longer than {MOST_PATH} bytes")
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        if reason := _shared(path.parent):
            raise ConfigError(reason)
        _sweep(path.parent)
        new.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.setblocking(False)
            made.bind(str(new))
            made.listen(_BACKLOG)
            new.rename(path)  # nobody else can have this key and this port
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(f"there can be no socket in {path.parent} ({error.strerror})") from None
    return BackDoor(made, path)


def found(key: bytes, port: int) -> str | None:
    """The back door of the door with this key and port, if there is one that we may trust."""
    if not key or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        path = _path(key, port)
        is_there = not _shared(path.parent) and stat.S_ISSOCK(path.lstat().st_mode)
    except (OSError, ConfigError):
        return None
    return str(path) if is_there else None


def is_own(connected: socket.socket) -> bool:
    """Is the process at the other end one of this user's?"""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()


def _path(key: bytes, port: int) -> Path:
    """Raises ConfigError where systems have no such sockets, or can't tell whose they are."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigError("this system does not tell who is at the other end of a socket")
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError as error:
        raise ConfigError(f"in which network this process lives can't be told ({error.strerror})") from None
    name = hashlib.sha256(b"%d %d %b" % (network, port, key)).hexdigest()[:_NAME_DIGITS]
    return Path(tempfile.gettempdir()) / f"swarm-{os.geteuid()}" / name


def _shared(directory: Path) -> str:
    """Why others could have a hand in what lies there; empty if they can't. Raises OSError."""
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return f"{directory} is not this user's alone: remove it, or chmod 700 {directory}"


def _sweep(directory: Path) -> None:
    """Remove what processes left behind that were killed: nobody listens there."""
    for path in [each for each in directory.iterdir() if len(each.name) == _NAME_DIGITS][:_MOST_SWEPT]:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # its owner is busy, or it went meanwhile
                continue

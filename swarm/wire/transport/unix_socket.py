"""Unix socket of a data listener, for senders of the same user on the same host: cheaper than TCP.

Its path is not communicated. A sender derives it from the listener's endpoint: the file name is a hash of the
listener's key and port and of the network namespace, in a directory that only this user can access. A sender on another
host, of another user, with another file system (a container) or in another network finds no such file and connects by
TCP. The directory is the protection: nothing is encrypted here. In addition, both ends ask the kernel for the user of
the peer process, and the sender presents the listener's key.
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

MAX_PATH_BYTES: Final = 107  # Maximum length of a Unix socket's path in bytes (kernel limit).
_BACKLOG: Final = 16
_NAME_DIGITS: Final = 32
_MAX_SWEPT: Final = 256  # Stale sockets that one start removes at most.
_CREDENTIALS: Final = struct.Struct("3i")  # Of SO_PEERCRED: pid, uid, gid.


class UnixListener(NamedTuple):
    """A listening Unix socket and its path."""

    listening: socket.socket
    path: Path

    def remove(self) -> None:
        """Remove the file. The listener closes the socket."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def listen(key: bytes, port: int) -> UnixListener:
    """Open the Unix socket for the listener with this key and port. Raises ConfigError with the reason if that is
    impossible."""
    path = _path(key, port)
    # Bind to a temporary name first, so that the final name never refers to a socket that does not listen yet.
    new = path.with_name(f".{os.getpid()}-{port}")
    if max(len(os.fsencode(each)) for each in (path, new)) > MAX_PATH_BYTES:
        raise ConfigError(f"the name of a socket in {path.parent} would be longer than {MAX_PATH_BYTES} bytes")
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        if reason := _tampering_risk(path.parent):
            raise ConfigError(reason)
        _sweep(path.parent)
        new.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.bind(str(new))
            sock.listen(_BACKLOG)
            new.rename(path)  # No other process can have this key and this port.
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"there can be no socket in {path.parent} ({error.strerror})") from None
    return UnixListener(sock, path)


def find_socket(key: bytes, port: int) -> str | None:
    """Return the path of the Unix socket for the listener with this key and port, if it exists and is trustworthy."""
    if not key or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        path = _path(key, port)
        is_there = not _tampering_risk(path.parent) and stat.S_ISSOCK(path.lstat().st_mode)
    except (OSError, ConfigError):
        return None
    return str(path) if is_there else None


def is_same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()


def _path(key: bytes, port: int) -> Path:
    """Return the path of the socket. Raises ConfigError on systems without Unix sockets or without peer credentials."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigError("this system does not report the user of the peer process of a socket")
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError as error:
        raise ConfigError(f"the network namespace of this process can't be determined ({error.strerror})") from None
    name = hashlib.sha256(b"%d %d %b" % (network, port, key)).hexdigest()[:_NAME_DIGITS]
    return Path(tempfile.gettempdir()) / f"swarm-{os.geteuid()}" / name


def _tampering_risk(directory: Path) -> str:
    """Return why other users could tamper with this directory; empty if they can't. Raises OSError."""
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return f"{directory} is not this user's alone: remove it, or chmod 700 {directory}"


def _sweep(directory: Path) -> None:
    """Remove sockets that killed processes have left behind."""
    for path in [each for each in directory.iterdir() if len(each.name) == _NAME_DIGITS][:_MAX_SWEPT]:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # Its owner is busy, or has just removed it.
                continue

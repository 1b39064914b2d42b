"""State directory of ``swarm up``: a named one, or a private one that is removed at the end.

A user of a state directory holds a lock in it, which the kernel releases with its holder: a second supervisor or broker
on the same directory is refused. A killed supervisor can't remove its private directory; the next ``swarm up`` of the
same user removes directories without a holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm.errors import ConfigError

PREFIX = "swarm-up-"
SUPERVISOR_LOCK = "supervisor.lock"
_PID_WIDTH = 10  # fixed length, so that rewriting needs no new disk space
BROKER_LOCK = "broker.lock"  # a separate lock: a supervisor's broker works in its supervisor's directory


@contextmanager
def state_directory(given: Path | None) -> Iterator[Path]:
    """Lock the directory, with a ``logs`` directory in it, until the end of the context.

    Raises ``ConfigError`` if it can't be written or another ``swarm up`` holds it.
    """
    if given is None:
        with _private_directory() as private:
            yield _make_logs_folder(private)
    else:
        directory = _make_logs_folder(given.expanduser().absolute())
        with hold_lock(directory, SUPERVISOR_LOCK, "swarm up"):
            yield directory


@contextmanager
def hold_lock(directory: Path, lock: str, holder: str) -> Iterator[None]:
    """Hold a lock with this name in the directory, which is created if needed.

    Raises ``ConfigError`` if another process holds it. ``holder`` is the name of the program in the message.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.fdopen(os.open(directory / lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise _write_error(directory, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read().strip() or "?"
            raise ConfigError(
                f"the state directory {directory} is in use by another {holder} (process {pid}): stop that one "
                "first, or name another with --state-dir"
            ) from None
        _write_pid(file.fileno())
        yield


def _write_pid(lock: int) -> None:
    """Write our process id, for the message of a refused process. Overwrites the old one in place, which works on a
    full disk."""
    with suppress(OSError):
        os.pwrite(lock, f"{os.getpid():<{_PID_WIDTH}}\n".encode(), 0)
        os.ftruncate(lock, _PID_WIDTH + 1)


def _make_logs_folder(directory: Path) -> Path:
    try:
        # only for this directory: parents that are created get the default mode
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "logs").mkdir(exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=directory / "logs").close()
    except OSError as error:
        raise _write_error(directory, error) from None
    return directory


class StateDirFull(ConfigError):
    """The disk is full, which may be temporary."""


def _write_error(directory: Path, error: OSError) -> ConfigError:
    kind = StateDirFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
    return kind(f"the state directory {directory} can't be written ({error.strerror}); name another with --state-dir")


@contextmanager
def _private_directory() -> Iterator[Path]:
    remove_stale(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with hold_lock(directory, SUPERVISOR_LOCK, "swarm up"):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove this user's private directories whose supervisor is gone."""
    for directory in parent.glob(PREFIX + "*"):
        try:
            mine = not directory.is_symlink() and directory.stat().st_uid == os.getuid()
            with (directory / SUPERVISOR_LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if mine:
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # held by a running supervisor, just removed, or owned by another user
            continue

"""Where ``swarm up`` keeps its state: a directory that was named, or a private one that goes when it ends.

A supervisor that was killed can't tidy up. So a private directory carries a lock that the kernel drops with its holder,
and the next ``swarm up`` of the same user removes those that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import ConfigError

PREFIX = "swarm-up-"
LOCK = "supervisor.lock"


@contextmanager
def state_directory(given: Path | None) -> Iterator[Path]:
    """The directory, with a ``logs`` directory in it. Raises ConfigError if it can't be written."""
    if given is None:
        with _private_directory() as private:
            yield _with_logs(private)
    else:
        yield _with_logs(given.expanduser().absolute())


def _with_logs(directory: Path) -> Path:
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=directory / "logs").close()
    except OSError as error:
        raise ConfigError(
            f"the state directory {directory} can't be written ({error.strerror}); name another with --state-dir"
        ) from None
    return directory


@contextmanager
def _private_directory() -> Iterator[Path]:
    remove_stale(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (directory / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove this user's private directories whose supervisor is gone."""
    for directory in parent.glob(PREFIX + "*"):
        try:
            mine = not directory.is_symlink() and directory.stat().st_uid == os.getuid()
            with (directory / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if mine:
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # held by a living supervisor, gone meanwhile, or somebody else's
            continue

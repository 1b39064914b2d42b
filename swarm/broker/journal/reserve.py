"""Room on the disk that is set aside for epochs.

While the disk is full, requests that run go on without their tokens being written. But a worker may die, and the next
epoch must not be announced before it is in the journal. So a file beside the journal holds some room, and gives up a
piece of it for each epoch that finds none, and for opening the journal itself, should the broker die meanwhile. It is
filled again as soon as there is room, and only then is the disk taken for mended: else the first new request would take
what the epochs may need. What was set aside outlives the process, and so does that it was: the file is there from then
on, however little is left of it. A disk that never had the room has no file, and nobody waits for it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE = "journal.reserve"
SIZE = 1 << 20
PIECE = 1 << 16  # an epoch is a few pages of the write-ahead log
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(slots=True)
class Reserve:
    """In this directory; nothing here raises. ``num_bytes``: what is set aside now."""

    directory: Path
    size: int = SIZE
    num_bytes: int = field(default=0, init=False)
    _is_kept: bool = field(default=False, init=False)  # it was whole once, in this process or an earlier one

    def __post_init__(self) -> None:
        with suppress(OSError):
            found = os.stat(self.directory / FILE)
            if stat.S_ISREG(found.st_mode):
                self._is_kept = True
                self.num_bytes = min(found.st_size, found.st_blocks * 512, self.size)

    def fill(self) -> bool:
        """Set it aside, if there is room. Whether it is whole, or never was."""
        if self.num_bytes < self.size and not self._resize(self.size):
            if not self._is_kept:
                self._forget()
            return not self._is_kept
        self._is_kept = True
        return True

    def give(self) -> bool:
        """Give up a piece. False: there is none left."""
        if self.num_bytes == 0:
            return False
        return self._resize(max(0, self.num_bytes - PIECE))

    def _forget(self) -> None:
        """No file, or the next process would take it for one that was used up."""
        with suppress(OSError):
            os.unlink(self.directory / FILE)

    def _resize(self, num_bytes: int) -> bool:
        """What could not be had whole is left as it was."""
        try:
            file = os.open(self.directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.ftruncate(file, min(num_bytes, self.num_bytes))
            if num_bytes > self.num_bytes:
                _allocate(file, num_bytes)
            self.num_bytes = num_bytes
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self.num_bytes)
            return False
        finally:
            os.close(file)
        return True


def _allocate(file: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.pwrite(file, bytes(num_bytes), 0)


def is_full(directory: Path) -> bool:
    """Whether there is no room here, by trying: a quota is not seen otherwise."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(PIECE))  # what can be compressed takes no room
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in NO_ROOM
    return False

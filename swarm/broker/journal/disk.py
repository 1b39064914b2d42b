"""Disk space of the journal: checkpoints of the write-ahead log, and a reserve for epochs.

SQLite would checkpoint by itself after some number of pages. But if a sync fails then, SQLite reports nothing; the
pages are not on the disk, while all later syncs succeed. Therefore the store checkpoints by itself and sees the
failures. SQLite reveals the log's length only at a checkpoint; in between it is estimated from the number of changed
rows and the pages that earlier changes took. If the estimate is far off, the log exceeds its usual size.

While the disk is full, running requests continue without their tokens being written. But if a worker dies, the next
epoch must be in the journal before it is announced. Therefore a file beside the journal reserves some space. It gives
up a piece for each epoch that finds no space, and for opening the journal itself if the broker dies meanwhile. The
reserve is refilled as soon as there is space, and only then does the disk count as usable again; otherwise the first
new request would take what the epochs may need. The reserve outlives the process: once created, the file stays, however
little is left of it, so that a restarted broker refills it first. On a disk that never had the space there is no file,
and the broker does not wait for it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096
# In pages of 4 KiB: length of the write-ahead log at which it is checkpointed. A checkpoint takes syncs: with 512, a
# small transaction costs up to 50 % more than with 2,048. But the log alone must not fill a small disk.
CHECKPOINT_PAGES = 2048
LEAST_PAGES = 64
SHARE_OF_DISK = 256  # the log takes at most this fraction (1 / 256) of the file system
_FRAME = PAGE + 24  # bytes of a page in the log, with its header
_LEAST, _MOST = 1 / 8, 64.0  # limits of the estimated pages per change

RESERVE = "journal.reserve"
RESERVED = 1 << 20  # bytes
PIECE = 1 << 16  # bytes given up at a time; an epoch takes a few pages of the write-ahead log
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def checkpoint_pages(directory: Path) -> int:
    """Return the length of the log, in pages, at which it is checkpointed on this disk."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return CHECKPOINT_PAGES
    return max(LEAST_PAGES, min(CHECKPOINT_PAGES, disk.f_blocks * disk.f_frsize // SHARE_OF_DISK // PAGE))


@dataclass(slots=True)
class LogLength:
    """Estimate of the write-ahead log's length. ``pages``: length at which a checkpoint is due. Changes are counted
    from the opening of the connection."""

    path: Path
    pages: int
    _pages_per_change: float = 4.0
    _folded_at: int = 0  # number of changes at the last checkpoint
    _outgrown: int = 0  # bytes of the log after the last checkpoint, in case it did not shrink

    def is_due(self, changes: int) -> bool:
        if (changes - self._folded_at) * self._pages_per_change >= self.pages:
            return True
        return self._num_bytes() > max(2 * self.pages * _FRAME, 2 * self._outgrown)

    def folded(self, changes: int, pages: int | None) -> None:
        """Update the estimate after a checkpoint of ``pages`` pages. None: unknown; it is retried after as many changes
        again."""
        new = changes - self._folded_at
        if pages is not None and new:
            self._pages_per_change = min(_MOST, max(_LEAST, pages / new))
        self._folded_at, self._outgrown = changes, self._num_bytes()

    def _num_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


@dataclass(slots=True)
class Reserve:
    """Disk space reserved in a directory. No method raises. ``num_bytes``: space reserved now."""

    directory: Path
    size: int = RESERVED
    num_bytes: int = field(default=0, init=False)
    # the reserve was complete once, in this process or an earlier one
    _is_kept: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        with suppress(OSError):
            found = os.stat(self.directory / RESERVE)
            if stat.S_ISREG(found.st_mode):
                self._is_kept = True
                self.num_bytes = min(found.st_size, found.st_blocks * 512, self.size)

    def fill(self) -> bool:
        """Fill the reserve if there is space. Return whether it is complete, or was never established on this disk."""
        if self.num_bytes < self.size and not self._resize(self.size):
            if not self._is_kept:
                self._forget()
            return not self._is_kept
        self._is_kept = True
        return True

    def give(self) -> bool:
        """Give up a piece. Return False if none is left."""
        if self.num_bytes == 0:
            return False
        return self._resize(max(0, self.num_bytes - PIECE))

    def _forget(self) -> None:
        """Remove the file; otherwise the next process would take it for a reserve that was used up."""
        with suppress(OSError):
            os.unlink(self.directory / RESERVE)

    def _resize(self, num_bytes: int) -> bool:
        """Change the file's size. If the new size is not available in full, leave the file as it was."""
        try:
            file = os.open(self.directory / RESERVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """Whether the disk is full, by writing a test file: a quota is not visible otherwise."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(PIECE))  # random, because compressible data may take no space
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in NO_ROOM
    return False

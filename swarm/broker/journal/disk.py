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
MIN_CHECKPOINT_PAGES = 64
DISK_FRACTION = 256  # the log takes at most this fraction (1 / 256) of the file system
_FRAME = PAGE + 24  # bytes of a page in the log, with its header
_MIN_PAGES_PER_CHANGE, _MAX_PAGES_PER_CHANGE = 1 / 8, 64.0  # limits of the estimated pages per change

RESERVE_FILE = "journal.reserve"
RESERVE_BYTES = 1 << 20  # bytes
PIECE_BYTES = 1 << 16  # bytes given up at a time; an epoch takes a few pages of the write-ahead log
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def checkpoint_pages(directory: Path) -> int:
    """Return the length of the log, in pages, at which it is checkpointed on this disk."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return CHECKPOINT_PAGES
    return max(MIN_CHECKPOINT_PAGES, min(CHECKPOINT_PAGES, disk.f_blocks * disk.f_frsize // DISK_FRACTION // PAGE))


@dataclass(slots=True)
class LogLengthEstimate:
    """Estimate of the write-ahead log's length. ``pages``: length at which a checkpoint is due. Changes are counted
    from the opening of the connection."""

    path: Path
    pages: int
    _pages_per_change: float = 4.0
    _checkpoint_changes: int = 0  # number of changes at the last checkpoint
    _bytes_after_checkpoint: int = 0  # bytes of the log after the last checkpoint, in case it did not shrink

    def is_due(self, changes: int) -> bool:
        if (changes - self._checkpoint_changes) * self._pages_per_change >= self.pages:
            return True
        return self._num_bytes() > max(2 * self.pages * _FRAME, 2 * self._bytes_after_checkpoint)

    def record_checkpoint(self, changes: int, pages: int | None) -> None:
        """Update the estimate after a checkpoint of ``pages`` pages. None: unknown; it is retried after as many changes
        again."""
        new = changes - self._checkpoint_changes
        if pages is not None and new:
            self._pages_per_change = min(_MAX_PAGES_PER_CHANGE, max(_MIN_PAGES_PER_CHANGE, pages / new))
        self._checkpoint_changes, self._bytes_after_checkpoint = changes, self._num_bytes()

    def _num_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


@dataclass(slots=True)
class DiskReserve:
    """Disk space reserved in a directory. No method raises. ``num_bytes``: space reserved now."""

    directory: Path
    size: int = RESERVE_BYTES
    num_bytes: int = field(default=0, init=False)
    # the reserve was complete once, in this process or an earlier one
    _was_complete: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        with suppress(OSError):
            status = os.stat(self.directory / RESERVE_FILE)
            if stat.S_ISREG(status.st_mode):
                self._was_complete = True
                self.num_bytes = min(status.st_size, status.st_blocks * 512, self.size)

    def fill(self) -> bool:
        """Fill the reserve if there is space. Return whether it is complete, or was never established on this disk."""
        if self.num_bytes < self.size and not self._resize(self.size):
            if not self._was_complete:
                self._remove()
            return not self._was_complete
        self._was_complete = True
        return True

    def release_piece(self) -> bool:
        """Give up a piece. Return False if none is left."""
        if self.num_bytes == 0:
            return False
        return self._resize(max(0, self.num_bytes - PIECE_BYTES))

    def _remove(self) -> None:
        """Remove the file; otherwise the next process would take it for a reserve that was used up."""
        with suppress(OSError):
            os.unlink(self.directory / RESERVE_FILE)

    def _resize(self, num_bytes: int) -> bool:
        """Change the file's size. If the new size is not available in full, leave the file as it was."""
        try:
            file = os.open(self.directory / RESERVE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            file.write(os.urandom(PIECE_BYTES))  # random, because compressible data may take no space
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in NO_SPACE_ERRORS
    return False

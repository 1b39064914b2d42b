"""Bounds how much of the disk the journal takes: its write-ahead log, and what is set aside for epochs.

SQLite would fold the log into the file by itself, every so many pages. But if a sync fails in that, it tells nobody:
and what was to be synced then is not on the disk, while all later syncs succeed. So it is done by the store, and
failures are heard of. How long the log is SQLite tells only when it folds it; in between it is reckoned by the rows
that were changed, and by the pages that these took before. Where that is far off, it outgrows its usual size.

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

PAGE = 4096
# Of 4 KiB: how much the write-ahead log holds before it is folded into the file. Folding takes syncs: with 512 a small
# transaction costs up to half as much again as with 2,048. But a small disk must not be filled by the log alone.
CHECKPOINT_PAGES = 2048
LEAST_PAGES = 64
SHARE_OF_DISK = 256  # the log takes no more than one part in so many of the whole file system
_FRAME = PAGE + 24  # as it stands in the log
_LEAST, _MOST = 1 / 8, 64.0  # pages per change

RESERVE = "journal.reserve"
RESERVED = 1 << 20  # bytes
PIECE = 1 << 16  # an epoch is a few pages of the write-ahead log
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def checkpoint_pages(directory: Path) -> int:
    """How many pages the log may have on this disk before it is folded."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return CHECKPOINT_PAGES
    return max(LEAST_PAGES, min(CHECKPOINT_PAGES, disk.f_blocks * disk.f_frsize // SHARE_OF_DISK // PAGE))


@dataclass(slots=True)
class LogLength:
    """Reckons the log's length. ``pages``: that it may have, about. Changes are counted from the connection's opening
    on."""

    path: Path
    pages: int
    _pages_per_change: float = 4.0
    _folded_at: int = 0
    _outgrown: int = 0  # bytes that it had when it was folded last, if that was much

    def is_due(self, changes: int) -> bool:
        if (changes - self._folded_at) * self._pages_per_change >= self.pages:
            return True
        return self._num_bytes() > max(2 * self.pages * _FRAME, 2 * self._outgrown)

    def folded(self, changes: int, pages: int | None) -> None:
        """Learn how many pages the log had; None: not found out, and tried again after as many changes."""
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
    """Room set aside in this directory; nothing here raises. ``num_bytes``: what is set aside now."""

    directory: Path
    size: int = RESERVED
    num_bytes: int = field(default=0, init=False)
    _is_kept: bool = field(default=False, init=False)  # it was whole once, in this process or an earlier one

    def __post_init__(self) -> None:
        with suppress(OSError):
            found = os.stat(self.directory / RESERVE)
            if stat.S_ISREG(found.st_mode):
                self._is_kept = True
                self.num_bytes = min(found.st_size, found.st_blocks * 512, self.size)

    def fill(self) -> bool:
        """Set the room aside, if there is any. Returns whether it is whole, or never was."""
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
        """Remove the file, or the next process would take it for one that was used up."""
        with suppress(OSError):
            os.unlink(self.directory / RESERVE)

    def _resize(self, num_bytes: int) -> bool:
        """Change the file's size; if the new one can't be had whole, leave the file as it was."""
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
    """Whether there is no room here, by trying: a quota is not seen otherwise."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(PIECE))  # what can be compressed takes no room
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in NO_ROOM
    return False

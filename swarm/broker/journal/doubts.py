"""Decides whether the journal's files can still be believed while a broker writes them; the writer's thread acts.

Four things shake the belief:

* A file is gone, or another one is in its place. Whoever has it open writes on into what nobody will find again.
* SQLite finds pages that are none: the file is damaged.
* A sync failed. What was written before it may never reach the disk, though the next sync succeeds: the kernel tells of
  it once, and takes those pages for clean. So nothing that wasn't synced before counts as written.
* Somebody else wrote: the file is not as our last write left it. That may be harmless (a backup's checkpoint), so it is
  examined, and not more often than it costs little.

Then the journal is begun anew, from what the old one still gives and from memory (``salvage.renewed``). That takes a
while, and where a disk damages everything it must not be done all the time.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.broker.journal.database import DamagedJournal, UnsyncedJournal
from swarm.errors import JournalError

LEAST_S = 1.0  # between two attempts to begin anew
SHARE = 20  # of the time, examining and beginning anew take one part in so many


@dataclass(frozen=True, slots=True)
class FileSeen:
    """``number``: device and inode, so which file it is."""

    number: tuple[int, int]
    size: int
    changed_ns: int


Seen = Mapping[str, FileSeen | None]  # by name; None: it is not there


def seen(path: Path) -> Seen:
    """Look at the journal's file and its write-ahead log from outside; asked twice per transaction."""
    name = os.fspath(path)
    return {path.name: _file_seen(name), f"{path.name}-wal": _file_seen(f"{name}-wal")}


def _file_seen(path: str) -> FileSeen | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileSeen((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


class Next(enum.Enum):
    """What the writer does next."""

    GO_ON = enum.auto()
    EXAMINE = enum.auto()
    RENEW = enum.auto()
    WAIT = enum.auto()  # nothing can be written, and it is too early to try again


@dataclass(slots=True)
class Doubts:
    """``reason``: why the journal can't be believed, in words; "": it can."""

    path: Path
    reason: str = ""
    _left: Seen = field(default_factory=dict)
    _is_touched: bool = False
    _examine_at: float = 0.0
    _renew_at: float = 0.0

    def left(self, files: Seen) -> None:
        """Learn how the files are after we have written, or looked."""
        self._miss(files)
        self._left = files

    def find(self, files: Seen) -> None:
        """Compare how the files look, before we write again, with how we left them."""
        self._miss(files)
        self._is_touched |= any(was != files.get(name) for name, was in self._left.items() if was)

    def _miss(self, files: Seen) -> None:
        gone = [name for name, was in self._left.items() if was and not _is_same_file(was, files.get(name))]
        if gone:
            what = " and ".join(gone)
            self.arise(f"the journal {self.path} was deleted or replaced while it was in use ({what})")

    def arise(self, reason: str) -> None:
        """Stop believing the journal. The first reason stays."""
        self.reason = self.reason or reason

    def failed(self, error: JournalError) -> None:
        """Learn that something could not be read or written. A disk that is full, say, is no reason for doubts."""
        if isinstance(error, DamagedJournal | UnsyncedJournal):
            self.arise(str(error))

    def next(self, now: float) -> Next:
        if self.reason:
            return Next.RENEW if now >= self._renew_at else Next.WAIT
        return Next.EXAMINE if self._is_touched and now >= self._examine_at else Next.GO_ON

    def examined(self, began: float, now: float, *, done: bool) -> None:
        """Learn that the file holds what was written here; or that it could not be found out."""
        self._is_touched = not done
        self._examine_at = now + max(LEAST_S, SHARE * (now - began))

    def renewed(self, began: float, now: float, *, done: bool) -> None:
        """Learn that the journal was begun anew, or that it failed and will be tried again."""
        self._renew_at = now + max(LEAST_S, SHARE * (now - began) if done else 0.0)
        if done:
            self.reason, self._is_touched, self._left = "", False, {}


def _is_same_file(was: FileSeen, found: FileSeen | None) -> bool:
    return found is not None and found.number == was.number

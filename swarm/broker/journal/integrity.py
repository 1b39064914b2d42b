"""Integrity of the journal: decides whether its files can still be trusted while a broker writes them. The writer's
thread acts on the decisions.

Four events destroy trust:

* A file was deleted or replaced. The process that has it open would continue to write into a file that is lost.
* SQLite finds invalid pages: the file is damaged.
* A sync failed. Data written before may never reach the disk, even if the next sync succeeds: the kernel reports the
  error once and marks the pages clean. Therefore nothing that was not synced before counts as written.
* Another process wrote: the file differs from its state after our last write. That may be harmless (a backup's
  checkpoint), so the file is examined, at a limited rate because that is expensive.

An untrusted journal is replaced by a new one, with what can be read from the old one and with what is in memory
(``salvage.renew_journal``). That takes a while and is rate-limited, for disks that damage everything.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.broker.journal.database import DamagedJournal, UnsyncedJournal
from swarm.errors import JournalError

MIN_INTERVAL_S = 1.0  # seconds between two attempts to renew the journal
TIME_DIVISOR = 20  # examining and renewing take at most one part in this many of the time


@dataclass(frozen=True, slots=True)
class FileState:
    """State of a file as seen by ``stat``. ``number``: device and inode, which identify the file."""

    number: tuple[int, int]
    size: int
    changed_ns: int


FileStates = Mapping[str, FileState | None]  # by file name; None: the file is missing


def stat_files(path: Path) -> FileStates:
    """Return the state of the journal's file and its write-ahead log; called twice per transaction."""
    name = os.fspath(path)
    return {path.name: _stat_file(name), f"{path.name}-wal": _stat_file(f"{name}-wal")}


def _stat_file(path: str) -> FileState | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileState((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


class NextAction(enum.Enum):
    """Next action of the writer."""

    WRITE = enum.auto()  # the files can be trusted: write
    EXAMINE = enum.auto()  # another process has written: check the content
    RENEW = enum.auto()  # replace the journal by a new one
    WAIT = enum.auto()  # the journal can't be trusted, and it is too early for another attempt


@dataclass(slots=True)
class JournalIntegrity:
    """Trust in the journal's files. ``reason``: why they can't be trusted; empty while they can."""

    path: Path
    reason: str = ""
    _recorded: FileStates = field(default_factory=dict)  # state of the files after our last write
    _is_touched: bool = False  # another process has changed the files
    _examine_at: float = 0.0
    _renew_at: float = 0.0

    def record(self, files: FileStates) -> None:
        """Record the state of the files after we have written or examined them."""
        self._detect_missing(files)
        self._recorded = files

    def compare(self, files: FileStates) -> None:
        """Compare the state of the files before a write with the recorded state."""
        self._detect_missing(files)
        self._is_touched |= any(was != files.get(name) for name, was in self._recorded.items() if was)

    def _detect_missing(self, files: FileStates) -> None:
        missing = [name for name, was in self._recorded.items() if was and not _is_same_file(was, files.get(name))]
        if missing:
            what = " and ".join(missing)
            self.distrust(f"the journal {self.path} was deleted or replaced while it was in use ({what})")

    def distrust(self, reason: str) -> None:
        """Stop trusting the journal. The first reason is kept."""
        self.reason = self.reason or reason

    def record_error(self, error: JournalError) -> None:
        """Record a failed read or write. Only damage and failed syncs destroy trust; a full disk, for example, does
        not."""
        if isinstance(error, DamagedJournal | UnsyncedJournal):
            self.distrust(str(error))

    def next_action(self, now: float) -> NextAction:
        if self.reason:
            return NextAction.RENEW if now >= self._renew_at else NextAction.WAIT
        return NextAction.EXAMINE if self._is_touched and now >= self._examine_at else NextAction.WRITE

    def record_examination(self, began: float, now: float, *, done: bool) -> None:
        """Record an examination: ``done`` if the content is intact, else it could not be completed and is repeated."""
        self._is_touched = not done
        self._examine_at = now + max(MIN_INTERVAL_S, TIME_DIVISOR * (now - began))

    def record_renewal(self, began: float, now: float, *, done: bool) -> None:
        """Record an attempt to renew the journal: ``done`` if it succeeded, else it will be retried."""
        self._renew_at = now + max(MIN_INTERVAL_S, TIME_DIVISOR * (now - began) if done else 0.0)
        if done:
            self.reason, self._is_touched, self._recorded = "", False, {}


def _is_same_file(was: FileState, now: FileState | None) -> bool:
    return now is not None and now.number == was.number

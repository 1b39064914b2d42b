"""The journal's SQLite file: opening, schema and migrations, and the meaning of its errors."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarm.broker.journal.disk import NO_SPACE_ERRORS, PAGE, DiskReserve, checkpoint_pages, is_full
from swarm.errors import JournalError

FILE = "journal.db"
VERSION = 4
BUSY_S = 1.0  # seconds to wait for a lock; there is no other writer, but a reader may hold one

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (
    number INTEGER PRIMARY KEY,     -- in the order of their acceptance
    id TEXT NOT NULL UNIQUE,
    submit BLOB NOT NULL,
    tenant TEXT NOT NULL,
    accepted_at REAL NOT NULL,      -- wall clock, for people and for what outlives a reboot
    accepted_tick REAL NOT NULL,    -- monotonic clock of the boot named beside it
    boot TEXT NOT NULL,
    ended_at REAL                   -- wall clock; NULL while one of its sequences has not ended
);
CREATE INDEX ended ON requests (ended_at);
CREATE TABLE sequences (
    id INTEGER PRIMARY KEY,
    request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
    place INTEGER NOT NULL,         -- which continuation of its request
    reason TEXT,                    -- how it ended; NULL while it has not
    detail TEXT NOT NULL DEFAULT '',
    tokens BLOB                     -- all of them, once it has ended
);
CREATE INDEX of_request ON sequences (request);
CREATE TABLE tokens (
    sequence INTEGER NOT NULL REFERENCES sequences (id) ON DELETE CASCADE,
    first INTEGER NOT NULL,         -- index of the first of them among the generated ones
    part BLOB NOT NULL,
    PRIMARY KEY (sequence, first)
) WITHOUT ROWID;
"""
_ADD_ENDED_TICK = """
-- By the same clock as accepted_tick; NULL if the machine was started again since.
ALTER TABLE requests ADD COLUMN ended_tick REAL;
"""
_ADD_TOKEN_BUFFER = """
CREATE TABLE recent (               -- tokens of the last steps; see ``journal.recent``
    number INTEGER PRIMARY KEY,
    tokens BLOB NOT NULL
);
"""

_DROP_STEPS = """
DROP TABLE IF EXISTS steps;           -- versions 2 and 3 kept times of steps for traces
"""

_PIECE = 1 << 20  # bytes copied at a time
_REMEDY = "free disk space or grant write permission there, or name another directory with --state-dir"
_MIGRATIONS = (_TABLES, _ADD_ENDED_TICK, _ADD_TOKEN_BUFFER, _DROP_STEPS)  # migrations from version n to n + 1
_CUT_SHORT = (sqlite3.SQLITE_IOERR_SHORT_READ,)
_NOT_SYNCED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


def open_database(path: Path, reserve: DiskReserve) -> sqlite3.Connection:
    """Open the file, creating or migrating it if necessary. ``reserve`` is disk space to use if the disk is full,
    because a restarted broker must be able to open its journal. Raises JournalError."""
    while True:
        try:
            return _connect(path)
        except FullDisk:
            if not reserve.release_piece():
                raise


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _create_private(path)
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise _access_error(path, error) from None
    try:
        _prepare(path, db)
    except sqlite3.Error as error:
        db.close()
        raise to_journal_error(path, error) from None
    except JournalError:
        db.close()
        raise
    return db


def _create_private(path: Path) -> None:
    """Make the journal readable for its owner only. A new file gets its mode before anything is in it, and SQLite
    creates the write-ahead log and its index with the same mode. Files of older versions are corrected."""
    with suppress(FileExistsError):  # opened only if it is new: closing a file drops this process's locks on it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for file in (path, log_path(path), path.with_name(f"{path.name}-shm")):
        make_private(file)


def make_private(path: Path) -> None:
    """Remove the permissions of other users from a file of ours; on failure leave it as it is."""
    with suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a read-only connection for another thread. Raises JournalError."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise to_journal_error(path, error) from None


def _prepare(path: Path, db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise JournalError(
            f"the journal {path} was written by a newer Swarm (format {version}, this one reads up to "
            f"{VERSION}): install that version, or name another directory with --state-dir"
        )
    if version == 0:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA wal_autocheckpoint = 0")  # the store checkpoints by itself, see ``disk``
    db.execute(f"PRAGMA journal_size_limit = {checkpoint_pages(path.parent) * PAGE}")
    _migrate(db, version)
    # Data that a killed process has written, but perhaps not synced, is about to be used: make it durable first.
    _sync_checkpoint(path, db)
    problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)


def _sync_checkpoint(path: Path, db: sqlite3.Connection) -> None:
    """Checkpoint and sync the whole write-ahead log. If the disk has no space for that, sync the log itself."""
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        if _is_unsynced(error) or not _is_full(path, error):
            raise
        _rewrite_log(path)


def _rewrite_log(path: Path) -> None:
    """Rewrite the log in place and sync it. A sync may have failed in a broker that was killed afterwards; what it had
    written can be read but is not on the disk, and another sync alone does not write it."""
    try:
        log = os.open(log_path(path), os.O_RDWR | os.O_CLOEXEC)
        try:
            _rewrite(log)
            os.fsync(log)
        finally:
            os.close(log)
    except FileNotFoundError:  # no log, nothing to sync
        return
    except OSError as error:
        raise _access_error(path, error) from None


def _rewrite(file: int) -> None:
    offset = 0
    while piece := os.pread(file, _PIECE, offset):
        offset += os.pwrite(file, piece, offset)


def _access_error(path: Path, error: Exception) -> JournalError:
    kind = FullDisk if getattr(error, "errno", None) in NO_SPACE_ERRORS else JournalError
    return kind(f"the journal {path} can't be opened ({_reason(error)}): {_REMEDY}")


def log_path(path: Path) -> Path:
    """Return the path of the write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def _migrate(db: sqlite3.Connection, version: int) -> None:
    """Apply one migration per version, each in its own transaction."""
    for number in range(version, VERSION):
        with transaction(db):
            for statement in _MIGRATIONS[number].split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {number + 1}")


def to_journal_error(path: Path, error: sqlite3.Error) -> JournalError:
    """Convert an SQLite error into a JournalError."""
    if is_corruption(error):
        return DamagedJournal(f"the journal {path} is damaged ({_reason(error)})")
    if _is_unsynced(error):
        why = "the disk is full" if is_full(path.parent) else _reason(error)
        return UnsyncedJournal(
            f"the journal {path} could not be synced, so the content of the disk is uncertain ({why})"
        )
    if _has_code(error, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(f"another process holds the journal {path} ({_reason(error)}): end that process")
    kind = FullDisk if _is_full(path, error) else JournalError
    return kind(f"the journal {path} can't be written ({_reason(error)}): {_REMEDY}")


class DamagedJournal(JournalError):
    """The file can't be read completely; see ``salvage``."""


class UnsyncedJournal(JournalError):
    """A sync failed: data written before may be lost, even if the next sync succeeds."""


class FullDisk(JournalError):
    """The disk has no space for the write."""


class transaction:
    """Context manager for an SQLite transaction: commits everything or nothing."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


@contextmanager
def read_transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager for consistent reads: all queries in it see the same state."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


def is_corruption(error: sqlite3.Error) -> bool:
    """Whether the file's content is corrupt, so that retrying is of no use. Other errors come from the disk or from
    permissions."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, sqlite3.DatabaseError)
    return code in _CUT_SHORT or _has_code(error, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_unsynced(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in _NOT_SYNCED


def is_disk_refusal(error: sqlite3.Error) -> bool:
    """Whether the disk refuses the write, independently of its content."""
    return _has_code(error, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _is_full(path: Path, error: sqlite3.Error) -> bool:
    """Whether the disk is full. SQLite reports quotas, disks that fail only at a sync, and lack of space for the log's
    index as general I/O errors; in these cases a test file is written."""
    if _has_code(error, sqlite3.SQLITE_FULL):
        return True
    return _has_code(error, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and is_full(path.parent)


def _has_code(error: sqlite3.Error, *codes: int) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in codes  # the primary error code is in the lower byte


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__

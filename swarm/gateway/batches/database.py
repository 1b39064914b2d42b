"""The SQLite file of batches: its schema, its lock, how it is opened, and transactions."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import SwarmError
from swarm.private_files import make_private_directory

DIRECTORY = "batches"
FILE = "batches.db"
LOCK = "batches.lock"
VERSION = 2
_BUSY_S = 1.0  # seconds to wait for a reader's lock, such as a backup's

_TABLES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,   -- in the order of creation
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,                        -- id of a key
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL DEFAULT 0,
    num_requests INTEGER NOT NULL DEFAULT 0,    -- lines that are not blank
    is_whole INTEGER NOT NULL,
    batch INTEGER,                              -- of an output or error file
    is_error INTEGER
);
CREATE TABLE lines (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,                    -- from 1
    is_blank INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file, number)
) WITHOUT ROWID;
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    tenant TEXT NOT NULL,                       -- on whose account its lines run
    endpoint TEXT NOT NULL,
    input TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata BLOB NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    output_age_s INTEGER NOT NULL,
    errors BLOB NOT NULL,
    output TEXT,
    error TEXT,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    output_bytes INTEGER NOT NULL DEFAULT 0,
    error_bytes INTEGER NOT NULL DEFAULT 0,
    times BLOB NOT NULL,
    models BLOB NOT NULL
);
CREATE TABLE answers (
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,                    -- of the line
    is_error INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""
# for the deletion of what has expired, which would scan a table per file or batch; older stores get them when opened
_INDEXES = {
    "files_by_expiry": "files (expires_at)",
    "files_by_batch": "files (batch)",
    "batches_by_input": "batches (input)",
}


class StoreFailed(SwarmError):
    """The store cannot be used now. Nothing that it has confirmed is lost."""

    hint_status = 503


class Database:
    """The database in ``directory``. Every method may raise StoreFailed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / DIRECTORY / FILE
        self._lock: int | None = None
        self._db: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the store, and delete what interrupted uploads left. Without effect if it is open."""
        if self._db is not None:
            return
        try:
            make_private_directory(self._path.parent)
            self._take_lock()
            _make_private(self._path)
            db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"the store of batches {self._path} can't be opened ({error})") from None
        try:
            with self._errors():
                self._prepare(db)
        except StoreFailed:
            db.close()
            raise
        self._db = db

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(self._path.with_name(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StoreFailed(
                f"another gateway runs the batches of {self._path.parent.parent}: send requests about batches there, "
                "or give this gateway a directory of its own with --state-dir"
            ) from None
        self._lock = lock

    def _prepare(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise StoreFailed(
                f"the store of batches {self._path} was written by another version of Swarm: install that version, or "
                "move the file away"
            )
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        if not version:
            for statement in _TABLES.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        for name, columns in _INDEXES.items():
            db.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {columns}")
        db.execute("DELETE FROM lines WHERE file IN (SELECT number FROM files WHERE NOT is_whole)")
        db.execute("DELETE FROM files WHERE NOT is_whole")
        db.execute("COMMIT")

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreFailed(f"the store of batches {self._path} is not open")
        return self._db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            remedy = f"put back a backup, or move {self._path} away" if damaged else "free disk space"
            raise StoreFailed(f"the store of batches can't be used ({error}): {remedy}; nothing is lost") from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._opened
        with self._errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")


def _make_private(path: Path) -> None:
    """Create the file for its owner alone. SQLite gives its log and index the same mode. Raises StoreFailed if others
    may read it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)  # before SQLite opens it: closing a file drops this process's locks on it
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        raise StoreFailed(f"{path} belongs to another user: name another directory with --state-dir")
    if status.st_mode & 0o077:
        raise StoreFailed(f"others may read {path}, which has prompts and answers: chmod 600 {path}")

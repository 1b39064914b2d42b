"""Salvage of a damaged journal: everything readable is copied into a new one, and the old file is kept beside it.

This happens when a broker starts (``open_or_salvage``) and while it runs (``renew_journal``). In the second case the
old journal is read through the open connection, which still reaches a file that was deleted.

A torn end of the write-ahead log is no damage: SQLite drops unfinished transactions. Salvage is for pages that are lost
or have other content. Requests are read one by one, so that a bad page only costs the requests on it. An epoch must
never decrease; if it can't be read, the seconds of the wall clock are used, which no count of plans reaches. The number
of the next sequence must not decrease either.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarm.broker.journal import token_buffer
from swarm.broker.journal.database import (
    FILE,
    DamagedJournal,
    UnsyncedJournal,
    is_disk_refusal,
    make_private,
    to_journal_error,
)
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.broker.journal.values import MAX_COUNT, DamagedValue, Part, RawPart, check_count, decode, encode
from swarm.errors import JournalError
from swarm.wire.messages import Lineage, Submit

ASIDE = "journal.damaged"
UNFINISHED = "journal.unfinished"  # directory of the new journal until it is complete
SALVAGED = "journal.salvaged"  # the same directory from then on, until the new journal replaces the old one
MAX_ASIDE = 4  # old files that are kept; older ones are deleted
_SKIPPED_NUMBERS = 1_000_000  # sequence numbers skipped, because they may have been assigned without being recorded
_KEYS = {  # primary keys of the tables to copy, in this order
    "facts": "name",
    "requests": "number",
    "sequences": "id",
    "tokens": "sequence, first",
    "recent": "number",
}
_SUFFIXES = ("", "-wal", "-shm")
_NUM_COLUMNS = {"requests": 9}  # numbers of columns of tables that have grown; rows of older versions are shorter


def open_or_salvage(
    directory: Path, bounds: JournalLimits, retained_s: float = 3600.0
) -> tuple[JournalStore, tuple[str, ...]]:
    """Open the journal of this directory. Also return notes about repairs (usually none)."""
    notes = _finish_interrupted(directory)
    for path in directory.glob(f"{ASIDE}-*"):  # older versions left them readable for others
        make_private(path)
    try:
        store = JournalStore(directory, bounds)
    except (DamagedJournal, UnsyncedJournal) as error:
        problem = str(error)
    else:
        try:
            # decode the values too: they may be damaged although the pages are intact
            store.read_snapshot(Timestamp.now(), retained_s=retained_s)
        except DamagedJournal as error:
            store.close()
            problem = str(error)
        else:
            return store, notes
    with _DamagedReader(directory / FILE) as old:
        saved, lost = _salvage_beside(directory, bounds, old)
    aside = _aside_path(directory)
    _replace_old(directory, aside)
    note = f"{problem}: {saved} rows were saved, {lost} parts could not be read; the old file is {aside}"
    return JournalStore(directory, bounds), (*notes, note)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The new journal, and a note about what was salvaged."""

    store: JournalStore
    note: str


def renew_journal(old: JournalStore, reason: str) -> Renewal:
    """Replace a journal that can't be trusted any more, keeping what can still be read from it. What is only in memory
    is not in the new one yet. Raises JournalError; then it may be retried."""
    directory, bounds = old.path.parent, old.limits
    note = f"{reason}: it was replaced by a new one"
    if not old.is_closed:
        _make_directory(directory)
        with old.reading() as db:
            saved, lost = _salvage_beside(directory, bounds, db, num_skipped=_SKIPPED_NUMBERS)
        aside = _aside_path(directory)
        _put_aside(directory, aside)
        old.close()  # closing deletes the write-ahead log of this name, so it must happen neither before nor later
        note += f" with {saved} rows of the old one, {lost} parts could not be read"
        note += f"; the old file is {aside}" if any(directory.glob(f"{aside.name}*")) else ""
    store, _ = open_or_salvage(directory, bounds, retained_s=0.0)  # also finishes an interrupted replacement
    # Whatever was read: this is the same broker process. Its numbers must not be assigned twice, and what workers hold
    # must remain valid for the next broker. That broker raises the generation, as at every start, and detects missing
    # tokens of a sequence by their digests.
    try:
        store.continue_lineage(old.lineage)
    except JournalError:
        store.close()
        raise
    return Renewal(store, note)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise JournalError(f"the directory {directory} can't be created again ({error.strerror})") from None


def _aside_path(directory: Path) -> Path:
    return directory / f"{ASIDE}-{time.time_ns():x}"


def _salvage_beside(
    directory: Path, bounds: JournalLimits, old: sqlite3.Connection | None, num_skipped: int = 0
) -> tuple[int, int]:
    """Build a new journal in its own directory; the damaged one stays in place until the new one is complete. If there
    is no disk space, or this process is killed, the next attempt finds the same state."""
    unfinished, beside = directory / UNFINISHED, directory / SALVAGED
    for path in (unfinished, beside):
        shutil.rmtree(path, ignore_errors=True)
    try:
        new = JournalStore(unfinished, bounds)
        try:
            counts = _copy_readable(old, new, num_skipped)
            new.checkpoint()
        finally:
            new.close()
        unfinished.rename(beside)
    except sqlite3.Error as error:
        raise to_journal_error(directory / FILE, error) from None
    except OSError as error:
        raise JournalError(f"a new journal can't be created in {directory} ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return counts


def _replace_old(directory: Path, aside: Path) -> None:
    """Replace the old file by the new one. If only the new one is there, an earlier process was killed in this
    function."""
    _put_aside(directory, aside)
    try:
        (directory / SALVAGED / FILE).rename(directory / FILE)
        _sync_directory(directory)
    except OSError as error:
        raise JournalError(f"the new journal in {directory} can't replace the old one ({error.strerror})") from None
    shutil.rmtree(directory / SALVAGED, ignore_errors=True)


def _put_aside(directory: Path, aside: Path) -> None:
    """Move the damaged files aside. Their suffixes stay, so that file and log can still be read together."""
    try:
        for suffix in _SUFFIXES:
            path = directory / f"{FILE}{suffix}"
            if path.exists():
                path.rename(Path(f"{aside}{suffix}"))
    except OSError as error:
        raise JournalError(f"the damaged journal in {directory} can't be moved aside ({error.strerror})") from None
    for name in _list_aside(directory)[:-MAX_ASIDE]:
        for suffix in _SUFFIXES:
            Path(f"{name}{suffix}").unlink(missing_ok=True)


def _list_aside(directory: Path) -> list[str]:
    """Return the names of files put aside, without the suffixes, the latest last."""
    names = (str(path) for path in directory.glob(f"{ASIDE}-*"))
    return sorted(
        {name.removesuffix("-wal").removesuffix("-shm") for name in names}, key=lambda name: (len(name), name)
    )


def _sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    place = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _finish_interrupted(directory: Path) -> tuple[str, ...]:
    """Finish a replacement during which an earlier process was killed."""
    if not (directory / SALVAGED / FILE).exists() or (directory / FILE).exists():
        return ()
    aside = Path((_list_aside(directory) or [str(_aside_path(directory))])[-1])
    _replace_old(directory, aside)
    return (f"the journal in {directory} was damaged: what could be read was saved; the old file is {aside}",)


def _copy_readable(old: sqlite3.Connection | None, store: JournalStore, num_skipped: int) -> tuple[int, int]:
    """Copy everything readable. ``num_skipped``: sequence numbers to skip, because they may have been assigned."""
    saved = lost = 0
    with store.fill() as new:
        has_epoch = False
        numbers = _UsedNumbers()
        for table in _KEYS:
            for row in _read_rows(old, table):
                numbers.record(table, row)
                if row is None or not _insert(new, table, row):
                    lost += 1
                    continue
                saved += 1
                has_epoch |= table == "facts" and row[0] == "epoch"
        if not has_epoch:
            epoch = encode(int(time.time()))
            new.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('epoch', ?)", (epoch,))
        _restore_missing(new, numbers.next + num_skipped)
    return saved, lost


class _UsedNumbers:
    """Sequence numbers that were used. None is assigned twice, because workers may still hold the tokens of the first
    use. Rows that can't be saved count too. If the record of the next number is lost, the next one lies far beyond all
    others."""

    def __init__(self) -> None:
        self._highest = 0
        self._recorded_next: int | None = None

    def record(self, table: str, row: tuple[object, ...] | None) -> None:
        if row is None:
            return
        number = row[0]
        if table == "recent":
            with suppress(DamagedValue):
                number = token_buffer.highest_sequence(row[1])
        if table in ("sequences", "tokens", "recent") and isinstance(number, int) and number < MAX_COUNT:
            self._highest = max(self._highest, number)
        elif table == "facts" and number == "next_sequence":
            with suppress(DamagedValue):
                self._recorded_next = check_count(decode(row[1], int), "next_sequence")

    @property
    def next(self) -> int:
        if self._recorded_next is not None:
            return max(self._recorded_next, self._highest + 1)
        # the clock is included because all numbers may be lost, and repeatedly
        return max(self._highest, int(time.time())) + _SKIPPED_NUMBERS


class _DamagedReader:
    """Context manager that opens the damaged file for reading; yields None if it can't be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> sqlite3.Connection | None:
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            return None
        return self._db

    def __exit__(self, *_: object) -> None:
        if self._db is not None:
            self._db.close()


def _read_rows(db: sqlite3.Connection | None, table: str) -> Iterator[tuple[object, ...] | None]:
    """Read rows from both ends: rows behind a bad page are reached backwards. Yield None for an unreadable part."""
    if db is None:
        yield None
        return
    if not _has_table(db, table):
        return
    seen: set[tuple[object, ...]] = set()
    parts = _KEYS[table].split(", ")
    for order in ("ASC", "DESC"):
        ordered = ", ".join(f"{part} {order}" for part in parts)
        try:
            for row in db.execute(f"SELECT * FROM {table} ORDER BY {ordered}"):
                # compare keys, which come first; whole rows would take as much memory as the file
                if row[: len(parts)] not in seen:
                    seen.add(row[: len(parts)])
                    yield row
        except sqlite3.Error:
            yield None
            continue
        return


def _has_table(db: sqlite3.Connection, table: str) -> bool:
    """Whether the table exists (older versions lack some). If that can't be read, it counts as an unreadable table."""
    try:
        return db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None
    except sqlite3.Error:
        return True


_ENCODED: dict[str, tuple[int, type]] = {
    "requests": (2, Submit),
    "sequences": (5, RawPart),  # log probabilities and hops are protected by the checksum and take long to decode
    "tokens": (2, RawPart),
    "recent": (1, token_buffer.Row[RawPart]),
}


def _insert(db: sqlite3.Connection, table: str, row: tuple[object, ...]) -> bool:
    """Insert a row if its values are intact and its references exist. A sequence with damaged tokens counts as not
    ended: it will be computed again."""
    place, kind = _ENCODED.get(table, (1, object))
    try:
        if row[place] is not None:
            decode(row[place], kind)
        if table == "facts":
            _check_fact(row[0], row[1])
    except DamagedValue:
        if table != "sequences":
            return False
        row = (*row[:3], None, "", None)
    row = (*row, *(None,) * (_NUM_COLUMNS.get(table, 0) - len(row)))
    marks = ", ".join("?" * len(row))
    try:
        db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
    except sqlite3.Error as error:
        if is_disk_refusal(error):
            raise
        return False
    return True


def _check_fact(name: object, value: object) -> None:
    """Reject a number that counting can't have reached; it is lost like an unreadable one. Raises DamagedValue."""
    if name in ("epoch", "next_sequence"):
        check_count(decode(value, int), str(name))
    elif name == "lineage":
        check_count(decode(value, Lineage).generation, "generation")


def _restore_missing(db: sqlite3.Connection, next_sequence: int) -> None:
    """Restore missing sequences of each request. A missing sequence starts over under a new number and draws the same
    tokens again. A request that had ended and has lost all its sequences is deleted like an old one, because its result
    (it may have been cancelled) is unknown; a client that asks for it gets that answer."""
    db.execute("DELETE FROM sequences WHERE id < 1 OR id >= ?", (MAX_COUNT,))
    for number, submit, ended_at in db.execute("SELECT number, submit, ended_at FROM requests").fetchall():
        ends = _ends_by_place(db, number, decode(submit, Submit).params.n)
        missing = [place for place, end in enumerate(ends) if end is None]
        if ended_at is not None and len(missing) == len(ends):
            db.execute("DELETE FROM requests WHERE number = ?", (number,))
            continue
        # A request cancelled by its own client counts as never submitted: no part of it may run again.
        end = ("cancelled", "", encode(Part(()))) if ("cancelled", "") in ends else (None, "", None)
        for place in missing:
            db.execute("INSERT INTO sequences VALUES (?, ?, ?, ?, ?, ?)", (next_sequence, number, place, *end))
            next_sequence += 1
    db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('next_sequence', ?)", (encode(next_sequence),))
    db.execute(
        "UPDATE requests SET ended_at = NULL WHERE EXISTS "
        "(SELECT 1 FROM sequences WHERE request = requests.number AND reason IS NULL)"
    )


def _ends_by_place(db: sqlite3.Connection, request: int, num: int) -> list[tuple[str | None, str] | None]:
    """Return reason and detail of each sequence of a request; None for a missing one. Delete duplicates of one place,
    and sequences with an impossible place."""
    ends: list[tuple[str | None, str] | None] = [None] * num
    rows = db.execute("SELECT id, place, reason, detail FROM sequences WHERE request = ? ORDER BY id", (request,))
    for number, place, reason, detail in rows.fetchall():
        if isinstance(place, int) and 0 <= place < num and ends[place] is None:
            ends[place] = (reason, detail)
        else:
            db.execute("DELETE FROM sequences WHERE id = ?", (number,))
    return ends

"""A journal that is damaged: what can still be read of it goes into a new one, the old file is kept beside it.

So it is when a broker starts (``open_or_salvage``), and while it runs (``renewed``): then the old one is read through
the connection that is open, which has a file that was deleted, too.

A torn end of the write-ahead log is no damage: SQLite drops what was not finished. This is for pages that are gone or
hold something else. Requests are read one by one, so that one bad page costs those it holds and no others. An epoch
must never fall; if it can't be read, the wall clock's seconds serve, which no count of plans reaches. Nor may the
number of the next sequence.
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

from swarm.broker.journal import recent
from swarm.broker.journal.database import (
    FILE,
    DamagedJournal,
    UnsyncedJournal,
    in_words,
    is_refusal,
    take_from_others,
)
from swarm.broker.journal.store import Bounds, Moment, Store
from swarm.broker.journal.values import HIGHEST, Damaged, Part, RawPart, counted, sealed, unsealed
from swarm.errors import JournalError
from swarm.wire.messages import Lineage, Submit

ASIDE = "journal.damaged"
UNFINISHED = "journal.unfinished"  # a directory with the new one, until that is whole
BESIDE = "journal.salvaged"  # the same from then on, until it takes the old one's place
MAX_ASIDE = 4  # old files that are kept; the oldest go
_AHEAD = 1_000_000
_KEYS = {  # of each table that is copied, in this order
    "facts": "name",
    "requests": "number",
    "sequences": "id",
    "tokens": "sequence, first",
    "recent": "number",
}
_SUFFIXES = ("", "-wal", "-shm")
_WIDTH = {"requests": 9}  # columns that were added to a table: what is older has none


def open_or_salvage(directory: Path, bounds: Bounds, retained_s: float = 3600.0) -> tuple[Store, tuple[str, ...]]:
    """Open the journal of this directory, and say what had to be done for it, in words (nothing, as a rule)."""
    notes = _finished(directory)
    for path in directory.glob(f"{ASIDE}-*"):  # an older version let others read them
        take_from_others(path)
    try:
        store = Store(directory, bounds)
    except (DamagedJournal, UnsyncedJournal) as error:
        problem = str(error)
    else:
        try:
            store.past(Moment.now(), retained_s=retained_s)  # values, too, must be what they were
        except DamagedJournal as error:
            store.close()
            problem = str(error)
        else:
            return store, notes
    with _reader(directory / FILE) as old:
        saved, lost = _saved_beside(directory, bounds, old)
    aside = _aside(directory)
    _change_places(directory, aside)
    note = f"{problem}: {saved} rows were saved, {lost} parts could not be read; the old file is {aside}"
    return Store(directory, bounds), (*notes, note)


@dataclass(frozen=True, slots=True)
class Renewal:
    """``note``: what was done, in words."""

    store: Store
    note: str


def renewed(old: Store, reason: str) -> Renewal:
    """Put another journal in the place of one that can't be believed any more, with what that still gives. Raises
    JournalError; then it may be tried again. What only memory has is not in it yet."""
    directory, bounds = old.path.parent, old.bounds
    note = f"{reason}: it was begun anew"
    if not old.is_closed:
        _make(directory)
        with old.reading() as db:
            saved, lost = _saved_beside(directory, bounds, db, ahead=_AHEAD)
        aside = _aside(directory)
        _put_aside(directory, aside)
        old.close()  # closing takes the write-ahead log of this name away: so not before, and not later
        note += f" with {saved} rows of the old one, {lost} parts could not be read"
        note += f"; what was there is {aside}" if any(directory.glob(f"{aside.name}*")) else ""
    store, _ = open_or_salvage(directory, bounds, retained_s=0.0)  # it finishes what was begun
    # Whatever was read there: this is the same life, with the same numbers, of which none is given out twice, and what
    # workers hold of it must count for the next broker. That one raises the generation, as at every opening, and what
    # the journal lacks of a sequence shows by the digests of its tokens.
    try:
        store.go_on_as(old.lineage)
    except JournalError:
        store.close()
        raise
    return Renewal(store, note)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise JournalError(f"the directory {directory} can't be made again ({error.strerror})") from None


def _aside(directory: Path) -> Path:
    return directory / f"{ASIDE}-{time.time_ns():x}"


def _saved_beside(directory: Path, bounds: Bounds, old: sqlite3.Connection | None, ahead: int = 0) -> tuple[int, int]:
    """Make a new journal in a place of its own; until it is whole, the damaged one stays where it is. If there is no
    room for it, or this process is killed, the next attempt finds what this one did."""
    unfinished, beside = directory / UNFINISHED, directory / BESIDE
    for path in (unfinished, beside):
        shutil.rmtree(path, ignore_errors=True)
    try:
        new = Store(unfinished, bounds)
        try:
            counts = _copy(old, new, ahead)
            new.fold()
        finally:
            new.close()
        unfinished.rename(beside)
    except sqlite3.Error as error:
        raise in_words(directory / FILE, error) from None
    except OSError as error:
        raise JournalError(f"a new journal can't be made in {directory} ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return counts


def _change_places(directory: Path, aside: Path) -> None:
    """Change the old file for the new one. Where only the new one is there, somebody was killed in here."""
    _put_aside(directory, aside)
    try:
        (directory / BESIDE / FILE).rename(directory / FILE)
        _sync(directory)
    except OSError as error:
        raise JournalError(f"the new journal in {directory} can't be put in its place ({error.strerror})") from None
    shutil.rmtree(directory / BESIDE, ignore_errors=True)


def _put_aside(directory: Path, aside: Path) -> None:
    """Move the damaged files aside. Their names keep their ends, so that file and log can still be read together."""
    try:
        for suffix in _SUFFIXES:
            path = directory / f"{FILE}{suffix}"
            if path.exists():
                path.rename(Path(f"{aside}{suffix}"))
    except OSError as error:
        raise JournalError(f"the damaged journal in {directory} can't be put aside ({error.strerror})") from None
    for name in _names_aside(directory)[:-MAX_ASIDE]:
        for suffix in _SUFFIXES:
            Path(f"{name}{suffix}").unlink(missing_ok=True)


def _names_aside(directory: Path) -> list[str]:
    """List what was put aside, without the ends of the files' names; the latest comes last."""
    names = (str(path) for path in directory.glob(f"{ASIDE}-*"))
    return sorted(
        {name.removesuffix("-wal").removesuffix("-shm") for name in names}, key=lambda name: (len(name), name)
    )


def _sync(directory: Path) -> None:
    """Make last that a file has another name now."""
    place = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _finished(directory: Path) -> tuple[str, ...]:
    """Finish what a process began that was killed in the middle of it."""
    if not (directory / BESIDE / FILE).exists() or (directory / FILE).exists():
        return ()
    aside = Path((_names_aside(directory) or [str(_aside(directory))])[-1])
    _change_places(directory, aside)
    return (f"the journal in {directory} was damaged: what could be read was saved; the old file is {aside}",)


def _copy(old: sqlite3.Connection | None, store: Store, ahead: int) -> tuple[int, int]:
    """Copy what can be read. ``ahead``: so many numbers of sequences are left out, which may have been given out."""
    saved = lost = 0
    with store.raw() as new:
        has_epoch = False
        numbers = _Numbers()
        for table in _KEYS:
            for row in _rows(old, table):
                numbers.see(table, row)
                if row is None or not _insert(new, table, row):
                    lost += 1
                    continue
                saved += 1
                has_epoch |= table == "facts" and row[0] == "epoch"
        if not has_epoch:
            epoch = sealed(int(time.time()))
            new.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('epoch', ?)", (epoch,))
        _mend(new, numbers.next + ahead)
    return saved, lost


class _Numbers:
    """Which numbers sequences have had. None is given out twice: workers may still hold the first one's tokens. So rows
    count that can't be saved, too; and if the fact that names the next one is lost, it is far ahead of them all."""

    def __init__(self) -> None:
        self._highest = 0
        self._known: int | None = None

    def see(self, table: str, row: tuple[object, ...] | None) -> None:
        if row is None:
            return
        number = row[0]
        if table == "recent":
            with suppress(Damaged):
                number = recent.highest(row[1])
        if table in ("sequences", "tokens", "recent") and isinstance(number, int) and number < HIGHEST:
            self._highest = max(self._highest, number)
        elif table == "facts" and number == "next_sequence":
            with suppress(Damaged):
                self._known = counted(unsealed(row[1], int), "next_sequence")

    @property
    def next(self) -> int:
        if self._known is not None:
            return max(self._known, self._highest + 1)
        return max(self._highest, int(time.time())) + _AHEAD  # the clock: all of the numbers may be lost, and not once


class _reader:
    """The damaged file, for reading; None if it can't even be opened."""

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


def _rows(db: sqlite3.Connection | None, table: str) -> Iterator[tuple[object, ...] | None]:
    """Read rows from both ends: what lies behind a bad page is reached backwards. None for what can't be read."""
    if db is None:
        yield None
        return
    if not _has(db, table):
        return
    seen: set[tuple[object, ...]] = set()
    parts = _KEYS[table].split(", ")
    for order in ("ASC", "DESC"):
        ordered = ", ".join(f"{part} {order}" for part in parts)
        try:
            for row in db.execute(f"SELECT * FROM {table} ORDER BY {ordered}"):
                if row[: len(parts)] not in seen:  # the key comes first; whole rows would take as much as the file
                    seen.add(row[: len(parts)])
                    yield row
        except sqlite3.Error:
            yield None
            continue
        return


def _has(db: sqlite3.Connection, table: str) -> bool:
    """Whether it has this table, which older versions may lack; in doubt, it has one that can't be read."""
    try:
        return db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None
    except sqlite3.Error:
        return True


_SEALED: dict[str, tuple[int, type]] = {
    "requests": (2, Submit),
    "sequences": (5, RawPart),  # what stands beside the tokens is safe by its checksum, and takes long to look at
    "tokens": (2, RawPart),
    "recent": (1, recent.Row[RawPart]),
}


def _insert(db: sqlite3.Connection, table: str, row: tuple[object, ...]) -> bool:
    """Insert a row if it is as it was written and refers to what is there. A sequence whose tokens are spoiled has not
    ended: they will be computed again."""
    place, kind = _SEALED.get(table, (1, object))
    try:
        if row[place] is not None:
            unsealed(row[place], kind)
        if table == "facts":
            _check_fact(row[0], row[1])
    except Damaged:
        if table != "sequences":
            return False
        row = (*row[:3], None, "", None)
    row = (*row, *(None,) * (_WIDTH.get(table, 0) - len(row)))
    marks = ", ".join("?" * len(row))
    try:
        db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
    except sqlite3.Error as error:
        if is_refusal(error):
            raise
        return False
    return True


def _check_fact(name: object, value: object) -> None:
    """Refuse a number that nobody can have counted up to: it is lost like one that can't be read. Raises Damaged."""
    if name in ("epoch", "next_sequence"):
        counted(unsealed(value, int), str(name))
    elif name == "lineage":
        counted(unsealed(value, Lineage).generation, "generation")


def _mend(db: sqlite3.Connection, next_sequence: int) -> None:
    """Each request has all of its sequences again: one that is lost has not begun, under a number that nobody has had,
    and draws the tokens that it drew before. Only of a request that had ended, and of whose sequences none is left, it
    is not known how: it may have been cancelled. It is let go like others that ended long ago, and its client, if it
    asks, is told so."""
    db.execute("DELETE FROM sequences WHERE id < 1 OR id >= ?", (HIGHEST,))
    for number, submit, ended_at in db.execute("SELECT number, submit, ended_at FROM requests").fetchall():
        ends = _ends_by_place(db, number, unsealed(submit, Submit).params.n)
        missing = [place for place, end in enumerate(ends) if end is None]
        if ended_at is not None and len(missing) == len(ends):
            db.execute("DELETE FROM requests WHERE number = ?", (number,))
            continue
        # One of its own client's cancelling is as if it had never been: no part of it is to run again.
        end = ("cancelled", "", sealed(Part(()))) if ("cancelled", "") in ends else (None, "", None)
        for place in missing:
            db.execute("INSERT INTO sequences VALUES (?, ?, ?, ?, ?, ?)", (next_sequence, number, place, *end))
            next_sequence += 1
    db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES ('next_sequence', ?)", (sealed(next_sequence),))
    db.execute(
        "UPDATE requests SET ended_at = NULL WHERE EXISTS "
        "(SELECT 1 FROM sequences WHERE request = requests.number AND reason IS NULL)"
    )


def _ends_by_place(db: sqlite3.Connection, request: int, num: int) -> list[tuple[str | None, str] | None]:
    """Tell how each of a request's sequences ended, reason and detail; None for one that is not there. Of two with the
    same place only the first stays, and none with a place that there can't be."""
    found: list[tuple[str | None, str] | None] = [None] * num
    rows = db.execute("SELECT id, place, reason, detail FROM sequences WHERE request = ? ORDER BY id", (request,))
    for number, place, reason, detail in rows.fetchall():
        if isinstance(place, int) and 0 <= place < num and found[place] is None:
            found[place] = (reason, detail)
        else:
            db.execute("DELETE FROM sequences WHERE id = ?", (number,))
    return found

"""Journals that an older version wrote: all that still counts is there, and they are of this version from then on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from swarm.broker.actions import WriteEnd
from swarm.broker.journal.database import FILE, VERSION
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import JournalLimits, JournalStore
from swarm.broker.journal.values import Part, encode
from tests.unit.broker.bench import submit
from tests.unit.broker.journal.test_journal import LATER, NOW, filled, spoil

VERSION_1 = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    submit BLOB NOT NULL,
    tenant TEXT NOT NULL,
    accepted_at REAL NOT NULL,
    accepted_tick REAL NOT NULL,
    boot TEXT NOT NULL,
    ended_at REAL
);
CREATE INDEX ended ON requests (ended_at);
CREATE TABLE sequences (
    id INTEGER PRIMARY KEY,
    request INTEGER NOT NULL REFERENCES requests (number) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    reason TEXT,
    detail TEXT NOT NULL DEFAULT '',
    tokens BLOB
);
CREATE INDEX of_request ON sequences (request);
CREATE TABLE tokens (
    sequence INTEGER NOT NULL REFERENCES sequences (id) ON DELETE CASCADE,
    first INTEGER NOT NULL,
    part BLOB NOT NULL,
    PRIMARY KEY (sequence, first)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""


def version_1(directory: Path, num: int = 40) -> None:
    """As the first version wrote it: every second request has ended."""
    with sqlite3.connect(directory / FILE) as db:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(VERSION_1)
        db.execute("INSERT INTO facts VALUES ('epoch', ?), ('next_sequence', ?)", (encode(12), encode(num + 1)))
        for number in range(1, num + 1):
            has_ended = number % 2 == 0
            head = (number, f"r{number}", encode(submit(f"r{number}")), "tenant", NOW.wall, NOW.tick, NOW.boot)
            db.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*head, NOW.wall if has_ended else None))
            part = encode(Part(tuple(range(200))))
            how = ("length", "", part) if has_ended else (None, "", None)
            db.execute("INSERT INTO sequences VALUES (?, ?, 0, ?, ?, ?)", (number, number, *how))
            if not has_ended:
                db.execute("INSERT INTO tokens VALUES (?, 0, ?)", (number, part))
    db.close()


# Versions 2 and 3 kept the times of steps, for traces.
STEPS = """
CREATE TABLE steps (
    number INTEGER PRIMARY KEY,
    boot TEXT NOT NULL,
    first_tick REAL NOT NULL,
    last_tick REAL NOT NULL,
    lowest INTEGER NOT NULL,
    highest INTEGER NOT NULL,
    written_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    steps BLOB NOT NULL
);
CREATE INDEX steps_in_time ON steps (boot, last_tick);
CREATE INDEX steps_by_age ON steps (written_at, num_bytes);
PRAGMA user_version = 3;
"""


def version_3(directory: Path, num: int = 3) -> None:
    """As the third version wrote it: the tables of now, and one with some MB of steps."""
    filled(directory, num)
    with sqlite3.connect(directory / FILE) as db:
        db.executescript(STEPS)
        row = (NOW.boot, 50.0, 51.0, 1, 2, NOW.wall, 40960, bytes(40000))
        db.executemany("INSERT INTO steps VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", [row] * 100)
    db.close()


def tables(store: JournalStore) -> set[str]:
    with store.reading() as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION == 4
        return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_a_journal_of_version_1(tmp_path: Path) -> None:
    """All its requests are there, and go on; it is one of this version from then on."""
    version_1(tmp_path)
    for _ in range(2):
        store, notes = open_or_salvage(tmp_path, JournalLimits())
        found = store.read_snapshot(LATER, retained_s=60.0)
        assert notes == ()
        assert (found.epoch, found.next_sequence) == (12, 41)
        assert [r.submit for r in found.requests] == [submit(f"r{number}") for number in range(1, 41)]
        assert all(r.sequences[0].tokens == list(range(200)) for r in found.requests)
        assert [r.has_ended for r in found.requests] == [False, True] * 20
        assert tables(store) == {"facts", "requests", "sequences", "tokens", "recent"}
        store.close()
    store = JournalStore(tmp_path)
    store.write([WriteEnd(1, "length", 200)], LATER)
    found_1 = store.read_request("r1", LATER)
    assert found_1 is not None
    assert found_1.sequences[0].reason == "length"


def test_a_damaged_journal_of_version_1(tmp_path: Path) -> None:
    """What it never had is not missed."""
    version_1(tmp_path)
    spoil(tmp_path, "UPDATE sequences SET tokens = X'0011' WHERE id = 2")
    spoil(tmp_path, "UPDATE requests SET submit = X'0011' WHERE id = 'r3'")
    store, (note,) = open_or_salvage(tmp_path, JournalLimits(), retained_s=1e9)
    assert ", 3 parts could not be read" in note  # a request, its sequence, and that one's tokens
    found = {r.submit.request_id: r for r in store.read_snapshot(LATER, retained_s=1e9).requests}
    assert set(found) == {f"r{number}" for number in range(1, 41)} - {"r3"}
    assert not found["r2"].has_ended


@pytest.mark.parametrize("damaged", [False, True])
def test_a_journal_of_version_3(tmp_path: Path, damaged: bool) -> None:
    """The times of steps go, with the room that they took; requests stay, also where the file is damaged."""
    version_3(tmp_path)
    if damaged:
        spoil(tmp_path, "UPDATE requests SET submit = X'0011' WHERE id = 'r3'")
    store, notes = open_or_salvage(tmp_path, JournalLimits())
    assert bool(notes) is damaged
    assert tables(store) == {"facts", "requests", "sequences", "tokens", "recent"}
    assert store.num_bytes < 1 << 20
    found = {r.submit.request_id for r in store.read_snapshot(LATER, retained_s=1e9).requests}
    assert found == ({"r1", "r2"} if damaged else {"r1", "r2", "r3"})

"""A journal's lineage: by it workers tell one broker's life from another's."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.broker.journal.database import FILE
from swarm.broker.journal.store import JournalStore
from swarm.wire.messages import Lineage


def opened(directory: Path) -> Lineage:
    """A broker lives and ends."""
    store = JournalStore(directory)
    lineage = store.begin_lineage()
    store.close()
    return lineage


def test_every_opening_raises_the_generation(tmp_path: Path) -> None:
    """Of the same journal."""
    lives = [opened(tmp_path) for _ in range(5)]
    assert len({life.journal for life in lives}) == 1
    assert all(before.generation < after.generation for before, after in itertools.pairwise(lives))


def test_two_journals_are_told_apart(tmp_path: Path) -> None:
    assert opened(tmp_path / "a").journal != opened(tmp_path / "b").journal


def test_a_journal_and_its_copy_are_told_apart(tmp_path: Path) -> None:
    """Both go on from the same generation, and don't come to the same."""
    opened(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    first, second = opened(tmp_path / "a"), opened(tmp_path / "backup")
    assert first.journal == second.journal
    assert first != second


def test_a_journal_of_an_older_version_gets_one(tmp_path: Path) -> None:
    JournalStore(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT count(*) FROM facts WHERE name = 'lineage'").fetchone() == (0,)
    db.close()
    assert opened(tmp_path).journal


def test_a_full_disk_gives_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that died while the disk was full must be able to come back, if anything is set aside."""
    store = JournalStore(tmp_path)
    assert store.reserve.fill()
    set_aside, raw, refusals = store.reserve.num_bytes, JournalStore.fill, [1, 1]

    @contextmanager
    def full(store: JournalStore) -> Iterator[sqlite3.Connection]:
        if refusals:
            refusals.pop()
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        with raw(store) as db:
            yield db

    monkeypatch.setattr(JournalStore, "fill", full)
    assert store.begin_lineage().journal
    assert store.reserve.num_bytes < set_aside
    store.close()

"""The journal is deleted, replaced, damaged or not synced while it is in use: it is begun anew, and that is said."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.broker.actions import FinishJournalRewrite, ReadRequest, WriteAcceptance, WriteEnd, WriteEpoch
from swarm.broker.events import (
    AcceptanceWritten,
    EndWritten,
    EpochWritten,
    JournalBroke,
    JournalMended,
    JournalRenewed,
    JournalRewritten,
    RequestRead,
    TokensWritten,
)
from swarm.broker.journal import salvage, writer
from swarm.broker.journal.database import FILE, DamagedJournal, UnsyncedJournal
from swarm.broker.journal.disk import RESERVE_BYTES, RESERVE_FILE
from swarm.broker.journal.integrity import JournalIntegrity
from swarm.broker.journal.reader import JournalReader
from swarm.broker.journal.salvage import ASIDE, MAX_ASIDE, open_or_salvage, renew_journal
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.errors import JournalError
from tests.unit.broker.bench import submit
from tests.unit.broker.journal.test_journal import accept, tokens
from tests.unit.broker.journal_thread import Thread

ANEW = FinishJournalRewrite(WriteEpoch(9, ("w0",)), 50)
SUFFIXES = ("", "-wal", "-shm")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHECK_INTERVAL_S", 0.01)


@pytest.fixture
def used(thread: Thread) -> Thread:
    """Two requests, one of which has ended, and an epoch."""
    for write in (WriteEpoch(8), accept("a", 1), tokens(1, 0, 5, 6), accept("b", 2), WriteEnd(2, "length", 0)):
        thread.writer.write(write)
    thread.told(5)
    return thread


def _gone(state: Path) -> None:
    for suffix in SUFFIXES:
        (state / f"{FILE}{suffix}").unlink()


def _moved(state: Path) -> None:
    for suffix in SUFFIXES:
        (state / f"{FILE}{suffix}").rename(state / f"elsewhere{suffix}")


def _all_gone(state: Path) -> None:
    shutil.rmtree(state)


def _log_gone(state: Path) -> None:
    (state / f"{FILE}-wal").unlink()


def _replaced(state: Path) -> None:
    """By an empty journal, as a backup would be: moved into its place."""
    JournalStore(state / "backup").close()
    _gone(state)
    (state / "backup" / FILE).rename(state / FILE)


def _overwritten(state: Path) -> None:
    """The same, copied over it."""
    JournalStore(state / "backup").close()  # it may be there
    shutil.copyfile(state / "backup" / FILE, state / FILE)
    os.truncate(state / f"{FILE}-wal", 0)


def _garbled(state: Path) -> None:
    """All pages, and the log with them."""
    for suffix in ("", "-wal"):
        path = state / f"{FILE}{suffix}"
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))


LOSSES: tuple[Callable[[Path], None], ...] = (
    *(_gone, _moved, _all_gone, _log_gone),
    *(_replaced, _overwritten, _garbled),
)


def _anew(thread: Thread) -> JournalRenewed:
    """What is told until memory's part is asked for."""
    broke, anew = thread.told(2)
    assert isinstance(broke, JournalBroke)
    assert isinstance(anew, JournalRenewed)
    assert broke.reason in anew.note
    return anew


def _rewrite(thread: Thread) -> None:
    """As the core does."""
    again = WriteAcceptance(submit("a"), (1,), "tenant", age_s=30.0)
    for write in (again, tokens(1, 0, 5, 6), ANEW):
        thread.writer.write(write)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__.strip("_"))
def test_it_is_noticed_without_a_write(used: Thread, loss: Callable[[Path], None]) -> None:
    """Nothing is written, nothing read: the thread looks at the files. What memory has is asked for, and from then on
    the new journal has it, for whoever starts next; only then it counts as mended."""
    state = used.disk.path.parent
    with used.resting():
        loss(state)
    anew = _anew(used)
    assert anew.next_sequence > 2
    assert used.nothing_told(), "it is not mended before it has what memory gives it"
    _rewrite(used)
    assert used.told(4) == [
        JournalMended(),
        AcceptanceWritten("a", (1,)),
        TokensWritten(((1, 5),)),
        JournalRewritten(),
    ]
    used.writer.write(tokens(1, 2, 7))
    used.told(1)
    used.writer.close()
    store, notes = open_or_salvage(state, JournalLimits())
    past = store.read_snapshot(Timestamp.now(), retained_s=60.0)
    assert (notes, past.epoch, past.workers) == ((), 9, ("w0",))
    assert past.next_sequence >= 50
    request = next(each for each in past.requests if each.submit.request_id == "a")
    assert request.sequences[0].tokens == [5, 6, 7]
    assert 30.0 <= request.age_s < 60.0
    assert (state / RESERVE_FILE).stat().st_size == RESERVE_BYTES
    used.start(store)  # for the fixture


@pytest.mark.parametrize("loss", [_gone, _moved, _all_gone, _log_gone, _replaced], ids=lambda loss: loss.__name__)
def test_a_deleted_file_still_gives_all_that_was_in_it(used: Thread, loss: Callable[[Path], None]) -> None:
    """Also what memory has not: whoever has it open still has it."""
    with used.resting():
        loss(used.disk.path.parent)
    _anew(used)
    record = used.writer.store.read_request("b", Timestamp.now())
    assert record is not None
    assert record.sequences[0].reason == "length"
    assert used.writer.store.read_snapshot(Timestamp.now(), retained_s=60.0).epoch == 8


def test_what_was_under_way_is_written_into_the_new_one(used: Thread) -> None:
    """It waited while the old one was lost: its facts come, in their order."""
    used.disk.gate.clear()
    used.writer.write(tokens(1, 2, 7))
    used.writer.write(WriteEpoch(9))
    _gone(used.disk.path.parent)
    used.disk.gate.set()
    told: list[Any] = []
    while not {JournalRenewed, TokensWritten, EpochWritten} <= {type(fact) for fact in told}:
        told += used.told(1)
    facts = [fact for fact in told if isinstance(fact, TokensWritten | EpochWritten)]
    assert facts == [TokensWritten(((1, 6),)), EpochWritten(9)]
    past = used.writer.store.read_snapshot(Timestamp.now(), retained_s=60.0)
    assert past.epoch == 9
    assert past.requests[0].sequences[0].tokens == [5, 6, 7]


@pytest.mark.parametrize("error", [DamagedJournal("page 4 is bad"), UnsyncedJournal("it could not be synced")])
def test_a_write_that_tells_of_it(used: Thread, error: JournalError, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite finds damage, or a sync fails: the file is not tried again, another one takes the same write."""
    attempts = []

    def write(writes: Any, now: Timestamp) -> set[int]:
        attempts.append(list(writes))
        raise error

    monkeypatch.setattr(used.disk, "write", write)
    used.writer.write(accept("c", 3))
    assert str(error) in _anew(used).note
    assert used.told(1) == [AcceptanceWritten("c", (3,))]
    assert len(attempts) == 1
    assert used.writer.store is not used.disk
    _rewrite(used)
    assert JournalMended() in used.told(4)


@pytest.fixture
def reader(used: Thread) -> Iterator[tuple[JournalReader, list[Any]]]:
    """It reads beside the writer, as in a broker."""
    found: list[Any] = []
    reader = JournalReader(used.disk.open_read_only(), found.extend, used.failures.put)
    reader.on_damage = used.writer.report_damage
    used.writer.on_reopened = lambda store: reader.switch_store(store.open_read_only())
    reader.start()
    yield reader, found
    reader.close()


def test_readers_turn_to_the_new_one(used: Thread, reader: tuple[JournalReader, list[Any]]) -> None:
    """What is written there is found, though the old file was open for reading."""
    with used.resting():
        _moved(used.disk.path.parent)
    _anew(used)
    used.writer.write(accept("c", 3))
    used.told(1)
    reader[0].submit(ReadRequest("c"))
    used.until(lambda: bool(reader[1]))
    (read,) = reader[1]
    assert isinstance(read, RequestRead)
    assert read.record is not None
    assert (used.disk.path.parent / f"{FILE}-wal").exists(), "closing the old ones takes nothing of the new one away"


def test_damage_that_a_reader_finds(used: Thread, reader: tuple[JournalReader, list[Any]]) -> None:
    """It need not wait for somebody who writes there."""
    with sqlite3.connect(used.disk.path) as db:
        db.execute("UPDATE requests SET submit = X'0011' WHERE id = 'b'")
    db.close()
    reader[0].submit(ReadRequest("b"))
    assert "damaged" in _anew(used).note
    used.until(lambda: bool(reader[1]))
    assert "damaged" in reader[1][0].problem
    reader[0].submit(ReadRequest("b"))
    used.until(lambda: len(reader[1]) == 2)
    assert (reader[1][1].record, reader[1][1].problem) == (None, "")


def test_somebody_else_writes_and_does_no_harm(used: Thread) -> None:
    """A backup that folds the log into the file, or a look at it: nothing is told, and all goes on."""
    with sqlite3.connect(used.disk.path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    used.until(lambda: not used.writer._integrity._is_touched)
    used.writer.write(accept("c", 3))
    assert used.told(1) == [AcceptanceWritten("c", (3,))]
    assert used.writer.store is used.disk


def _overwritten_by_another(state: Path) -> None:
    """With a lineage of its own."""
    other = JournalStore(state / "backup")
    other.begin_lineage()
    other.close()
    _overwritten(state)


def _its_row_lost(state: Path) -> None:
    """With a page, say."""
    with sqlite3.connect(state / FILE) as db:
        db.execute("DELETE FROM facts WHERE name = 'lineage'")
    db.close()


@pytest.mark.parametrize(
    "loss", [*LOSSES, _overwritten_by_another, _its_row_lost], ids=lambda loss: loss.__name__.strip("_")
)
def test_it_is_the_same_life(tmp_path: Path, loss: Callable[[Path], None]) -> None:
    """What workers hold was computed under its numbers, and none of these is given out twice: so the next broker's
    lineage is of the same journal, a later generation, whatever the old file still tells."""
    state = tmp_path / "state"
    store = _filled(state)
    store.begin_lineage()
    lineage = store.begin_lineage()
    loss(state)
    anew = renew_journal(store, "a test says so").store
    assert anew.lineage == lineage
    again = renew_journal(anew, "a test says so, again").store
    again.close()
    following, _ = open_or_salvage(state, JournalLimits())
    found = following.begin_lineage()
    assert found.journal == lineage.journal
    assert found.generation > lineage.generation
    following.close()


def test_no_number_is_given_out_twice(used: Thread) -> None:
    """A sequence that is lost with its page gets a number that the broker, which runs on, can't have used meanwhile."""
    with sqlite3.connect(used.disk.path) as db:
        db.execute("DELETE FROM sequences WHERE id = 1")
    db.close()
    used.writer.report_damage("a test says so")
    anew = _anew(used)
    store = used.writer.store
    (number,) = (
        each.id for record in store.read_snapshot(Timestamp.now(), retained_s=0.0).requests for each in record.sequences
    )
    assert 1000 < number < anew.next_sequence
    used.writer.write(WriteAcceptance(submit("c"), (3,), "tenant"))
    used.told(1)
    assert store.next_sequence == anew.next_sequence


def test_while_it_can_not_be_begun_anew(used: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing: it is told once that it broke, tried again, and no write is lost."""
    monkeypatch.setattr("swarm.broker.journal.integrity.MIN_INTERVAL_S", 0.01)
    refusals = [JournalError("no room")] * 3
    real = salvage._copy_readable

    def copy(*arguments: Any) -> tuple[int, int]:
        if refusals:
            raise refusals.pop()
        return real(*arguments)

    monkeypatch.setattr(salvage, "_copy_readable", copy)
    with used.resting():
        _gone(used.disk.path.parent)
    used.writer.write(accept("c", 3))
    told = used.told(3)
    assert AcceptanceWritten("c", (3,)) in told
    assert not refusals
    assert [type(fact) for fact in told if isinstance(fact, JournalBroke)] == [JournalBroke]


def test_the_end_does_not_wait_for_a_journal_that_can_not_be_had(used: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it write into files that nobody finds."""

    def copy(*_: Any) -> tuple[int, int]:
        raise JournalError("no room")

    monkeypatch.setattr(salvage, "_copy_readable", copy)
    with used.resting():
        _gone(used.disk.path.parent)
    assert isinstance(used.told(1)[0], JournalBroke)
    used.writer.close()
    assert not used.writer._thread.is_alive()
    used.start(JournalStore(used.disk.path.parent))  # for the fixture


# --- the files -------------------------------------------------------------------------------------------------------


def _filled(directory: Path) -> JournalStore:
    store = JournalStore(directory)
    store.write([WriteEpoch(8), accept("a", 1), tokens(1, 0, 5)], Timestamp.now())
    return store


@pytest.mark.parametrize("place", ["_put_aside", "_replace_old", "_sync_directory"])
def test_killed_or_refused_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """At any step: the next attempt, in this process or the next, finds all that was there."""
    store = _filled(tmp_path)

    def fails(*_: Any) -> None:
        raise JournalError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(salvage, place, fails)
        with pytest.raises(JournalError):
            renew_journal(store, "a test says so")
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other, ignore=shutil.ignore_patterns("other"))
    for again in (renew_journal(store, "a test says so").store, open_or_salvage(other, JournalLimits())[0]):
        past = again.read_snapshot(Timestamp.now(), retained_s=60.0)
        assert (past.epoch, past.requests[0].sequences[0].tokens) == (8, [5])
        again.close()


def test_a_new_one_that_is_not_whole_never_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one was deleted, and the process is killed while it makes the new one: what it had begun is none."""
    store = _filled(tmp_path)
    _gone(tmp_path)

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(JournalStore, "checkpoint", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Killed):
        renew_journal(store, "a test says so")
    monkeypatch.undo()
    next_one, notes = open_or_salvage(tmp_path, JournalLimits())
    assert (notes, next_one.read_snapshot(Timestamp.now(), retained_s=60.0).requests) == ((), ())
    next_one.close()


def test_old_files_do_not_gather(tmp_path: Path) -> None:
    """A disk that damages everything would fill itself up with them."""
    store = _filled(tmp_path)
    for _ in range(MAX_ASIDE + 3):
        store = renew_journal(store, "a test says so").store
    names = {path.name.removesuffix("-wal").removesuffix("-shm") for path in tmp_path.glob(f"{ASIDE}-*")}
    assert len(names) == MAX_ASIDE
    assert store.read_snapshot(Timestamp.now(), retained_s=60.0).requests[0].sequences[0].tokens == [5]
    store.close()


def test_a_directory_that_is_made_again_is_closed_to_others(tmp_path: Path) -> None:
    """Prompts and answers are in it."""
    state = tmp_path / "state"
    store = _filled(state)
    shutil.rmtree(state)
    again = renew_journal(store, "a test says so").store
    assert state.stat().st_mode & 0o077 == 0
    again.close()


def test_a_sync_that_fails_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broker before has written is not believed to last: it is written once more, into another file."""
    _filled(tmp_path).close()
    failures = [UnsyncedJournal("it could not be synced")]
    real = JournalStore.__init__

    def opened(self: JournalStore, directory: Path, bounds: JournalLimits | None = None) -> None:
        if directory == tmp_path and failures:
            raise failures.pop()
        real(self, directory, bounds)

    monkeypatch.setattr(JournalStore, "__init__", opened)
    store, notes = open_or_salvage(tmp_path, JournalLimits())
    assert len(notes) == 1
    assert "could not be synced" in notes[0]
    assert store.read_snapshot(Timestamp.now(), retained_s=60.0).requests[0].sequences[0].tokens == [5]
    store.close()


def test_what_is_examined(tmp_path: Path) -> None:
    """Pages, values, and whether it tells what was written last: an older copy in its place is none."""
    store = _filled(tmp_path)
    store.checkpoint()
    backup = (tmp_path / FILE).read_bytes()
    store.write([accept("b", 2), WriteEnd(2, "length", 0)], Timestamp.now())
    store.examine()
    (tmp_path / FILE).write_bytes(backup)
    with pytest.raises(DamagedJournal, match="lacks the values that were written last"):
        store.examine()
    store.close()


def test_doubts_are_about_the_journal_that_is_open(thread: Thread) -> None:
    """Reports say which file it was."""
    assert thread.writer._integrity == JournalIntegrity(thread.disk.path, _recorded=thread.writer._integrity._recorded)


def test_ended_requests_survive_with_their_ends(used: Thread) -> None:
    """An end that is written once more is the same end."""
    with used.resting():
        _gone(used.disk.path.parent)
    _anew(used)
    for write in (WriteAcceptance(submit("b"), (2,), "tenant"), WriteEnd(2, "length", 0), ANEW):
        used.writer.write(write)
    assert EndWritten(2) in used.told(4)
    record = used.writer.store.read_request("b", Timestamp.now())
    assert record is not None
    assert record.sequences[0].reason == "length"

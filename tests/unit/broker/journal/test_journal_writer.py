"""The journal's thread: what is handed over is written in order, together, and told; a full disk loses nothing."""

from __future__ import annotations

import errno
import os
import queue
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from swarm.broker.actions import NewTokens, ReadRequest, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.events import (
    AcceptanceWritten,
    EndNotWritten,
    EpochWritten,
    JournalBroke,
    JournalMended,
    TokensWritten,
)
from swarm.broker.journal import database, salvage, writer
from swarm.broker.journal.database import FullDisk, UnsyncedJournal
from swarm.broker.journal.disk import PIECE_BYTES, RESERVE_BYTES, RESERVE_FILE, DiskReserve, _allocate
from swarm.broker.journal.reader import JournalReader
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.errors import JournalError
from tests.unit.broker.journal.test_journal import accept, filled, tokens
from tests.unit.broker.journal_thread import WAIT_S, Disk, Thread


def test_facts_come_in_the_order_of_the_writes(thread: Thread) -> None:
    """Whatever is written together."""
    for write in (WriteEpoch(3), accept("a", 1), tokens(1, 0, 5), tokens(1, 1, 6), WriteEpoch(4)):
        thread.writer.write(write)
    assert thread.told(5) == [
        EpochWritten(3),
        AcceptanceWritten("a", (1,)),
        TokensWritten(((1, 4),)),
        TokensWritten(((1, 5),)),
        EpochWritten(4),
    ]


def test_what_waits_is_written_together(thread: Thread) -> None:
    """While one transaction is under way the next one gathers."""
    thread.disk.gate.clear()
    thread.writer.write(accept("a", 1))
    for index in range(20):
        thread.writer.write(tokens(1, index, index))
    thread.disk.gate.set()
    thread.told(21)
    assert len(thread.disk.transactions) <= 2


def test_what_it_costs_is_told(thread: Thread) -> None:
    """In processor time, too: what a transaction lasts is mostly waiting on a busy machine."""
    thread.writer.write(accept("a", 1))
    thread.told(1)
    figures = thread.writer.figures.values()
    assert (figures["transactions"], figures["writes"]) == (1, 1)
    assert figures["durable_us"] > 0
    assert figures["computed_us"] > 0


def test_the_last_of_many_writes_is_in_the_figures_too(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told once in a while; when nothing more comes, what came since then is told."""
    monkeypatch.setattr(writer, "REPORT_INTERVAL_S", 0.1)
    monkeypatch.setattr(writer, "CHECK_INTERVAL_S", 0.01)
    for index in range(3):
        thread.writer.write(accept("abc"[index], index + 1))
        thread.told(1)
    thread.until(lambda: thread.figures.get("writes") == 3)


def test_a_full_disk_loses_nothing(thread: Thread) -> None:
    """It is told once, all is tried again, and with room everything is there, in order; but epochs come first."""
    thread.writer.write(accept("a", 1))
    thread.told(1)
    thread.disk.full = True
    thread.writer.write(tokens(1, 0, 5))
    assert thread.told(1) == [JournalBroke("the disk is full")]
    thread.writer.write(tokens(1, 1, 6))
    thread.writer.write(WriteEpoch(9))
    thread.disk.full = False
    found = thread.told(4)
    assert sorted(found[1:], key=str) == [EpochWritten(9), TokensWritten(((1, 4),)), TokensWritten(((1, 5),))]
    assert found.index(TokensWritten(((1, 4),))) < found.index(TokensWritten(((1, 5),)))


def test_epochs_have_room_of_their_own(thread: Thread) -> None:
    """With a disk that is full to the last byte, a worker's death does not have to wait. The disk is taken for mended
    once what is set aside is whole again."""
    thread.writer.write(accept("a", 1))
    thread.told(1)
    set_aside = thread.disk.path.parent / RESERVE_FILE
    assert set_aside.stat().st_size == RESERVE_BYTES
    thread.disk.room = 0
    thread.writer.write(tokens(1, 0, 5))
    assert thread.told(1) == [JournalBroke("the disk is full")]
    for epoch in (9, 10):
        thread.writer.write(WriteEpoch(epoch))
        assert thread.told(1) == [EpochWritten(epoch)]
    assert set_aside.stat().st_size == RESERVE_BYTES - 2 * PIECE_BYTES
    thread.disk.room = None
    assert thread.told(2) == [JournalMended(), TokensWritten(((1, 4),))]
    assert set_aside.stat().st_size == RESERVE_BYTES
    thread.writer.close()
    assert JournalStore(thread.disk.path.parent).read_snapshot(Timestamp.now(), retained_s=60.0).epoch == 10
    thread.start(JournalStore(thread.disk.path.parent))  # for the fixture


def test_epochs_stay_in_their_order(thread: Thread) -> None:
    """However many come while the disk refuses, and while it is hanging: the last of them is what the journal has."""
    thread.disk.full = True
    thread.writer.write(tokens(1, 0, 5))
    assert thread.told(1) == [JournalBroke("the disk is full")]
    thread.disk.gate.clear()
    for epoch in (5, 6, 7):
        thread.writer.write(WriteEpoch(epoch))
    thread.disk.full = False
    thread.disk.gate.set()
    found = thread.told(5)
    assert [fact for fact in found if isinstance(fact, EpochWritten)] == [
        EpochWritten(5),
        EpochWritten(6),
        EpochWritten(7),
    ]
    assert thread.disk.read_snapshot(Timestamp.now(), retained_s=60.0).epoch == 7


@pytest.mark.parametrize("is_known", [False, True], ids=["before-it-is-known", "afterwards"])
def test_an_epoch_behind_many_writes(thread: Thread, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """More writes are refused than one transaction takes: the epoch overtakes them, and the disk stays full."""
    monkeypatch.setattr(writer, "MAX_TOGETHER", 2)
    thread.writer.write(accept("a", 1))
    thread.told(1)
    thread.disk.room = 0
    if not is_known:
        thread.disk.gate.clear()
    for index in range(9):
        thread.writer.write(tokens(1, index, index))
    if is_known:
        assert thread.told(1) == [JournalBroke("the disk is full")]
    for epoch in (9, 10):
        thread.writer.write(WriteEpoch(epoch))
    thread.disk.gate.set()
    told = thread.told(2 if is_known else 3)
    assert told[-2:] == [EpochWritten(9), EpochWritten(10)]
    thread.disk.room = None


def test_a_log_that_fills_the_disk_is_folded_first(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is room, and nobody hears of it."""
    log = thread.disk.path.with_name("journal.db-wal")
    real = JournalStore.write

    def write(store: JournalStore, writes: Any, now: Timestamp) -> set[int]:
        if log.stat().st_size:
            raise FullDisk("the disk is full")
        return real(store, writes, now)

    thread.writer.write(accept("a", 1))
    thread.told(1)
    assert log.stat().st_size
    monkeypatch.setattr(JournalStore, "write", write)
    thread.writer.write(accept("b", 2))
    assert thread.told(1) == [AcceptanceWritten("b", (2,))]


def test_what_is_set_aside_outlives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full has no room to set it aside again: what is there stays, though nothing can be added."""
    kept = DiskReserve(tmp_path, size=3 * PIECE_BYTES)
    assert kept.fill()
    assert kept.release_piece()

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("swarm.broker.journal.disk._allocate", no_room)
    again = DiskReserve(tmp_path, size=3 * PIECE_BYTES)
    assert not again.fill(), "an earlier process has used a piece"
    assert again.num_bytes == (tmp_path / RESERVE_FILE).stat().st_size == 2 * PIECE_BYTES
    assert again.release_piece()
    assert not again.fill()
    monkeypatch.setattr(os, "ftruncate", no_room)
    assert not again.release_piece()
    assert not again.fill()
    monkeypatch.undo()
    assert again.fill()
    assert again.num_bytes == 3 * PIECE_BYTES


def test_what_is_wanted_does_not_shrink_with_every_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each process writes an epoch and is killed: all of it is to be had again, not what the last one
    found, even if nothing is left."""
    assert DiskReserve(tmp_path, size=3 * PIECE_BYTES).fill()

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("swarm.broker.journal.disk._allocate", no_room)
        for left in (2, 1, 0):
            kept = DiskReserve(tmp_path, size=3 * PIECE_BYTES)
            assert kept.release_piece()
            assert not kept.fill()
            assert kept.num_bytes == left * PIECE_BYTES
        kept = DiskReserve(tmp_path, size=3 * PIECE_BYTES)
        assert not kept.release_piece()
        assert not kept.fill()
    assert kept.fill()
    assert DiskReserve(tmp_path, size=3 * PIECE_BYTES).num_bytes == 3 * PIECE_BYTES


def test_what_never_was_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is too small has nothing set aside, in no life of the broker; once there is room, it has."""

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as small:
        small.setattr("swarm.broker.journal.disk._allocate", no_room)
        for _ in range(2):
            kept = DiskReserve(tmp_path)
            assert kept.fill()
            assert not kept.release_piece()
    assert kept.fill()
    assert kept.num_bytes == RESERVE_BYTES


def test_what_was_given_up_at_opening_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that could only be opened by taking of what was set aside accepts nothing before that is whole again."""
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    first = JournalStore(tmp_path)
    assert first.reserve.fill()
    first.close()
    refusals = [FullDisk("the disk is full")] * 2
    real, allocate = database._connect, _allocate
    full = True

    def opened(path: Path) -> sqlite3.Connection:
        if refusals:
            raise refusals.pop()
        return real(path)

    def room(file: int, num_bytes: int) -> None:
        if full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        allocate(file, num_bytes)

    monkeypatch.setattr(database, "_connect", opened)
    monkeypatch.setattr("swarm.broker.journal.disk._allocate", room)
    thread = Thread(Disk(tmp_path))
    (broke,) = thread.told(1)
    assert "full" in broke.reason
    thread.writer.write(WriteEpoch(3))
    assert thread.told(1) == [EpochWritten(3)]
    full = False
    assert thread.told(1) == [JournalMended()]
    assert (tmp_path / RESERVE_FILE).stat().st_size == RESERVE_BYTES
    thread.writer.close()


def test_a_disk_that_is_full_for_good_can_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was set aside is tried, then it is said."""
    first = JournalStore(tmp_path)
    assert first.reserve.fill()
    first.close()

    def opened(path: Path) -> sqlite3.Connection:
        raise FullDisk("the disk is full")

    monkeypatch.setattr(database, "_connect", opened)
    with pytest.raises(FullDisk):
        JournalStore(tmp_path)
    assert (tmp_path / RESERVE_FILE).stat().st_size == 0


def test_a_damaged_journal_is_kept_while_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the new one: the next attempt finds the damaged one where it was, not an empty one."""
    filled(tmp_path)
    path = tmp_path / database.FILE
    data = bytearray(path.read_bytes())
    data[4096 * 4 : 4096 * 5] = os.urandom(4096)
    path.write_bytes(data)
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL

    class Full:
        def execute(self, *_: object) -> None:
            raise error

    real = salvage._insert
    monkeypatch.setattr(salvage, "_insert", lambda db, table, row: real(Full(), table, row))  # type: ignore[arg-type]
    with pytest.raises(FullDisk):
        salvage.open_or_salvage(tmp_path, JournalLimits())
    assert path.read_bytes()[: 4096 * 8] == bytes(data)[: 4096 * 8]
    assert not list(tmp_path.glob(f"{salvage.ASIDE}-*"))
    monkeypatch.undo()
    store, notes = salvage.open_or_salvage(tmp_path, JournalLimits())
    assert len(notes) == 1
    assert store.read_snapshot(Timestamp.now(), retained_s=60.0).requests
    store.close()


@pytest.mark.parametrize(
    ("code", "no_room", "kind"),
    [
        (sqlite3.SQLITE_FULL, False, FullDisk),
        (sqlite3.SQLITE_IOERR_FSYNC, True, UnsyncedJournal),
        (sqlite3.SQLITE_IOERR_FSYNC, False, UnsyncedJournal),
        (sqlite3.SQLITE_IOERR_SHMSIZE, True, FullDisk),
        (sqlite3.SQLITE_CANTOPEN, True, FullDisk),
        (sqlite3.SQLITE_IOERR_WRITE, False, JournalError),
        (sqlite3.SQLITE_READONLY, True, JournalError),
    ],
)
def test_what_counts_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, no_room: bool, kind: type
) -> None:
    """A quota looks like any trouble with input and output: whether there is room is tried out."""

    def sync(_: int) -> None:
        if no_room:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", sync)
    error = sqlite3.OperationalError("something")
    error.sqlite_errorcode = code
    assert type(database.to_journal_error(tmp_path / "journal.db", error)) is kind


def test_what_is_set_aside_can_be_used_up(tmp_path: Path) -> None:
    """Piece by piece; then there is none. It comes back whole, or stays as it is."""
    kept = DiskReserve(tmp_path, size=3 * PIECE_BYTES)
    assert kept.fill()
    assert [kept.release_piece() for _ in range(4)] == [True, True, True, False]
    assert (tmp_path / RESERVE_FILE).stat().st_size == 0
    assert kept.fill()
    assert kept.num_bytes == 3 * PIECE_BYTES
    assert not DiskReserve(tmp_path / "nowhere").release_piece()


def test_a_disk_too_small_for_anything_set_aside(tmp_path: Path) -> None:
    """Then nothing is, and nobody waits for it."""
    (tmp_path / RESERVE_FILE).mkdir()
    kept = DiskReserve(tmp_path)
    assert kept.fill()
    assert not kept.release_piece()


def test_bounded_while_the_disk_is_full(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are let go, since they can be drawn again; what was accepted is not."""
    monkeypatch.setattr(writer, "MAX_WAITING", 10)
    monkeypatch.setattr(writer, "MAX_TOGETHER", 1)
    thread.writer.write(accept("a", 1))
    thread.told(1)
    thread.disk.full = True
    thread.writer.write(WriteEpoch(2))
    thread.told(1)
    for index in range(100):
        thread.writer.write(WriteTokens((NewTokens(1, 3 + index, index, (index,)),)))
    thread.writer.write(WriteEnd(1, "length", 100))
    assert len(thread.writer._waiting) <= 11
    thread.disk.full = False
    assert JournalMended() in thread.told(2)
    thread.writer.close()
    record = JournalStore(thread.disk.path.parent).read_request("a", Timestamp.now())
    assert record is not None
    assert record.sequences[0].reason is None, "without its tokens it has not ended: they are drawn again"
    thread.start(JournalStore(thread.disk.path.parent))  # for the fixture


def test_bounded_while_the_disk_is_slow(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never fails, and never gets done: that is told before any tokens go, since their facts won't come."""
    monkeypatch.setattr(writer, "MAX_WAITING", 10)
    thread.writer.write(accept("a", 1))
    thread.told(1)
    thread.disk.gate.clear()
    for index in range(100):
        thread.writer.write(tokens(1, index, index))
    thread.writer.write(WriteEpoch(2))
    assert len(thread.writer._waiting) <= 11
    (broke,) = thread.told(1)
    assert isinstance(broke, JournalBroke)
    assert "too slow" in broke.reason
    thread.disk.gate.set()
    assert thread.told(1) == [JournalMended()]
    while thread.told(1) != [EpochWritten(2)]:
        pass


def test_the_end_waits_for_what_was_handed_over(thread: Thread, tmp_path: Path) -> None:
    """A broker that stops in good order has written all."""
    thread.writer.write(accept("a", 1))
    for index in range(50):
        thread.writer.write(tokens(1, index, index))
    thread.writer.close()
    record = JournalStore(tmp_path).read_request("a", Timestamp.now())
    assert record is not None
    assert record.sequences[0].tokens == list(range(50))
    thread.start(JournalStore(tmp_path))  # for the fixture


def test_a_failed_tidy_is_tried_again(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is refused for it: whether something can be written shows when it is written."""
    thread.disk.full = True
    monkeypatch.setattr(writer, "DELETE_INTERVAL_S", 0.01)
    thread.writer.write(tokens(99, 0))  # wakes the thread, and is refused
    assert thread.told(1) == [JournalBroke("the disk is full")]
    thread.disk.full = False
    assert JournalMended() in thread.told(2)
    thread.disk.full = True
    assert thread.disk.untidy.acquire(timeout=WAIT_S)
    assert thread.disk.untidy.acquire(timeout=WAIT_S), "it is tried again"
    thread.disk.full = False
    thread.writer.write(WriteEpoch(2))
    assert thread.told(1) == [EpochWritten(2)], "neither broken nor mended in between"


def test_a_bug_is_said(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has died in silence would leave everybody waiting."""

    def fails(*_: object) -> set[int]:
        raise KeyError("a bug")

    monkeypatch.setattr(thread.disk, "write", fails)
    thread.writer.write(WriteEpoch(3))
    assert isinstance(thread.failures.get(timeout=WAIT_S), KeyError)


def test_a_bug_of_the_reader_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: queue.Queue[BaseException] = queue.Queue()
    store = JournalStore(tmp_path)
    reading = store.open_read_only()

    def fails(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(reading, "read_request", fails)
    reader = JournalReader(reading, lambda found: None, failures.put)
    reader.start()
    assert reader.submit(ReadRequest("a")) is None
    assert isinstance(failures.get(timeout=WAIT_S), KeyError)
    reader.close()
    store.close()


def test_spoiled_tokens_end_no_thread(thread: Thread) -> None:
    """A value that is not what was written has no end here; what comes after it is written as ever."""
    thread.writer.write(accept("a", 1))
    thread.writer.write(tokens(1, 0, 5))
    thread.told(2)
    with sqlite3.connect(thread.disk.path) as db:
        db.execute("UPDATE recent SET tokens = X'0011'")
    db.close()
    thread.writer.write(WriteEnd(1, "length", 1))
    assert thread.told(1) == [EndNotWritten(1)]
    thread.writer.write(accept("b", 2))
    assert thread.told(1) == [AcceptanceWritten("b", (2,))]
    store = JournalStore(thread.disk.path.parent)
    requests = store.read_snapshot(Timestamp.now(), retained_s=60.0).requests
    assert [(r.submit.request_id, r.sequences[0].reason, r.sequences[0].tokens) for r in requests] == [
        ("a", None, []),
        ("b", None, []),
    ]
    store.close()

"""The journal's file: what is written is read again, whatever happened to the process or the disk in between."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm.broker.actions import NewTokens, WriteAcceptance, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.journal.database import FILE, VERSION, DamagedJournal
from swarm.broker.journal.salvage import ASIDE, open_or_salvage
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.errors import JournalError
from swarm.testing import fake_manifest
from swarm.wire.messages import TokenLogprob
from tests.unit.broker.bench import submit

NOW = Timestamp(wall=1_000_000.0, tick=50.0, boot="this one")
LATER = Timestamp(wall=1_000_030.0, tick=80.0, boot="this one")


def tokens(sequence: int, first: int, *ids: int) -> WriteTokens:
    return WriteTokens((NewTokens(sequence, 3 + first, first, ids, tuple((TokenLogprob(i, -1.0),) for i in ids)),))


def accept(request_id: str = "r", *sequences: int) -> WriteAcceptance:
    return WriteAcceptance(submit(request_id, n=len(sequences) or 1), sequences or (1,), "tenant")


@pytest.fixture
def store(tmp_path: Path) -> JournalStore:
    return JournalStore(tmp_path)


def test_what_is_written_is_read_again(tmp_path: Path, store: JournalStore) -> None:
    """After a restart: the epoch, who was in the plan, every request with its tokens in order, and what asks beside."""
    store.write([WriteEpoch(7, ("w0", "w1"), fake_manifest(), ((4, 2),))], NOW)
    store.write([accept("a", 4, 5)], NOW)
    store.write([tokens(4, 0, 11), tokens(5, 0, 21)], NOW)
    store.write([tokens(4, 1, 12)], NOW)
    store.close()
    past = JournalStore(tmp_path).read_snapshot(LATER, retained_s=60.0)
    assert (past.epoch, past.workers, past.next_sequence, past.notes) == (7, ("w0", "w1"), 6, ())
    assert (past.manifest, past.blames) == (fake_manifest(), ((4, 2),))
    (request,) = past.requests
    assert request.submit == submit("a", n=2)
    assert (request.tenant, request.age_s, request.has_ended) == ("tenant", 30.0, False)
    assert [(s.id, s.index, s.tokens) for s in request.sequences] == [(4, 0, [11, 12]), (5, 1, [21])]
    assert request.sequences[0].logprobs == [(TokenLogprob(11, -1.0),), (TokenLogprob(12, -1.0),)]


def test_a_vector_is_read_with_its_end(tmp_path: Path, store: JournalStore) -> None:
    """Its request has no tokens. Salvage copies it, too."""
    store.write([accept("a", 4)], NOW)
    store.write([WriteEnd(4, "stop", 0, "", b"12345678")], NOW)
    store.close()
    again = JournalStore(tmp_path)
    (request,) = again.read_snapshot(LATER, retained_s=60.0).requests
    assert [(s.reason, s.tokens, s.vector) for s in request.sequences] == [("stop", [], b"12345678")]
    found = again.read_request("a", LATER)
    assert found is not None
    assert found.sequences[0].vector == b"12345678"


def test_pixels_are_kept_until_the_whole_request_has_ended(tmp_path: Path, store: JournalStore) -> None:
    seeing = replace(submit("a", n=2), pixels=(b"cat", b"dog"))
    store.write([WriteAcceptance(seeing, (4, 5), "tenant")], NOW)
    for sequence, pixels in ((4, (b"cat", b"dog")), (5, ())):
        store.write([WriteEnd(sequence, "stop", 0, has_pixels=True)], NOW)
        found = store.read_request("a", LATER)
        assert found is not None
        assert found.submit == replace(seeing, pixels=pixels)


def test_log_probabilities_of_a_prompt_come_with_the_first_token_or_the_end(
    tmp_path: Path, store: JournalStore
) -> None:
    """With a cached prompt's number of tokens, too."""
    first, second = NewTokens(4, 3, 0, (7,), num_cached=2, prompt_logprobs=b"p"), NewTokens(4, 4, 1, (8,))
    store.write([accept("a", 4), accept("b", 5)], NOW)
    store.write([WriteTokens((first,))], NOW)
    store.write([WriteTokens((second,)), WriteEnd(5, "length", 0, "", b"", 3, b"q")], NOW)

    def read(each: JournalStore) -> list[tuple[list[int], int, bytes]]:
        past = each.read_snapshot(LATER, retained_s=60.0).requests
        return [(s.tokens, s.num_cached, s.prompt_logprobs) for request in past for s in request.sequences]

    assert read(store) == [([7, 8], 2, b"p"), ([], 3, b"q")]
    store.write([WriteEnd(4, "length", 2)], NOW)
    store.close()
    assert read(JournalStore(tmp_path)) == [([7, 8], 2, b"p"), ([], 3, b"q")]


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


OURS = {f"{FILE}{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}


@pytest.mark.usefixtures("usual_umask")
def test_nobody_else_reads_it(tmp_path: Path) -> None:
    """Prompts and answers are in it: the file, its log and the log's index are their owner's."""
    store = JournalStore(tmp_path / "state")
    store.write([accept()], NOW)
    assert modes(tmp_path / "state") == OURS
    assert modes(tmp_path) == {"state": 0o700}


@pytest.mark.usefixtures("usual_umask")
def test_what_others_could_read_is_mended(tmp_path: Path) -> None:
    """An older version left it so, also what it put aside; the directory may be the user's and is left alone."""
    first = JournalStore(tmp_path / "state")
    first.write([accept()], NOW)
    (tmp_path / "state" / f"{ASIDE}-1").touch()
    for path in (tmp_path / "state", *(tmp_path / "state").iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    store, notes = open_or_salvage(tmp_path / "state", JournalLimits())
    assert notes == ()
    assert modes(tmp_path / "state") == OURS | {f"{ASIDE}-1": 0o600}
    assert modes(tmp_path) == {"state": 0o755}
    for each in (first, store):
        each.close()


@pytest.mark.usefixtures("usual_umask")
def test_nobody_else_reads_what_is_saved(tmp_path: Path) -> None:
    """Neither the new file nor the damaged one beside it."""
    filled(tmp_path)
    (tmp_path / FILE).chmod(0o644)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(5 * 4096)
    store, notes = open_or_salvage(tmp_path, JournalLimits())
    assert notes
    assert len(modes(tmp_path)) > len(OURS)
    assert set(modes(tmp_path).values()) == {0o600}
    store.close()


def test_a_request_keeps_its_mode_of_speculation(tmp_path: Path, store: JournalStore) -> None:
    """A broker that is started again guesses as little for it as the one before."""
    asked = submit("a", speculation="off")
    store.write([WriteAcceptance(asked, (1,), "tenant")], NOW)
    store.close()
    (request,) = JournalStore(tmp_path).read_snapshot(LATER, retained_s=60.0).requests
    assert request.submit == asked


def test_what_belongs_to_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rights are not ours to change."""
    (tmp_path / FILE).touch(0o644)
    (tmp_path / FILE).chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    JournalStore(tmp_path).close()
    assert modes(tmp_path)[FILE] == 0o644


def test_what_is_believed_lasts(tmp_path: Path, store: JournalStore) -> None:
    """A process that was killed may have written what it had not synced. Whoever starts again tells clients of it: so
    it is in the file itself, and synced, before it is read."""
    store.write([accept("a")], NOW)
    store.write([tokens(1, 0, 11)], NOW)
    wal = tmp_path / f"{FILE}-wal"
    assert wal.stat().st_size > 0
    assert JournalStore(tmp_path).read_snapshot(NOW, retained_s=60.0).requests[0].sequences[0].tokens == [11]
    assert wal.stat().st_size == 0


def test_an_end_is_final_and_compact(store: JournalStore) -> None:
    """The tokens are one value then, those that a stop string took back are gone, and the reason is kept."""
    store.write([accept("a", 1, 2), tokens(1, 0, 5), tokens(1, 1, 6), tokens(1, 2, 7), tokens(2, 0, 9)], NOW)
    store.write([WriteEnd(1, "stop", 2, "found it")], NOW)
    record = store.read_request("a", NOW)
    assert record is not None
    assert not record.has_ended
    assert (record.sequences[0].tokens, record.sequences[0].reason, record.sequences[0].detail) == (
        [5, 6],
        "stop",
        "found it",
    )
    store.write([WriteEnd(2, "length", 1)], NOW)
    (ended,) = store.list_ended(LATER)
    assert ended.ended_age_s == 30.0
    with store.fill() as db:
        assert db.execute("SELECT count(*) FROM tokens").fetchone() == (0,)


def test_an_id_used_again_is_another_request(store: JournalStore) -> None:
    """Nothing of the first one is left."""
    store.write([accept("a", 1), tokens(1, 0, 5), WriteEnd(1, "cancelled", 1)], NOW)
    store.write([accept("a", 2)], NOW)
    record = store.read_request("a", NOW)
    assert record is not None
    assert [(s.id, s.tokens, s.reason) for s in record.sequences] == [(2, [], None)]


def test_age_by_the_clock_that_nobody_sets(store: JournalStore) -> None:
    """An hour's step of the wall clock changes nobody's age; over a reboot, the wall clock is all there is."""
    store.write([accept("a")], NOW)
    stepped = Timestamp(wall=NOW.wall + 3600.0, tick=NOW.tick + 2.0, boot=NOW.boot)
    assert store.read_snapshot(stepped, retained_s=60.0).requests[0].age_s == 2.0
    rebooted = Timestamp(wall=NOW.wall + 100.0, tick=3.0, boot="another one")
    assert store.read_snapshot(rebooted, retained_s=60.0).requests[0].age_s == 100.0
    assert store.read_snapshot(Timestamp(0.0, 3.0, "another one"), retained_s=60.0).requests[0].age_s == 0.0


def test_what_is_kept(tmp_path: Path) -> None:
    """Ended requests for as long as was set, and no more than fit; what has not ended stays, however old."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=3600.0, max_bytes=1 << 30))
    store.write([accept("old", 1), accept("new", 2), accept("open", 3)], NOW)
    store.write([WriteEnd(1, "length", 0)], NOW)
    after = Timestamp(NOW.wall + 3000.0, NOW.tick + 3000.0, NOW.boot)
    store.write([WriteEnd(2, "length", 0)], after)
    assert [r.submit.request_id for r in store.read_snapshot(after, retained_s=60.0).requests] == ["new", "open"]
    assert store.delete_old(Timestamp(NOW.wall + 4000.0, NOW.tick + 4000.0, NOW.boot)) == 1
    assert store.read_request("old", after) is None
    assert store.read_request("new", after) is not None
    store.close()
    small = JournalStore(tmp_path, JournalLimits(keep_s=1e9, max_bytes=1))
    small.delete_old(after)
    assert [r.submit.request_id for r in small.read_snapshot(after, retained_s=1e9).requests] == ["open"]


def ended(store: JournalStore, request_id: str, number: int, moment: Timestamp) -> None:
    store.write([accept(request_id, number), WriteEnd(number, "length", 0)], moment)


def kept(store: JournalStore, now: Timestamp) -> list[str]:
    return sorted(record.submit.request_id for record in store.list_ended(now))


@pytest.mark.parametrize("step_s", [-1e9, 1e9], ids=["ended-in-the-past", "ended-in-the-future"])
def test_a_clock_that_was_wrong_at_an_end_and_has_been_set(tmp_path: Path, step_s: float) -> None:
    """Within one boot nobody minds the wall clock: what ended a minute ago is a minute old, and goes when it is old."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=3600.0))
    ended(store, "a", 1, NOW)
    soon = Timestamp(NOW.wall + step_s, NOW.tick + 60.0, NOW.boot)
    assert store.delete_old(soon) == 0
    (record,) = store.read_snapshot(soon, retained_s=61.0).requests
    assert record.ended_age_s == 60.0
    assert store.read_snapshot(soon, retained_s=59.0).requests == ()
    late = Timestamp(NOW.wall - step_s, NOW.tick + 3601.0, NOW.boot)
    assert store.delete_old(late) == 1


def test_a_clock_that_is_wrong_at_boot(tmp_path: Path) -> None:
    """Nothing is tidied away by it: not before somebody has had the time to set it, and then by what it says since."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=3600.0))
    ended(store, "a", 1, NOW)
    wrong = NOW.wall + 1e9
    assert store.delete_old(Timestamp(wrong, 5.0, "another one", machine_wall=wrong)) == 0, "this may be a wrong clock"
    is_set = Timestamp(wrong + 3600.0, 3605.0, "another one", machine_wall=NOW.wall + 3600.0)
    assert store.delete_old(is_set) == 0
    assert kept(store, is_set) == ["a"]
    late = Timestamp(wrong + 3700.0, 3705.0, "another one", machine_wall=NOW.wall + 3700.0)
    assert store.delete_old(late) == 1


def test_for_want_of_room_earlier_boots_go_first(tmp_path: Path) -> None:
    """This machine started with a clock of long ago: what has just ended is not the oldest for that."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=1e12, max_bytes=1 << 30))
    ended(store, "before", 1, NOW)
    ended(store, "now", 2, Timestamp(100.0, 7.0, "another one"))
    store._limits = JournalLimits(keep_s=1e12, max_bytes=store.num_bytes - 1)
    now = Timestamp(100.0, 8.0, "another one")
    dropped = store._delete_oldest(now)
    assert (dropped, kept(store, now)) == (1, ["now"])
    assert store._delete_oldest(now) == 1


@pytest.mark.slow
def test_bounded_under_a_stream_of_requests(tmp_path: Path) -> None:
    """The file does not outgrow its bound by more than what comes between two looks at it."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=1e9, max_bytes=300_000))
    for number in range(1, 600):
        moment = Timestamp(NOW.wall + number, NOW.tick + number, NOW.boot)
        store.write([accept(f"r{number}", number), tokens(number, 0, *range(100))], moment)
        store.write([WriteEnd(number, "length", 100)], moment)
        if number % 50 == 0:
            store.delete_old(moment)
            assert store.num_bytes < 300_000
    assert (tmp_path / FILE).stat().st_size < 3_000_000


def test_all_of_a_transaction_or_nothing(store: JournalStore) -> None:
    """A write that fails takes those beside it along, and the next one finds the journal as before."""
    with pytest.raises(JournalError):
        store.write([accept("a", 1), accept("b", 1)], NOW)  # two sequences can't have one number
    assert store.read_snapshot(NOW, retained_s=60.0).requests == ()
    store.write([accept("a", 1)], NOW)
    assert len(store.read_snapshot(NOW, retained_s=60.0).requests) == 1


def test_tokens_of_nobody(store: JournalStore) -> None:
    """They are not kept, and spoil nothing that is written beside them."""
    store.write([accept("a", 1), WriteTokens((NewTokens(99, 3, 0, (1,)),)), tokens(1, 0, 5)], NOW)
    record = store.read_request("a", NOW)
    assert record is not None
    assert record.sequences[0].tokens == [5]


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from swarm.broker.journal.store import JournalStore
from tests.unit.broker.journal.test_journal import NOW, accept, tokens, WriteEpoch
store = JournalStore(Path(sys.argv[1]))
store.write([WriteEpoch(3), accept("a", 1)], NOW)
for index in range(50):
    store.write([tokens(1, index, index)], NOW)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """Whatever a call has written is there, though nothing was closed or synced."""
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), *[path for path in sys.path if path], os.getcwd()]
    assert subprocess.run(arguments, check=False, timeout=60).returncode == -9
    past = JournalStore(tmp_path).read_snapshot(LATER, retained_s=60.0)
    assert past.epoch == 3
    assert past.requests[0].sequences[0].tokens == list(range(50))


def test_an_end_without_its_tokens_is_not_taken(store: JournalStore) -> None:
    """The caller hears which: such a sequence goes on, here."""
    store.write([accept("a", 1, 2), tokens(1, 0, 5), tokens(2, 0, 9)], NOW)
    assert store.write([WriteEnd(1, "length", 2), WriteEnd(2, "length", 1)], NOW) == {1}
    record = store.read_request("a", NOW)
    assert record is not None
    assert [s.reason for s in record.sequences] == [None, "length"]
    assert store.write([tokens(1, 0, 5, 6), WriteEnd(1, "length", 2)], NOW) == set(), "with them it is"
    assert store.write([WriteEnd(1, "length", 2), WriteEnd(99, "length", 2)], NOW) == set(), "ended, and unknown"
    record = store.read_request("a", NOW)
    assert record is not None
    assert [s.tokens for s in record.sequences] == [[5, 6], [9]]


# --- damage -----------------------------------------------------------------------------------------------------------


def filled(directory: Path, num: int = 40) -> None:
    store = JournalStore(directory)
    store.write([WriteEpoch(12, ("w0",))], NOW)
    for number in range(1, num + 1):
        store.write([accept(f"r{number}", number)], NOW)
        store.write([tokens(number, 0, *range(200))], NOW)
    store.close()


def unsynced(directory: Path, num: int = 20) -> Path:
    """A directory as a killed broker leaves it, everything after the first requests in the write-ahead log."""
    store = JournalStore(directory / "live")
    store.write([WriteEpoch(12), accept("a", 1)], NOW)
    for index in range(num):
        store.write([tokens(1, index, index)], NOW)
    copy = directory / "copy"
    shutil.copytree(directory / "live", copy)
    store.close()
    return copy


@pytest.mark.parametrize("lost", [1, 24, 1000, 4096, 9000])
def test_a_torn_end_of_the_write_ahead_log(tmp_path: Path, lost: int) -> None:
    """What was not finished is not there, what was before it is: tokens from the first on, without a gap."""
    copy = unsynced(tmp_path)
    wal = copy / f"{FILE}-wal"
    with wal.open("r+b") as file:
        file.truncate(max(0, wal.stat().st_size - lost))
    store, notes = open_or_salvage(copy, JournalLimits())
    assert notes == ()
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert past.epoch == 12
    kept = past.requests[0].sequences[0].tokens
    assert kept == list(range(len(kept)))
    assert len(kept) < 20


def test_a_garbled_end_of_the_write_ahead_log(tmp_path: Path) -> None:
    """Bytes that were never synced may be anything; checksums tell."""
    copy = unsynced(tmp_path)
    wal = copy / f"{FILE}-wal"
    data = bytearray(wal.read_bytes())
    data[-3000:-2000] = os.urandom(1000)
    wal.write_bytes(data)
    store, _ = open_or_salvage(copy, JournalLimits())
    kept = store.read_snapshot(LATER, retained_s=60.0).requests[0].sequences[0].tokens
    assert kept == list(range(len(kept)))


def test_a_truncated_file(tmp_path: Path) -> None:
    """What can be read is saved into a new journal, the old file is kept, and both are said."""
    filled(tmp_path)
    path = tmp_path / FILE
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 // 4096 * 4096)
    with pytest.raises(DamagedJournal, match="damaged"):
        JournalStore(tmp_path)
    store, (note,) = open_or_salvage(tmp_path, JournalLimits())
    assert ASIDE in note
    assert list(tmp_path.glob(f"{ASIDE}-*"))
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert past.epoch >= 12
    assert past.next_sequence > max((s.id for r in past.requests for s in r.sequences), default=0)
    store.write([WriteEpoch(past.epoch + 1)], NOW)
    for request in past.requests:
        for sequence in request.sequences:
            assert sequence.tokens == list(range(len(sequence.tokens)))


@pytest.mark.parametrize("page", [2, 3, 5, 9, 14])
def test_a_corrupt_page(tmp_path: Path, page: int) -> None:
    """Whichever page it is: the journal opens, nothing in it is wrong, and most of it is there."""
    filled(tmp_path)
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = os.urandom(4096)
    path.write_bytes(data)
    store, _ = open_or_salvage(tmp_path, JournalLimits())
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert past.epoch >= 12
    for request in past.requests:
        assert request.submit == submit(request.submit.request_id, n=1)
        for sequence in request.sequences:
            assert sequence.tokens == list(range(len(sequence.tokens)))
    assert sum(len(sequence.tokens) for request in past.requests for sequence in request.sequences) >= 35 * 200
    store.close()


def test_something_else_than_a_database(tmp_path: Path) -> None:
    """The epoch can't be known: the next one is above any that there can have been."""
    (tmp_path / FILE).write_bytes(os.urandom(20_000))
    store, (note,) = open_or_salvage(tmp_path, JournalLimits())
    assert "damaged" in note
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert past.epoch > time.time() - 1000
    assert past.requests == ()


def spoil(directory: Path, *statements: str) -> None:
    with sqlite3.connect(directory / FILE) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


SPOILED_REQUESTS = "UPDATE requests SET submit = X'0011' WHERE number >= 8"


def test_no_number_is_given_out_twice(tmp_path: Path) -> None:
    """Not even those of requests that could not be saved: workers may still hold their tokens."""
    filled(tmp_path, 10)
    spoil(tmp_path, SPOILED_REQUESTS, "UPDATE facts SET value = X'0011' WHERE name != 'next_sequence'")
    store, _ = open_or_salvage(tmp_path, JournalLimits())
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert [r.submit.request_id for r in past.requests] == [f"r{number}" for number in range(1, 8)]
    assert past.next_sequence == 11
    store.close()


def test_the_next_number_is_lost(tmp_path: Path) -> None:
    """Others may have been given out above all that are there: it is far ahead, and further the next time; a number
    that damage has made up does not count."""
    filled(tmp_path, 10)
    spoil(
        tmp_path,
        SPOILED_REQUESTS,
        "UPDATE facts SET value = X'0011'",
        f"UPDATE sequences SET id = {1 << 62} WHERE id = 9",
    )
    store, _ = open_or_salvage(tmp_path, JournalLimits())
    first = store.read_snapshot(LATER, retained_s=60.0).next_sequence
    assert 1_000_000 < first < 1 << 53
    store.write([accept("a", first)], NOW)
    store.close()
    spoil(tmp_path, "UPDATE facts SET value = X'0011'")
    store, _ = open_or_salvage(tmp_path, JournalLimits())
    assert store.read_snapshot(LATER, retained_s=60.0).next_sequence > first
    store.close()


def test_a_list_without_what_is_damaged(tmp_path: Path) -> None:
    """One request that can't be read hides none of the others."""
    store = JournalStore(tmp_path)
    for number in (1, 2, 3):
        store.write([accept(f"r{number}", number), WriteEnd(number, "length", 0)], NOW)
    spoil(tmp_path, "UPDATE requests SET submit = X'0011' WHERE id = 'r2'")
    assert sorted(r.submit.request_id for r in store.list_ended(LATER)) == ["r1", "r3"]
    assert sorted(r.submit.request_id for r in store.find_by_prefix("r", LATER, 5)) == ["r1", "r3"]
    store.close()


def test_another_process_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room on the disk would not help; the remedy is another one."""
    monkeypatch.setattr("swarm.broker.journal.database.BUSY_S", 0.01)
    store = JournalStore(tmp_path)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError, match=r"another process holds .* end that process"):
        store.write([WriteEpoch(3)], NOW)
    other.close()
    store.write([WriteEpoch(3)], NOW)
    store.close()


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Its format is not known, so it is left alone, and the remedy is named."""
    filled(tmp_path, 1)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(JournalError, match=r"newer Swarm .* install that version"):
        open_or_salvage(tmp_path, JournalLimits())
    assert (tmp_path / FILE).read_bytes() == before


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(JournalError, match="can't be opened"):
        open_or_salvage(tmp_path / "there", JournalLimits())


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_steps_of_the_wall_clock_age_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Somebody sets the machine's clock by an hour while the broker runs: nothing that has ended is dropped before its
    time, and nothing seems older or younger, so no deadline or retention fires."""
    store = JournalStore(tmp_path, JournalLimits(keep_s=600.0))
    store.write([WriteAcceptance(submit(), (1,)), WriteEnd(1, "length", 0)], Timestamp.now())
    set_by = time.time() + step_s
    monkeypatch.setattr(time, "time", lambda: set_by)
    assert store.delete_old(Timestamp.now()) == 0
    found = store.read_request(submit().request_id, Timestamp.now())
    assert found is not None
    assert found.age_s < 60.0
    assert found.ended_age_s is not None
    assert found.ended_age_s < 60.0
    assert len(store.read_snapshot(Timestamp.now(), retained_s=60.0).requests) == 1
    store.close()

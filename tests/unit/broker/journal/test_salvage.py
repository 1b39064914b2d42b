"""A damaged journal that has lost some sequences of a request: what was accepted is not lost by it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.broker.actions import NewTokens, WriteAcceptance, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.journal.database import FILE
from swarm.broker.journal.salvage import SALVAGED, open_or_salvage
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.broker.journal.values import MAX_COUNT, encode
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord
from swarm.wire.messages import Attach, Lineage, Rejected
from tests.unit.broker.bench import Bench, request_settings, said, settings, submit

NOW = Timestamp(wall=1_000_000.0, tick=50.0, boot="this one")
LATER = Timestamp(wall=1_000_030.0, tick=80.0, boot="this one")


def tokens(sequence: int, *ids: int) -> WriteTokens:
    return WriteTokens((NewTokens(sequence, 3, 0, ids),))


def salvaged(directory: Path, *statements: str, writes: Sequence[object]) -> JournalSnapshot:
    """What is left of these writes after that has befallen the file; the last statement makes it be noticed."""
    store = JournalStore(directory)
    store.write([WriteEpoch(3), WriteAcceptance(submit("a", n=3), (4, 5, 6), "tenant")], NOW)
    store.write(list(writes), NOW)  # type: ignore[arg-type]
    store.close()
    with sqlite3.connect(directory / FILE) as db:
        for statement in (*statements, "UPDATE facts SET value = X'0011' WHERE name = 'epoch'"):
            db.execute(statement)
    db.close()
    store, notes = open_or_salvage(directory, JournalLimits())
    assert notes
    past = store.read_snapshot(LATER, retained_s=60.0)
    store.close()
    return past


def sequences(record: RequestRecord) -> list[tuple[int, int, list[int], str | None]]:
    return [(each.id, each.index, each.tokens, each.reason) for each in record.sequences]


def test_a_lost_sequence_begins_anew(tmp_path: Path) -> None:
    """In its place, so with its seed, and under a number that nobody has had; the others are as they were."""
    past = salvaged(
        tmp_path, "DELETE FROM sequences WHERE id = 5", writes=[tokens(4, 11, 12), tokens(5, 21), tokens(6, 31)]
    )
    (request,) = past.requests
    assert sequences(request) == [(4, 0, [11, 12], None), (7, 1, [], None), (6, 2, [31], None)]
    assert past.next_sequence == 8


def test_a_request_of_which_all_sequences_are_lost(tmp_path: Path) -> None:
    """It was accepted and has not ended: all of them begin anew."""
    (request,) = salvaged(tmp_path, "DELETE FROM sequences", writes=[tokens(4, 11)]).requests
    numbers = [each.id for each in request.sequences]
    assert len(set(numbers)) == 3
    assert min(numbers) > 6
    assert [each.index for each in request.sequences] == [0, 1, 2]


def test_an_ended_request_with_a_lost_sequence_goes_on(tmp_path: Path) -> None:
    """Its tokens are lost, and drawn again."""
    ends = [WriteEnd(number, "length", 0) for number in (4, 5, 6)]
    (request,) = salvaged(tmp_path, "DELETE FROM sequences WHERE id = 6", writes=ends).requests
    assert sequences(request) == [(4, 0, [], "length"), (5, 1, [], "length"), (7, 2, [], None)]
    assert not request.has_ended


def test_what_was_taken_back_stays_so(tmp_path: Path) -> None:
    """Its own client has cancelled it: no part of it runs again."""
    ends = [WriteEnd(number, "cancelled", 0) for number in (4, 5, 6)]
    past = salvaged(tmp_path, "DELETE FROM sequences WHERE id = 6", writes=ends)
    assert [each.reason for request in past.requests for each in request.sequences] == ["cancelled"] * 3
    assert past.next_sequence == 8


def test_an_ended_request_of_which_nothing_is_left(tmp_path: Path) -> None:
    """How it ended is not known, perhaps it was cancelled: it is not computed again."""
    ends = [WriteEnd(number, "length", 0) for number in (4, 5, 6)]
    assert salvaged(tmp_path, "DELETE FROM sequences", writes=ends).requests == ()


@pytest.mark.parametrize(
    "spoil",
    [
        "UPDATE sequences SET place = 7 WHERE id = 6",
        "UPDATE sequences SET place = 1 WHERE id = 6",
        "UPDATE sequences SET place = 'x' WHERE id = 6",
        f"UPDATE sequences SET id = {1 << 62} WHERE id = 6",
    ],
)
def test_what_can_not_be_is_not_believed(tmp_path: Path, spoil: str) -> None:
    """Numbers and places have no checksum: those that damage has made up count as lost."""
    (request,) = salvaged(tmp_path, spoil, writes=[tokens(4, 11)]).requests
    assert sequences(request) == [(4, 0, [11], None), (5, 1, [], None), (7, 2, [], None)]


def test_its_client_reads_on(tmp_path: Path) -> None:
    """Who asks for all of the continuations that it had is not refused."""
    past = salvaged(tmp_path, "DELETE FROM sequences WHERE id = 5", writes=[tokens(4, 11)])
    bench = Bench(settings(requests=request_settings(has_journal=True)), past=past)
    answers = said(bench.say(Attach(request_id="a", next_index=(0, 0, 0))))
    assert answers
    assert not [each for each in answers if isinstance(each, Rejected)]
    bench.serve(1)
    bench.run_dry()
    assert [sequence.num_generated for sequence in bench.state.requests["a"].sequences] == [8, 8, 8]


class Killed(BaseException):
    """As by SIGKILL: nobody catches it."""


@pytest.mark.parametrize("moves", range(4))
def test_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    """Wherever that is, the next process finds all that could be saved, and says where the damaged file is."""
    store = JournalStore(tmp_path)
    store.write([WriteEpoch(3), WriteAcceptance(submit("a"), (4,), "tenant"), tokens(4, 11, 12)], NOW)
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("UPDATE facts SET value = X'0011' WHERE name = 'epoch'")
    other.close()  # the first still has it open, so its log stays where it is
    done = []
    rename = Path.rename

    def rename_until(path: Path, target: Path) -> Path:
        if len(done) == moves:
            raise Killed
        done.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until)
        with pytest.raises(Killed):
            open_or_salvage(tmp_path, JournalLimits())
    store.close()
    opened, notes = open_or_salvage(tmp_path, JournalLimits())
    (request,) = opened.read_snapshot(LATER, retained_s=60.0).requests
    assert sequences(request) == [(4, 0, [11, 12], None)]
    assert "damaged" in notes[0]
    assert not (tmp_path / SALVAGED).exists()
    opened.close()


# --- numbers that nobody can have counted up to -----------------------------------------------------------------------


def set_fact(directory: Path, name: str, value: object) -> None:
    with sqlite3.connect(directory / FILE) as db:
        db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, encode(value)))
    db.close()


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("epoch", 2**63 - 1, "the epoch"),
        ("epoch", 2**63, "the epoch"),
        ("epoch", -1, "the epoch"),
        ("next_sequence", 2**63 - 1, "the next sequence's number"),
        ("lineage", Lineage("a", 2**62), "the generation"),
    ],
)
def test_a_poisoned_number_is_not_believed(tmp_path: Path, name: str, value: object, what: str) -> None:
    """The next one after it could not be told to anybody, over every restart. It is put aside with the file, the rest
    is saved, and the note says what was wrong."""
    store = JournalStore(tmp_path)
    store.write([WriteEpoch(3), WriteAcceptance(submit("a"), (4,), "tenant"), tokens(4, 11)], NOW)
    store.begin_lineage()
    store.close()
    set_fact(tmp_path, name, value)
    store, (note,) = open_or_salvage(tmp_path, JournalLimits())
    assert f"{what} is" in note
    past = store.read_snapshot(LATER, retained_s=60.0)
    assert sequences(past.requests[0]) == [(4, 0, [11], None)]
    assert max(past.epoch, past.next_sequence, store.begin_lineage().generation) < MAX_COUNT
    assert past.next_sequence > 4
    assert past.epoch >= 3
    store.close()


def test_a_poisoned_sequence_begins_anew(tmp_path: Path) -> None:
    """Its number was one that a worker had told of; it gets another one."""
    store = JournalStore(tmp_path)
    store.write([WriteEpoch(3), WriteAcceptance(submit("a"), (2**63 - 2,), "tenant")], NOW)
    store.close()
    store, notes = open_or_salvage(tmp_path, JournalLimits())
    assert notes
    ((number, *_),) = sequences(store.read_snapshot(LATER, retained_s=60.0).requests[0])
    assert 0 < number < MAX_COUNT
    store.close()

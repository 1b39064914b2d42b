"""Tokens of the last steps in the journal: gathered, put to the rest, read in between."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm.broker.actions import NewTokens, WriteAcceptance, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.journal import token_buffer
from swarm.broker.journal.database import FILE
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.broker.journal.values import Part, decode, encode
from swarm.wire.messages import Hop, LayerRange, TokenLogprob
from tests.unit.broker.bench import submit

NOW = Timestamp(wall=1_000_000.0, tick=50.0, boot="this one")
SEQUENCES = (4, 5, 9)


def step(index: int) -> WriteTokens:
    """One token for each sequence."""
    return WriteTokens(tuple(NewTokens(each, 3 + index, index, (100 * each + index,)) for each in SEQUENCES))


def drawn(sequence: int, num: int) -> list[int]:
    return [100 * sequence + index for index in range(num)]


@pytest.fixture
def store(tmp_path: Path) -> JournalStore:
    store = JournalStore(tmp_path)
    store.write([WriteEpoch(7, ()), WriteAcceptance(submit("r", n=3), SEQUENCES, "")], NOW)
    return store


def counts(store: JournalStore) -> tuple[int, int]:
    """Rows of steps, rows of sequences."""
    with store.reading() as db:
        names = ("recent", "tokens")
        gathered, folded = (db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names)
    return gathered, folded


def known(store: JournalStore) -> list[list[int]]:
    record = store.read_request("r", NOW)
    assert record is not None
    return [sequence.tokens for sequence in record.sequences]


def test_a_row_for_each_step_and_in_the_end_one_for_each_sequence(store: JournalStore) -> None:
    """At any moment all is read that was written."""
    for index in range(2 * token_buffer.FLUSH_STEPS + 10):
        store.write([step(index)], NOW)
        folded, last = divmod(index, token_buffer.FLUSH_STEPS)
        assert counts(store) == (last + 1, folded * len(SEQUENCES))
        assert known(store) == [drawn(each, index + 1) for each in SEQUENCES]


def test_an_end_puts_all_where_it_belongs(store: JournalStore) -> None:
    """Its own tokens are one value then, those of the others stay open, and what comes too late for it is dropped."""
    for index in range(5):
        store.write([step(index)], NOW)
    assert store.write([WriteEnd(5, "stop", 3)], NOW) == set()
    assert counts(store) == (0, 2)
    store.write([step(5)], NOW)
    store.write([WriteEnd(4, "length", 6)], NOW)
    assert counts(store) == (0, 2)  # both of the one that is left
    assert known(store) == [drawn(4, 6), drawn(5, 3), drawn(9, 6)]


def cached(store: JournalStore) -> list[int]:
    record = store.read_request("r", NOW)
    assert record is not None
    return [sequence.num_cached for sequence in record.sequences]


def test_cached_tokens_of_the_prompt_are_kept_with_the_first_token(store: JournalStore) -> None:
    """Before rows are folded, in a row of the sequence, in the value of an ended one, also without any token."""
    store.write([WriteTokens(tuple(NewTokens(each, 3, 0, (100 * each,), num_cached=each) for each in SEQUENCES))], NOW)
    for index in range(1, token_buffer.FLUSH_STEPS + 3):
        assert cached(store) == list(SEQUENCES)
        store.write([step(index)], NOW)
    store.write([WriteEnd(4, "length", 60), WriteEnd(5, "stop", 0)], NOW)
    assert cached(store) == list(SEQUENCES)


def test_parts_of_an_earlier_version_have_no_cached_tokens() -> None:
    """They end before that number."""
    assert decode(encode(((1, 2), (), (), None)), Part) == Part((1, 2))


def test_one_end_is_all_a_sequence_gets(store: JournalStore) -> None:
    """A second one, with other figures, takes no token away."""
    for index in range(5):
        store.write([step(index)], NOW)
    store.write([WriteEnd(5, "stop", 3)], NOW)
    assert store.write([WriteEnd(5, "cancelled", 0)], NOW) == set()
    assert known(store) == [drawn(4, 5), drawn(5, 3), drawn(9, 5)]


def test_all_or_nothing_of_a_step_that_was_the_last_before_folding(store: JournalStore) -> None:
    """A transaction that fails takes its folding back, too."""
    for index in range(token_buffer.FLUSH_STEPS):
        store.write([step(index)], NOW)
    before = counts(store)
    with pytest.raises(Exception, match="UNIQUE"):
        store.write([step(token_buffer.FLUSH_STEPS), WriteAcceptance(submit("s"), (4,), "")], NOW)
    assert counts(store) == before
    assert known(store) == [drawn(each, token_buffer.FLUSH_STEPS) for each in SEQUENCES]


def test_another_connection_reads_it_as_well(store: JournalStore) -> None:
    """One that may not write."""
    for index in range(token_buffer.FLUSH_STEPS + 3):
        store.write([step(index)], NOW)
    reader = store.open_read_only()
    assert known(reader) == [drawn(each, token_buffer.FLUSH_STEPS + 3) for each in SEQUENCES]
    reader.close()


def test_missing_tokens_that_are_written_again(store: JournalStore) -> None:
    """All of them, over what there is of them: before a gap, behind it, in a row that is as long or shorter."""
    for index in (0, 1, 4, 5):
        store.write([step(index)], NOW)
    assert store.write([WriteEnd(4, "length", 6)], NOW) == {4}
    store.write([WriteTokens((NewTokens(4, 3, 0, tuple(drawn(4, 6))),))], NOW)
    assert known(store)[0] == drawn(4, 6)
    assert store.write([WriteEnd(4, "length", 6)], NOW) == set()
    assert known(store) == [drawn(4, 6), drawn(5, 2), drawn(9, 2)]


def test_a_longer_row_is_not_lost_to_a_shorter_one(store: JournalStore) -> None:
    """That begins at the same token."""
    store.write([WriteTokens((NewTokens(4, 3, 0, tuple(drawn(4, 6))),)), WriteEnd(9, "cancelled", 0)], NOW)
    store.write([step(0), WriteEnd(5, "cancelled", 0)], NOW)
    assert known(store)[0] == drawn(4, 6)


def test_more_tokens_count_and_not_more_bytes(store: JournalStore) -> None:
    """Small numbers take less room than large ones."""
    short = NewTokens(4, 3, 0, (30_000, 30_001))
    longer = NewTokens(4, 3, 0, (1, 2, 3))
    for new in (short, longer, short):
        store.write([WriteTokens((new,)), WriteEnd(9, "cancelled", 0)], NOW)
    with store.reading() as db:
        (blob,) = db.execute("SELECT part FROM tokens").fetchone()
    assert decode(blob, Part).ids == longer.ids


def test_what_stands_beside_tokens_is_kept(store: JournalStore) -> None:
    """Through folding and ends, bit for bit; a row of steps with much of it is not read token by token."""
    length = token_buffer.FLUSH_STEPS + 7
    beside = [tuple(TokenLogprob(token, -0.1 * index) for token in range(20)) for index in range(length)]
    hops = [(Hop("w0", LayerRange(0, 2), index / 7, 0.25, 0.0, 0.125, 17),) for index in range(length)]
    for index in range(length):
        new = NewTokens(4, 3 + index, index, (index,), (beside[index],), (hops[index],))
        store.write([WriteTokens((new,))], NOW)
    for write in (None, WriteEnd(4, "length", length - 2)):
        if write is not None:
            store.write([write], NOW)
        record = store.read_request("r", NOW)
        assert record is not None
        num = len(record.sequences[0].tokens)
        assert num == length - (0 if write is None else 2)
        assert record.sequences[0].logprobs == beside[:num]
        assert record.sequences[0].hops == hops[:num]


@pytest.mark.parametrize("claimed", [token_buffer.FLUSH_STEPS // 2, -3])
@pytest.mark.parametrize("is_old", [False, True])
def test_tokens_that_claim_another_place(tmp_path: Path, store: JournalStore, claimed: int, is_old: bool) -> None:
    """A row's index has no checksum: it is as if the row were missing. Those of older versions don't say their place
    themselves: there what begins where others are, and says otherwise, is passed over."""
    length = 2 * token_buffer.FLUSH_STEPS + 1  # the last one has the others put to the rest
    for index in range(length):
        store.write([step(index)], NOW)
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        if is_old:
            (blob,) = db.execute("SELECT part FROM tokens WHERE sequence = 4 AND first > 0").fetchone()
            old = encode(replace(decode(blob, Part), place=None))
            db.execute("UPDATE tokens SET part = ? WHERE sequence = 4 AND first > 0", (old,))
        db.execute("UPDATE tokens SET first = ? WHERE sequence = 4 AND first = ?", (claimed, token_buffer.FLUSH_STEPS))
    db.close()
    opened, _ = open_or_salvage(tmp_path, JournalLimits())
    assert known(opened) == [drawn(4, token_buffer.FLUSH_STEPS), *(drawn(each, length) for each in SEQUENCES[1:])]
    assert opened.write([WriteEnd(4, "length", length)], NOW) == {4}
    again = NewTokens(4, 3, 0, tuple(drawn(4, length)))
    assert opened.write([WriteTokens((again,)), WriteEnd(4, "length", length)], NOW) == set()
    assert known(opened)[0] == drawn(4, length)


def test_tokens_that_claim_to_be_another_sequences(tmp_path: Path, store: JournalStore) -> None:
    """Neither gets them."""
    for index in range(token_buffer.FLUSH_STEPS + 1):
        store.write([step(index)], NOW)
    store.write([WriteAcceptance(submit("other"), (12,), "")], NOW)
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE tokens SET sequence = 12 WHERE sequence = 4 AND first = 0")
    db.close()
    opened, _ = open_or_salvage(tmp_path, JournalLimits())
    assert known(opened)[0] == []
    other = opened.read_request("other", NOW)
    assert other is not None
    assert other.sequences[0].tokens == []


def test_a_damaged_row_costs_its_own_step(tmp_path: Path, store: JournalStore) -> None:
    """What follows is not read over the gap: it will be computed again, and everything before it is there."""
    for index in range(8):
        store.write([step(index)], NOW)
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE recent SET tokens = X'0011' WHERE number = 6")
    db.close()
    opened, notes = open_or_salvage(tmp_path, JournalLimits())
    assert notes == ()
    assert known(opened) == [drawn(each, 5) for each in SEQUENCES]
    assert opened.write([WriteEnd(4, "length", 8)], NOW) == {4}
    assert opened.write([WriteEnd(4, "length", 5)], NOW) == set()


def test_saved_from_a_damaged_journal(tmp_path: Path, store: JournalStore) -> None:
    """With the rest; and a number that only they tell of is not given out again."""
    for index in range(8):
        store.write([step(index)], NOW)
    store.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE facts SET value = X'0011' WHERE name = 'epoch'")
        for number in (1234, 1 << 60):  # the second can't be one
            db.execute("INSERT INTO recent (tokens) VALUES (?)", (encode(((number, 0, Part((7,))),)),))
    db.close()
    saved, (note,) = open_or_salvage(tmp_path, JournalLimits())
    assert "1 parts could not be read" in note
    assert known(saved) == [drawn(each, 8) for each in SEQUENCES]
    assert saved.read_snapshot(NOW, retained_s=60.0).next_sequence == 1235

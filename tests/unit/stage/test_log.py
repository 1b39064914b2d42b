"""The sender's log: what was sent, exactly, within its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarm.stage.log import SEGMENT, ActivationLog
from swarm.wire.messages import LogRange

WIDTH = 4
SEGMENT_BYTES = SEGMENT * WIDTH * 4


def numbers(start: int, stop: int, salt: int = 0) -> NDArray[np.float32]:
    """Rows that tell their position and who wrote them."""
    rows = np.arange(start, stop, dtype=np.float32)[:, None] + salt * 1000
    return np.repeat(rows, WIDTH, axis=1)


def log(segments: int = 100) -> ActivationLog:
    return ActivationLog(segments * SEGMENT_BYTES)


def ranges(of: ActivationLog) -> list[LogRange]:
    return list(of.ranges())


def test_reads_give_back_what_was_appended() -> None:
    """Over segment borders, in whatever pieces it came."""
    some = log()
    for start, stop in ((0, 5), (5, 40), (40, 41), (41, 130)):
        some.append(1, 3, start, numbers(start, stop))
    assert ranges(some) == [LogRange(1, 3, 0, 130)]
    for start, stop in ((0, 130), (31, 33), (64, 96), (129, 130)):
        found = some.read(1, 3, start, stop)
        assert found is not None
        np.testing.assert_array_equal(found, numbers(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (9, 21), (15, 15), (20, 40), (12, 10)])
def test_reads_of_what_is_not_all_there_are_none(start: int, stop: int) -> None:
    """Never a part of what was asked for."""
    some = log()
    some.append(1, 3, 0, numbers(0, 20))
    assert some.read(1, 3, start, stop) is None
    assert some.read(2, 3, 10, 20) is None
    assert some.read(1, 4, 10, 20) is None


def test_appending_again_replaces_from_there() -> None:
    """A position that is computed again, after a cut, has its new value, and what lay behind it is gone."""
    some = log()
    some.append(1, 3, 0, numbers(0, 50))
    some.append(1, 3, 20, numbers(20, 25, salt=1))
    assert ranges(some) == [LogRange(1, 3, 0, 25)]
    found = some.read(1, 3, 19, 25)
    assert found is not None
    np.testing.assert_array_equal(found, np.vstack([numbers(19, 20), numbers(20, 25, salt=1)]))


def test_an_entry_begins_at_the_beginning_or_not_at_all() -> None:
    """What can't be joined to position 0 is of no use: it isn't kept, and after a gap neither is what was there."""
    some = log()
    some.append(1, 3, 5, numbers(5, 10))
    assert (ranges(some), some.num_bytes) == ([], 0)
    some.append(1, 3, 0, numbers(0, 10))
    some.append(1, 3, 12, numbers(12, 20))
    assert (ranges(some), some.num_bytes) == ([], 0)
    some.append(1, 3, 20, numbers(20, 21))
    assert ranges(some) == []


def test_what_is_logged_is_a_copy() -> None:
    """The sender may overwrite its buffer."""
    some, buffer = log(), numbers(0, 3)
    some.append(1, 3, 0, buffer)
    buffer[:] = -1
    found = some.read(1, 3, 0, 3)
    assert found is not None
    np.testing.assert_array_equal(found, numbers(0, 3))


def test_positions_from_a_cut_on_are_gone() -> None:
    """Positions from there on go, at every boundary of that sequence, and their memory with them."""
    some = log()
    some.append(1, 3, 0, numbers(0, 100))
    some.append(1, 5, 0, numbers(0, 40))
    some.append(2, 3, 0, numbers(0, 100))
    some.truncate(1, 50)
    assert ranges(some) == [LogRange(1, 3, 0, 50), LogRange(1, 5, 0, 40), LogRange(2, 3, 0, 100)]
    some.truncate(1, 30)
    assert ranges(some) == [LogRange(1, 3, 0, 30), LogRange(1, 5, 0, 30), LogRange(2, 3, 0, 100)]
    assert some.num_bytes == (1 + 1 + 4) * SEGMENT_BYTES
    # Beyond the end, and of nobody: nothing happens.
    some.truncate(1, 80)
    some.truncate(9, 0)
    assert ranges(some)[0] == LogRange(1, 3, 0, 30)
    some.truncate(1, 0)
    assert ranges(some) == [LogRange(2, 3, 0, 100)]


def test_release_and_clear() -> None:
    """Everything of a sequence goes; then everything."""
    some = log()
    for sequence, boundary in ((1, 3), (1, 5), (2, 3)):
        some.append(sequence, boundary, 0, numbers(0, 10))
    some.release(1)
    some.release(7)
    assert ranges(some) == [LogRange(2, 3, 0, 10)]
    some.clear()
    assert (ranges(some), some.num_bytes) == ([], 0)


def test_eviction_takes_whole_sequences_least_recently_extended_first() -> None:
    """A log without its beginning rebuilds nothing, so none is cut short."""
    some = log(segments=3)
    for sequence in (1, 2, 3):
        some.append(sequence, 3, 0, numbers(0, 20))
    some.append(1, 3, 20, numbers(20, 25))  # 1 is the most recent now
    some.append(4, 3, 0, numbers(0, 20))
    assert {r.sequence for r in some.ranges()} == {1, 3, 4}
    assert some.num_evicted == 1


def test_one_that_is_too_large_alone_goes_for_good() -> None:
    """It can't be kept whole, so it isn't kept: not in the middle either, however it goes on. Begun anew, it is."""
    some = log(segments=2)
    some.append(1, 3, 0, numbers(0, 60))
    some.append(1, 3, 60, numbers(60, 70))
    assert (ranges(some), some.num_bytes, some.num_evicted) == ([], 0, 1)
    some.append(1, 3, 70, numbers(70, 71))
    some.truncate(1, 40)
    some.append(1, 3, 40, numbers(40, 41))
    assert (ranges(some), some.num_evicted) == ([], 1)
    some.truncate(1, 0)
    some.append(1, 3, 0, numbers(0, 10))
    assert ranges(some) == [LogRange(1, 3, 0, 10)]


def test_an_expected_entry_begins_anywhere() -> None:
    """With the first positions that are computed; if they are cut away, with the next ones. It shares segments like any
    other."""
    some = log()
    some.append(1, 5, 0, numbers(0, 70))
    for boundary in (3, 5):
        some.expect(1, boundary)
    assert ranges(some) == [LogRange(1, 5, 0, 70)]
    for start, stop in ((40, 64), (64, 65), (65, 100)):
        some.append(1, 3, start, numbers(start, stop))
    assert ranges(some) == [LogRange(1, 5, 0, 70), LogRange(1, 3, 40, 100)]
    assert some.num_bytes == (3 + 3) * SEGMENT_BYTES
    np.testing.assert_array_equal(some.read(1, 3, 50, 99), numbers(50, 99))
    assert some.read(1, 3, 39, 50) is None
    some.fork(2, 1, 70)
    some.release(1)
    assert ranges(some) == [LogRange(2, 5, 0, 70), LogRange(2, 3, 40, 70)]
    np.testing.assert_array_equal(some.read(2, 3, 40, 70), numbers(40, 70))
    some.append(2, 3, 40, numbers(40, 50, salt=1))
    assert ranges(some)[1] == LogRange(2, 3, 40, 50)
    some.append(2, 3, 10, numbers(10, 20))
    assert ranges(some)[1] == LogRange(2, 3, 10, 20)
    some.truncate(2, 5)
    some.append(2, 3, 7, numbers(7, 9))
    assert ranges(some)[1] == LogRange(2, 3, 7, 9)
    some.append(2, 3, 12, numbers(12, 20))  # a gap ends it, as any other
    assert ranges(some) == [LogRange(2, 5, 0, 5)]


@pytest.mark.parametrize("position", [32, 40, 64, 70])
def test_a_fork_shares_what_it_begins_with(position: int) -> None:
    """At no cost; then both go on, and neither sees what the other writes, nor loses anything with the other's end."""
    some = log()
    some.append(1, 3, 0, numbers(0, 70))
    before = some.num_bytes
    some.fork(2, 1, position)
    assert some.num_bytes == before
    assert ranges(some) == [LogRange(1, 3, 0, 70), LogRange(2, 3, 0, position)]
    some.append(2, 3, position, numbers(position, 100, salt=2))
    some.append(1, 3, 70, numbers(70, 90, salt=1))
    some.release(1)
    found = some.read(2, 3, 0, 100)
    assert found is not None
    np.testing.assert_array_equal(found, np.vstack([numbers(0, position), numbers(position, 100, salt=2)]))
    some.release(2)
    assert some.num_bytes == 0


def test_a_fork_keeps_nothing_of_its_own() -> None:
    """Its number may have had a log before: of other tokens, and at boundaries that the source has none at."""
    some = log()
    some.append(1, 3, 0, numbers(0, 40))
    some.append(2, 3, 0, numbers(0, 70, salt=2))
    some.append(2, 5, 0, numbers(0, 70, salt=2))
    some.fork(2, 1, 40)
    assert ranges(some) == [LogRange(1, 3, 0, 40), LogRange(2, 3, 0, 40)]
    np.testing.assert_array_equal(some.read(2, 3, 0, 40), numbers(0, 40))
    some.fork(1, 9, 40)
    assert ranges(some) == [LogRange(2, 3, 0, 40)]


def test_a_fork_of_what_is_not_there_is_given_up() -> None:
    """Its beginning is nowhere: what follows it is not kept."""
    some = log()
    some.append(1, 3, 0, numbers(0, 20))
    some.fork(2, 1, 32)
    some.fork(3, 9, 32)
    some.append(2, 3, 32, numbers(32, 40))
    some.append(3, 3, 32, numbers(32, 40))
    assert ranges(some) == [LogRange(1, 3, 0, 20)]


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "append", "append", "append", "truncate", "release", "expect", "fork"]),
        st.integers(1, 3),  # sequence
        st.sampled_from([3, 5]),  # boundary
        st.integers(0, 70),  # where
        st.integers(1, 70),  # how many
    ),
    max_size=40,
)


@pytest.mark.slow
@given(_OPERATIONS, st.integers(1, 12))
def test_any_use_keeps_the_bound_and_the_truth(operations: list[tuple[str, int, int, int, int]], segments: int) -> None:
    """Never over its bytes, which are those of its segments; whatever it still has is the newest that was given."""
    some, truth = log(segments), {}
    for salt, (what, sequence, boundary, where, count) in enumerate(operations):
        if what in ("begin", "append"):
            start = 0 if what == "begin" else where
            rows = numbers(start, start + count, salt)
            some.append(sequence, boundary, start, rows)
            truth |= {(sequence, boundary, start + i): row for i, row in enumerate(rows)}
        elif what == "truncate":
            some.truncate(sequence, where)
        elif what == "expect":
            some.expect(sequence, boundary)
        elif what == "fork":
            some.fork(sequence, source := sequence % 3 + 1, where)
            forked = {key: row for key, row in truth.items() if key[0] == source}
            truth |= {(sequence, boundary, position): row for (_, boundary, position), row in forked.items()}
        else:
            some.release(sequence)
        assert some.num_bytes <= segments * SEGMENT_BYTES
        held = ranges(some)
        needed = sum(-(-r.stop // SEGMENT) - r.start // SEGMENT for r in held) * SEGMENT_BYTES
        has_forks = any(each[0] == "fork" for each in operations[: salt + 1])  # they share segments
        assert some.num_bytes == needed or (has_forks and some.num_bytes < needed)
        for r in held:
            assert r.start == 0 or any(each[0] == "expect" for each in operations[:salt])
            found = some.read(r.sequence, r.boundary, r.start, r.stop)
            assert found is not None
            for offset, row in enumerate(found):
                np.testing.assert_array_equal(row, truth[r.sequence, r.boundary, r.start + offset])

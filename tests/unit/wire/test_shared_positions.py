"""The account of shared positions: a chunk counts once for all sequences that hold it, whoever begins or ends first."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.wire.shared_positions import MAX_RUNS, Departures, SharedPositions

UNIT = 64


@dataclass
class Reference:
    """Every position of every sequence by name: positions of one name are in memory once."""

    held: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # sequence -> (computed by, position)
    shared: dict[int, int] = field(default_factory=dict)  # sequence -> positions that it may share
    depth: dict[int, int] = field(default_factory=dict)  # sequence -> forks behind it that shared something new

    def open(self, sequence: int, length: int) -> None:
        self.held[sequence] = [(sequence, position) for position in range(length)]
        self.shared[sequence] = 0
        self.depth[sequence] = 0

    def fork(self, sequence: int, source: int, position: int, length: int) -> None:
        stop = position // UNIT * UNIT
        if self.depth[source] == MAX_RUNS:
            stop = min(stop, self.shared[source])
        own = [(sequence, at) for at in range(stop, length)]
        self.held[sequence] = self.held[source][:stop] + own
        self.shared[sequence] = stop
        self.depth[sequence] = len({name for name, _ in self.held[sequence][:stop]})

    def count(self) -> int:
        return len({name for names in self.held.values() for name in names})


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "fork", "fork", "fork", "retire", "release"]),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 640),
    ),
    max_size=40,
)


@given(MOVES)
def test_positions_are_counted_as_a_list_of_all_of_them_has_it(
    moves: list[tuple[str, int, int, int]],
) -> None:
    account, reference = SharedPositions(UNIT), Reference()
    retired: set[int] = set()
    for number, (move, name, other, position) in enumerate(moves):
        sequence = 10 * number + 6
        sources = sorted(reference.held)
        source = sources[other % len(sources)] if sources else None
        if move == "open":
            reference.open(sequence, position)
        elif move == "fork" and source is not None:
            stop = min(position, len(reference.held[source]))
            expected = account.num_mappings + account.fork_mappings(source, stop)
            reference.fork(sequence, source, stop, stop + name)
            assert account.fork_stop(source, stop) == account.fork(sequence, source, stop)
            assert account.stop(sequence) == reference.shared[sequence]
            assert account.num_mappings == expected
        elif move == "retire" and source is not None and source not in retired:
            account.retire(source)
            retired.add(source)
        elif move == "release" and source is not None:
            retired.discard(source)
            before = reference.count()
            length = len(reference.held.pop(source))
            forecast = Departures(account).add(source)
            assert forecast == account.release(source) == length - (before - reference.count())
        lengths = sum(map(len, reference.held.values()))
        assert lengths - account.saved == reference.count()
        _check_runs(account, reference)
        assert _total_after_departures(account, reference) == 0
        assert account.retired_kept == sum(map(Departures(account).add, retired))
        _check_forecast(account, retired, list(reference.held), number)
    for sequence in list(reference.held):
        account.release(sequence)
    assert (account.saved, account.num_mappings, account.retired_kept) == (0, 0, 0)


def _check_forecast(account: SharedPositions, retired: set[int], held: list[int], number: int) -> None:
    """The retired ones depart, but for some; then others, one by one: as if each had been added by itself."""
    staying = {sequence for place, sequence in enumerate(sorted(retired)) if (place + number) % 3 == 0}
    departures, walked = Departures(account), Departures(account)
    assert departures.add_retired(staying) == sum(map(walked.add, retired - staying))
    for sequence in held:
        if sequence not in retired or sequence in staying:
            assert departures.add(sequence) == walked.add(sequence)


def _check_runs(account: SharedPositions, reference: Reference) -> None:
    """Runs follow each other without gaps, and are the positions of one sequence each."""
    for sequence, names in reference.held.items():
        at = 0
        for run, stop in account.runs(sequence):
            assert run.start == at < stop <= run.stop
            assert len({name for name, _ in names[at:stop]}) == 1
            at = stop
        assert at == account.stop(sequence) <= len(names)
        assert len(account.runs(sequence)) <= MAX_RUNS


def _total_after_departures(account: SharedPositions, reference: Reference) -> int:
    """What stays in use if everything departs."""
    departures = Departures(account)
    freed = sum(len(names) - departures.add(sequence) for sequence, names in reference.held.items())
    return reference.count() - freed


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_prefix_is_free_when_its_last_holder_is(order: tuple[int, ...]) -> None:
    account = SharedPositions(UNIT)
    for sequence in (1, 2, 3):
        assert account.fork(sequence, 0, 200) == 192
    assert account.saved == 3 * 192
    kept = [account.release(sequence) for sequence in order]
    assert kept == [192, 192, 192, 0]
    assert account.saved == 0


@pytest.mark.parametrize("order", list(permutations([(1, 100), (2, 300), (3, 200)])))
def test_the_order_of_forks_changes_nothing(order: tuple[tuple[int, int], ...]) -> None:
    """A broker admits sequences in another order than stages open them."""
    account = SharedPositions(UNIT)
    for sequence, position in order:
        account.fork(sequence, 0, position)
    assert [account.stop(sequence) for sequence in range(4)] == [256, 64, 256, 192]
    assert (account.saved, account.num_mappings) == (64 + 256 + 192, 8)


def test_a_long_conversation_shares_its_first_turns() -> None:
    account = SharedPositions(UNIT)
    for turn in range(1, 12):
        account.fork(turn, turn - 1, UNIT * turn)
    assert [account.stop(turn) for turn in range(12)] == [UNIT * min(turn + 1, MAX_RUNS) for turn in range(12)]


def test_without_a_unit_nothing_is_shared() -> None:
    account = SharedPositions()
    assert (account.fork(1, 0, 1000), account.fork_mappings(0, 1000), account.stop(1)) == (0, 0, 0)
    assert account.saved == 0


def test_an_account_that_is_cleared_counts_every_position() -> None:
    account = SharedPositions(UNIT)
    account.fork(1, 0, 128)
    account.clear(2 * UNIT)
    assert (account.saved, account.num_mappings, account.stop(0), account.stop(1)) == (0, 0, 0, 0)
    assert account.release(1) == 0
    assert account.fork(2, 1, 128 + UNIT) == 128

"""Sets of bytes of a file."""

from __future__ import annotations

import random

import pytest

from swarm.hub.ranges import MAX_GAP_BYTES, Ranges, plan_fetch


def random_ranges(chance: random.Random) -> Ranges:
    firsts = [chance.randrange(60) for _ in range(chance.randrange(6))]
    return Ranges.of((first, first + chance.randrange(9)) for first in firsts)


def bytes_in(ranges: Ranges) -> set[int]:
    return {position for first, stop in ranges.pairs for position in range(first, stop)}


@pytest.mark.parametrize("seed", range(50))
def test_ranges_are_sets_of_positions(seed: int) -> None:
    chance = random.Random(seed)
    one, two = random_ranges(chance), random_ranges(chance)
    assert bytes_in(one | two) == bytes_in(one) | bytes_in(two)
    assert bytes_in(one - two) == bytes_in(one) - bytes_in(two)
    assert bytes_in(one & two) == bytes_in(one) & bytes_in(two)
    assert one.num_bytes == len(bytes_in(one))
    for result in (one | two, one - two, one & two):
        assert all(first < stop for first, stop in result.pairs)
        assert all(stop < first for (_, stop), (first, _) in zip(result.pairs, result.pairs[1:], strict=False))


def test_no_range_starts_before_the_file() -> None:
    with pytest.raises(ValueError, match="starts at -1"):
        Ranges.of([(-1, 5)])


def test_the_first_bytes_are_of_the_first_range() -> None:
    ranges = Ranges.of([(10, 20), (30, 40)])
    assert ranges.first_bytes(4) == Ranges.of([(10, 14)])
    assert ranges.first_bytes(40) == Ranges.of([(10, 20)])
    assert Ranges().first_bytes(4) == Ranges()


BIG = 10 * MAX_GAP_BYTES


def test_what_is_present_is_not_fetched() -> None:
    wanted = Ranges.of([(0, BIG), (2 * BIG, 3 * BIG)])
    assert plan_fetch(wanted, Ranges.of([(0, BIG)]), 9 * BIG) == Ranges.of([(2 * BIG, 3 * BIG)])
    assert plan_fetch(wanted, wanted, 9 * BIG) == Ranges()


def test_small_gaps_beside_fetched_ranges_are_fetched_and_large_ones_are_not() -> None:
    gap = MAX_GAP_BYTES
    present, size = Ranges.of([(0, BIG)]), 4 * BIG
    wanted = Ranges.of([(BIG + gap, 2 * BIG), (2 * BIG + gap, 3 * BIG), (3 * BIG + gap + 1, size - 5)])
    assert plan_fetch(wanted, present, size) == Ranges.of([(BIG, 3 * BIG), (3 * BIG + gap + 1, size)])


def test_a_small_gap_elsewhere_is_left() -> None:
    present = Ranges.of([(0, 100), (200, BIG)])
    assert plan_fetch(Ranges.of([(3 * BIG, 4 * BIG)]), present, 9 * BIG) == Ranges.of([(3 * BIG, 4 * BIG)])


def test_nothing_behind_the_end_of_the_file_is_fetched() -> None:
    assert plan_fetch(Ranges.of([(0, 100)]), Ranges(), 50) == Ranges.of([(0, 50)])

"""Digests tell how many tokens two lists have in common, from their beginning, and never more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.testing_images import fake_image
from swarm.wire.digests import num_matching, prefix_digests

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)


@given(TOKENS, st.integers(0, 100))
def test_the_same_tokens_match_as_a_whole(tokens: list[int], more: int) -> None:
    """However many the other side knows beside them."""
    position = len(tokens)
    assert num_matching(tokens + [5] * more, position, prefix_digests(tokens, position)) == position


@given(TOKENS, TOKENS)
def test_never_more_than_what_is_the_same(ours: list[int], theirs: list[int]) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    assert num_matching(ours, len(theirs), prefix_digests(theirs, len(theirs))) <= common


@given(TOKENS, st.integers(0, 80))
def test_what_can_not_be_compared_is_less_than_what_is_missing(tokens: list[int], num_known: int) -> None:
    """One side lacks the last tokens: at most as many again count for nothing, less one."""
    known = tokens[:num_known]
    missing = len(tokens) - len(known)
    matching = num_matching(known, len(tokens), prefix_digests(tokens, len(tokens)))
    assert matching == len(known) if not missing else matching >= len(known) - (missing - 1)


def test_tokens_of_another_adapter_do_not_match() -> None:
    reported = prefix_digests([1, 2, 3], 3, "red")
    assert num_matching([1, 2, 3], 3, reported, "red") == 3
    assert num_matching([1, 2, 3], 3, reported) == num_matching([1, 2, 3], 3, reported, "blue") == 0


def test_tokens_of_another_image_do_not_match() -> None:
    """Those before it do, as far as digests end there."""
    tokens, images = list(range(40)), [fake_image(16, 4, 5, colour)[0] for colour in (1, 2)]
    reported = prefix_digests(tokens, 40, "", images[:1])
    assert num_matching(tokens, 40, reported, "", images[:1]) == 40
    assert 0 < num_matching(tokens, 40, reported, "", images[1:]) <= 16


def test_they_are_few() -> None:
    """A million tokens: twenty-one of them."""
    tokens = list(range(1 << 20))
    assert len(prefix_digests(tokens, len(tokens))) == 21


def test_digests_of_another_number_prove_nothing() -> None:
    """Whoever made them told something else than the position says."""
    assert num_matching([1, 2, 3, 4], 4, prefix_digests([1, 2, 3, 4], 2)) == 0
    assert num_matching([1, 2], 0, ()) == 0

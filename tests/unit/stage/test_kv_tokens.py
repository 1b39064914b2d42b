"""Tokens of copies are compared with those of orders and parts."""

from __future__ import annotations

from swarm.stage.kv_copies import count_equal


def test_equal_tokens_are_equal_in_a_list_and_in_a_tuple() -> None:
    """Histories are lists, the tokens of messages are tuples (simulated seed 61)."""
    assert count_equal([1, 2, 3], (1, 2, 3)) == 3
    assert count_equal((1, 2), [1, 2, 3]) == 2
    assert count_equal([1, 2, 3], (1, 9, 3)) == 1
    assert count_equal([], ()) == 0

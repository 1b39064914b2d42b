"""Which draws of a row with proposals are reached, and what they yield."""

from __future__ import annotations

import pytest

from swarm.params import Grammar, SamplingParams
from swarm.stage.engine.sampling import SampledToken
from swarm.stage.engine.verification import Verification
from swarm.stage.executor import SampleJob

HISTORY = (5, 6, 7, 11, 12, 13)  # three certain tokens, three proposals


def verification(**params: object) -> Verification:
    return Verification(SampleJob(0, SamplingParams(**params), 1, HISTORY, 2, 3), 9, 4, (0,))  # type: ignore[arg-type]


def add(verification: Verification, *tokens: int) -> None:
    for token in tokens:
        verification.add(SampledToken(token, ()))


@pytest.mark.parametrize(
    ("drawn", "num_accepted"), [((10,), 0), ((11, 10), 1), ((11, 12, 10), 2), ((11, 12, 13, 10), 3)]
)
def test_the_first_draw_that_differs_closes_it(drawn: tuple[int, ...], num_accepted: int) -> None:
    row = verification()
    add(row, *drawn[:-1])
    assert not row.is_closed
    add(row, drawn[-1])
    assert (row.is_closed, row.num_accepted) == (True, num_accepted)
    assert list(row.next_draws()) == []


def test_no_draw_behind_an_accepted_end_is_reached() -> None:
    row = verification(stop_token_ids=(12,))
    add(row, 11)
    assert not row.is_closed
    add(row, 12)
    assert (row.is_closed, row.num_accepted) == (True, 1)


def test_each_draw_sees_the_tokens_before_it_only() -> None:
    """And its own row of logits."""
    draws = list(verification().next_draws())
    assert [(draw.row, tuple(draw.job.history), draw.job.num_proposed) for draw in draws] == [
        (4 + number, HISTORY[: 3 + number], 0) for number in range(4)
    ]


def test_a_grammar_is_read_draw_by_draw() -> None:
    """Its mask depends on the tokens that were accepted."""
    row = verification(grammar=Grammar("json_object"))
    assert [draw.row for draw in row.next_draws()] == [4]
    add(row, 11)
    assert [draw.row for draw in row.next_draws()] == [5]


def test_a_failure_behind_accepted_tokens_keeps_them() -> None:
    row = verification()
    add(row, 11, 12)
    row.fail("logits are not finite")
    assert (row.is_closed, row.num_accepted, len(row.tokens)) == (True, 2, 2)

"""How long steps pause while layers are rebuilt, against a search for the best pause."""

from __future__ import annotations

import itertools

import pytest

from swarm.broker.planner.pauses import MAX_PAUSE_S, predict_steps_s, resumes_at_once, step_pause_s

STEP_S = 0.01
CASES = tuple(itertools.product((1, 4, 19), (1, 4, 19), (0.02, 0.3)))


def summed_squares(pause_s: float, num_complete: int, num_waiting: int, alone_s: float, waited_s: float) -> float:
    """Squares of the gaps of all sequences while replays that take ``alone_s`` run with this pause between steps;
    the waiting ones had waited before."""
    stretch = 1 + STEP_S / pause_s
    num_steps = alone_s * stretch / (STEP_S + pause_s)
    return num_complete * num_steps * (STEP_S + pause_s) ** 2 + num_waiting * (waited_s + alone_s * stretch) ** 2


@pytest.mark.parametrize(("num_complete", "num_waiting", "alone_s"), CASES)
def test_no_other_pause_has_shorter_waits(num_complete: int, num_waiting: int, alone_s: float) -> None:
    waited_s = 0.2

    def cost(pause_s: float) -> float:
        return summed_squares(pause_s, num_complete, num_waiting, alone_s, waited_s)

    pause_s = STEP_S
    for _ in range(50):  # the rule needs the wait that results from it
        wait_s = waited_s + alone_s * (1 + STEP_S / pause_s)
        pause_s = step_pause_s(STEP_S, num_complete, num_waiting, wait_s)
    assert cost(pause_s) <= min(cost(pause_s * factor) for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0))


def test_the_more_sequences_wait_the_longer_is_the_pause() -> None:
    pauses = [step_pause_s(STEP_S, 20 - waiting, waiting, 0.5) for waiting in range(1, 20)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 5 * pauses[0]


def test_replays_get_half_of_the_time_at_least_and_a_pause_is_bounded() -> None:
    assert step_pause_s(STEP_S, 100, 1, 0.0) == pytest.approx(STEP_S)
    assert step_pause_s(STEP_S, 0, 0, 5.0) == 0.0
    assert step_pause_s(0.2, 1, 50, 60.0) == MAX_PAUSE_S


def test_a_forecast_counts_the_steps_beside_replays() -> None:
    """None beside the first sequence. Sequences that become complete have a step, and pauses are between others."""
    assert predict_steps_s(STEP_S, 1, 0.0, 1.0) == 0.0
    assert predict_steps_s(STEP_S, 4, 0.1, 1.0) == pytest.approx(3 * STEP_S)
    pauses = [step_pause_s(STEP_S, n, 4 - n, 1.0) for n in (1, 2, 3)]
    assert predict_steps_s(STEP_S, 4, 3.0, 1.0) == pytest.approx(sum(STEP_S / pause_s for pause_s in pauses))
    assert predict_steps_s(0.0, 4, 3.0, 1.0) == 0.0


def test_short_rebuilds_share_steps() -> None:
    """A step for each sequence would delay all that wait by more than it gains."""
    assert not resumes_at_once(1, 2 * STEP_S, STEP_S, 7)
    assert resumes_at_once(4, 2 * STEP_S, STEP_S, 7)
    assert resumes_at_once(1, 2 * STEP_S, STEP_S, 2)
    assert predict_steps_s(STEP_S, 32, 0.1, 0.3) < 16 * STEP_S

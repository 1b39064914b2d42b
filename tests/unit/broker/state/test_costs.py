"""What is learnt from steps: budgets that keep a target, rates, and when to come back."""

from __future__ import annotations

import pytest

from swarm.broker.state.costs import CHUNK, FORGET_AFTER_STEPS, StepCosts
from swarm.broker.state.queue import MAX_RETRY_TIMES, RequestTimers, RetryAfter


def fed(costs: StepCosts, tokens: int, seconds: float, times: int = 1, now: float = 0.0) -> float:
    """Steps of one size, one after the other; when the last of them ended."""
    for _ in range(times):
        costs.record_step(tokens, now, now + seconds)
        now += seconds
    return now


def test_without_a_target_or_a_measure_nothing_is_held_back() -> None:
    """0 turns it off; before the first step there is nothing to go by."""
    costs = StepCosts()
    assert costs.budget(0.1, 512) == 512
    fed(costs, 512, 9.0)
    assert costs.budget(0.0, 512) == 512


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.02, 0.001), (0.0, 0.002), (0.09, 0.0001), (0.001, 0.01)])
def test_the_budget_finds_its_target(fixed_s: float, token_s: float) -> None:
    """Steps as large as the budget says come to last about as long as they may, from below, whatever a step costs."""
    costs, target_s = StepCosts(), 0.1
    right = int((target_s - fixed_s) / token_s)
    fed(costs, 4, fixed_s + 4 * token_s)
    for _ in range(200):
        budget = costs.budget(target_s, 4096)
        assert CHUNK <= budget <= max(CHUNK, 1.05 * right)
        fed(costs, budget, fixed_s + budget * token_s)
    assert costs.budget(target_s, 4096) >= min(4096, max(CHUNK, 0.8 * right))


def test_never_below_a_chunk_nor_above_the_most() -> None:
    """A device that is too slow for the target computes in chunks; a fast one takes what the settings allow."""
    costs = StepCosts()
    fed(costs, 64, 50.0)
    assert costs.budget(0.01, 512) == CHUNK
    assert costs.budget(0.01, 8) == 8
    fed(costs, 64, 1e-6, times=100)
    assert costs.budget(0.01, 512) == 512


def test_a_bad_day_is_forgotten() -> None:
    """A size that was slow once is tried again after a while."""
    costs = StepCosts()
    now = fed(costs, 256, 1.0)
    now = fed(costs, 64, 0.01, now=now)
    assert costs.budget(0.05, 512) < 128
    fed(costs, 64, 0.01, times=FORGET_AFTER_STEPS, now=now)
    assert costs.budget(0.05, 512) > 256


def test_the_rate_is_of_the_time_at_work() -> None:
    """Pauses between steps don't count; steps that overlap don't count twice."""
    costs = StepCosts()
    assert costs.tokens_per_s is None
    for start in range(0, 1000, 10):
        costs.record_step(20, start, start + 2.0)
    assert costs.tokens_per_s == pytest.approx(10.0)
    overlapping = StepCosts()
    for start in range(100):
        overlapping.record_step(20, start, start + 2.0)
    assert overlapping.tokens_per_s == pytest.approx(20.0, rel=0.05)


def test_the_quickest_step_is_of_late() -> None:
    """One lucky step is not believed for ever."""
    costs = StepCosts()
    now = fed(costs, 1, 0.001)
    assert costs.min_step_s == 0.001
    fed(costs, 1, 0.1, times=1000, now=now)
    assert costs.min_step_s == pytest.approx(0.1)


def test_answers_come_to_a_part_of_what_they_may() -> None:
    """Until one has ended, all of it is reckoned with."""
    costs = StepCosts()
    assert costs.fill_ratio == 1.0
    for _ in range(50):
        costs.record_sequence(10, 100)
    assert costs.fill_ratio == pytest.approx(0.1)


def test_who_is_turned_away_gets_a_time_of_its_own() -> None:
    """Not all come back for the same place; who has come back is forgotten."""
    away = RetryAfter()
    assert [away.schedule(client, 1, 2.0, 90.0, 10.0) for client in (b"a", b"b", b"c")] == [2.0, 4.0, 6.0]
    assert away.schedule(b"d", 2, 2.0, 90.0, 12.0) == 8.0
    assert away.schedule(b"e", 1, 2.0, 90.0, 100.0) == 2.0
    assert away.times.keys() == {b"e"}


def test_who_is_turned_away_again_keeps_its_time() -> None:
    """Asking often moves nobody's time, not even one's own; but no time is nearer than a place can be free."""
    away = RetryAfter()
    away.schedule(b"a", 1, 2.0, 90.0, 10.0)
    assert [away.schedule(b"b", 1, 2.0, 90.0, 10.0 + 0.5 * number) for number in range(5)] == [4.0, 3.5, 3.0, 2.5, 2.0]
    assert away.schedule(b"c", 1, 2.0, 90.0, 12.0) == 4.0
    away.forget(b"c")
    assert away.schedule(b"d", 1, 2.0, 90.0, 12.0) == 4.0


def test_times_of_those_turned_away_are_bounded() -> None:
    """In number, and by the time in which the queue drains, also when that turns out to be shorter."""
    away = RetryAfter()
    told = [away.schedule(b"%d" % number, 1, 2.0, 20.0, 10.0) for number in range(2 * MAX_RETRY_TIMES)]
    assert (told[8], max(told), len(away.times)) == (18.0, 20.0, MAX_RETRY_TIMES)
    assert away.schedule(b"20", 1, 0.2, 2.0, 10.0) == 2.0


def test_timers_give_what_is_due() -> None:
    """In order of time, each once."""
    timers = RequestTimers()
    for at, name in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        timers.add(at, name)
    assert list(timers.pop_due(0.5)) == []
    assert list(timers.pop_due(2.0)) == ["a", "b"]
    assert list(timers.pop_due(9.0)) == ["c"]


def test_the_speed_of_prompts_is_that_of_the_best_large_steps() -> None:
    """Decodes tell nothing about it."""
    costs = StepCosts()
    costs.record_step(1, 0.0, 0.01)
    assert costs.prompt_tokens_per_s is None
    costs.record_step(64, 1.0, 1.64)
    costs.record_step(256, 2.0, 3.0)
    assert costs.prompt_tokens_per_s == pytest.approx(256.0)

"""Moments at which requests are looked at: none is missed, and those of requests that are gone take no room."""

from __future__ import annotations

import random

import pytest

from swarm.broker.state.ended_requests import MAX_ENDED
from swarm.broker.state.queue import MIN_TIMERS, RequestTimers
from swarm.wire.messages import Cancel
from tests.unit.broker.bench import TICK_S, Bench, submit

DAY_S = 86_400.0


def test_deadlines_of_requests_that_are_gone_take_no_room() -> None:
    """However far away they are: a hundred thousand requests come and go within minutes, each with a day of time."""
    timers, most = RequestTimers(), 0
    for number in range(100_000):
        timers.add(DAY_S + number, f"r{number}")
        timers.drop_stale({f"r{number}"})
        most = max(most, len(timers))
    assert most <= MIN_TIMERS + 1
    assert list(timers.pop_due(3 * DAY_S))[-1] == "r99999"


def test_no_living_timer_is_lost() -> None:
    """Those that are left come in their order, with everything that came late forgiven."""
    chance, timers = random.Random(5), RequestTimers()
    alive: dict[str, float] = {}
    for number in range(20_000):
        at = chance.uniform(0.0, DAY_S)
        timers.add(at, f"r{number}")
        if number % 7 == 0:
            alive[f"r{number}"] = at
        if number % 100 == 0:
            timers.drop_stale(alive)
        assert len(timers) <= max(MIN_TIMERS, 2 * len(alive)) + 100
    timers.shift_deadlines(1.0)
    timers.drop_stale(alive)
    expected = sorted(alive, key=alive.__getitem__)
    assert [request_id for request_id in timers.pop_due(DAY_S + 1.0) if request_id in alive] == expected
    assert not timers


def test_looking_costs_little() -> None:
    """As many that live as there are: they are not looked through at every tick."""
    looks = 0

    class Alive:
        def __contains__(self, _: object) -> bool:
            nonlocal looks
            looks += 1
            return True

    timers = RequestTimers()
    for number in range(50_000):
        timers.add(DAY_S, f"r{number}")
        timers.drop_stale(Alive())
    assert looks < 2 * 50_000


@pytest.mark.slow
def test_the_broker_forgets_the_deadlines_of_what_has_ended(serving: Bench) -> None:
    """One request that lives through it all ends at its own deadline, neither earlier nor later."""
    serving.say(submit("lives", deadline_s=20.0, ignore_eos=True, max_tokens=64))
    due_at = serving.now + 20.0
    for number in range(4 * MAX_ENDED):
        serving.say(submit(f"r{number}", deadline_s=DAY_S))
        serving.say(Cancel(request_id=f"r{number}"))
        if number % 256 == 0:
            serving.tick()
    assert len(serving.state.requests) <= MAX_ENDED + 1
    assert len(serving.state.timers) <= 2 * 2 * MAX_ENDED + 2 * 256  # of each: its deadline, and its rest
    serving.tick(due_at - serving.now - TICK_S)
    assert serving.sequence("lives").reason is None
    serving.tick(2 * TICK_S)
    assert serving.sequence("lives").reason == "failed"
    assert "deadline" in serving.sequence("lives").detail

"""What objective auto goes by: when the swarm is quiet, when it is busy, and that it does not turn to and fro."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.broker.planning.demand import BUSY_S, LONG_FACTOR, MAX_PATIENCE_S, QUIET_SEQUENCES, Demand

QUIET_S = 60.0
BUSY_FROM = 4


def feed(demand: Demand, num_sequences: int, at_s: float) -> bool:
    return demand.update(num_sequences, at_s, quiet_s=QUIET_S, busy_from=BUSY_FROM)


def turns(demand: Demand, loads: list[tuple[float, int]]) -> list[float]:
    """Feed (seconds, number of sequences) one after the other, a look each second; when the judgement changed."""
    now, found = 0.0, []
    for seconds, num_sequences in loads:
        for _ in range(int(seconds)):
            now += 1.0
            if feed(demand, num_sequences, now):
                found.append(now)
    return found


def test_a_minute_with_one_sequence_is_quiet() -> None:
    demand = Demand()
    assert turns(demand, [(60, 1)]) == []
    assert feed(demand, QUIET_SEQUENCES, 61.0)
    assert demand.is_quiet


def test_a_second_sequence_begins_the_minute_anew() -> None:
    demand = Demand()
    assert turns(demand, [(50, 0), (1, 2), (60, 1)]) == []
    assert feed(demand, 0, 112.0)


def test_it_stays_quiet_until_many_have_been_there_for_a_while() -> None:
    """Neither a few of them for long, nor many for a moment, are worth a change of plan."""
    demand = Demand()
    assert turns(demand, [(61, 1), (100, BUSY_FROM - 1), (BUSY_S, BUSY_FROM), (1, 0), (BUSY_S, BUSY_FROM)]) == [61.0]
    assert feed(demand, BUSY_FROM, 173.0)
    assert not demand.is_quiet


def test_short_quiet_times_are_waited_for_longer_each_time() -> None:
    """Up to an hour; a long one makes it as at first."""
    demand = Demand()
    wave = [(2 * MAX_PATIENCE_S, 1), (10, BUSY_FROM)]
    first = turns(demand, [(70, 1), (10, BUSY_FROM), (119, 1), (10, BUSY_FROM), (130, 1), (10, BUSY_FROM)])
    assert len(first) == 4  # 119 s were too short once
    demand.num_short = 40
    assert turns(demand, [(MAX_PATIENCE_S, 1)]) == []
    demand = Demand(num_short=2)
    turns(demand, [(LONG_FACTOR * 240 + 241, 1), (10, BUSY_FROM)])
    assert (demand.is_quiet, demand.num_short) == (False, 0)
    assert turns(Demand(), wave) == [61.0, 2 * MAX_PATIENCE_S + 6]


def test_a_load_that_alternates_for_a_day_has_few_plans_made() -> None:
    """The worst that can be done to it: as soon as it is quiet, many come."""
    demand, now, num_turns = Demand(), 0.0, 0
    while now < 86_400.0:
        now += 1.0
        num_turns += feed(demand, BUSY_FROM if demand.is_quiet else 0, now)
    assert num_turns <= 2 * (6 + 24 + 1)  # 60 s, doubled six times, then once an hour


def test_a_pause_of_the_broker_is_no_quiet_time() -> None:
    """Nothing was seen meanwhile."""
    demand = Demand()
    assert turns(demand, [(30, 1)]) == []
    assert not feed(demand, 1, 1000.0)
    assert not feed(demand, 1, 1001.0)


def test_where_the_objective_is_said_nothing_is_judged() -> None:
    """And nothing is told of it."""
    demand = Demand()
    turns(demand, [(62, 1)])
    assert demand.report(100.0) == {"demand": "quiet", "demand_since_s": 39.0}
    assert demand.reset()
    assert not demand.reset()
    assert (demand.is_quiet, demand.report(100.0)) == (False, {})


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 8)), max_size=40))
def test_every_turn_has_been_waited_for(loads: list[tuple[int, int]]) -> None:
    """Whatever comes: it turns quiet only after a minute of at most one, busy only after some seconds of many."""
    demand, seen = Demand(), list[int]()
    for seconds, num_sequences in loads:
        for _ in range(seconds):
            seen.append(num_sequences)
            if feed(demand, num_sequences, float(len(seen))):
                if demand.is_quiet:
                    assert max(seen[-int(QUIET_S) :]) <= QUIET_SEQUENCES
                else:
                    assert min(seen[-int(BUSY_S) :]) >= BUSY_FROM

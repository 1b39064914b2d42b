"""How often a nursery that has ended is made anew."""

from __future__ import annotations

from swarm.cli.up.forkserver.client import MAX_SHORT_RUNS, RestartBudget
from swarm.cli.up.supervisor import HEALTHY_S


def test_it_is_made_anew_a_few_times_in_a_row() -> None:
    renewals = RestartBudget()
    for number in range(MAX_SHORT_RUNS):
        renewals.record_start(float(number))
        assert renewals.record_end(number + 0.5)
    renewals.record_start(10.0)
    assert not renewals.record_end(10.5)


def test_a_healthy_life_makes_it_as_good_as_new() -> None:
    """However often that happens."""
    renewals = RestartBudget()
    for number in range(3 * MAX_SHORT_RUNS):
        began_at = number * 1000.0
        renewals.record_start(began_at)
        assert renewals.record_end(began_at + (HEALTHY_S if number % 2 else 1.0))

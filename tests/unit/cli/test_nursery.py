"""How often a nursery that has ended is made anew."""

from __future__ import annotations

from swarm.cli.up.nursery.renewal import MOST_SHORT_LIVES, Renewals
from swarm.cli.up.supervisor import HEALTHY_S


def test_it_is_made_anew_a_few_times_in_a_row() -> None:
    renewals = Renewals()
    for number in range(MOST_SHORT_LIVES):
        renewals.begun(float(number))
        assert renewals.allow(number + 0.5)
    renewals.begun(10.0)
    assert not renewals.allow(10.5)


def test_a_healthy_life_makes_it_as_good_as_new() -> None:
    """However often that happens."""
    renewals = Renewals()
    for number in range(3 * MOST_SHORT_LIVES):
        began_at = number * 1000.0
        renewals.begun(began_at)
        assert renewals.allow(began_at + (HEALTHY_S if number % 2 else 1.0))

"""How a worker goes that a signal asks to end."""

from __future__ import annotations

import signal

from swarm.stage.shell.leaving import Departure, Farewell


def test_a_member_takes_leave() -> None:
    """It tells the broker and stays until it is let go; the code says that a signal wanted it."""
    departure = Departure()
    assert departure.signalled(signal.SIGTERM, is_member=True) is Farewell.TELL
    assert departure.released() is Farewell.END
    assert departure.exit_code == 143


def test_a_broker_that_goes_away_is_not_waited_for() -> None:
    """Nobody is left who could let it go."""
    departure = Departure()
    departure.signalled(signal.SIGINT, is_member=True)
    assert departure.disconnected() is Farewell.END
    assert departure.exit_code == 130


def test_without_a_broker_or_when_told_twice_it_ends_at_once() -> None:
    """There is nobody to tell, or somebody is impatient."""
    assert Departure().signalled(signal.SIGTERM, is_member=False) is Farewell.END
    departure = Departure()
    departure.signalled(signal.SIGTERM, is_member=True)
    assert departure.signalled(signal.SIGTERM, is_member=True) is Farewell.END


def test_who_was_not_asked_by_a_signal_goes_by_the_brokers_word() -> None:
    """A release that the broker decided, and a lost connection, are none of its business."""
    departure = Departure()
    assert departure.released() is None
    assert departure.disconnected() is None
    assert departure.exit_code is None

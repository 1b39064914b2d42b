"""How a worker goes that a signal asks to end."""

from __future__ import annotations

import signal

from swarm.stage.shell.shutdown import ShutdownAction, ShutdownSequence


def test_a_member_takes_leave() -> None:
    """It tells the broker and stays until it is let go; the code says that a signal wanted it."""
    departure = ShutdownSequence()
    assert departure.on_signal(signal.SIGTERM, is_member=True) is ShutdownAction.NOTIFY_BROKER
    assert departure.on_release() is ShutdownAction.END
    assert departure.exit_code == 143


def test_a_broker_that_goes_away_is_not_waited_for() -> None:
    """Nobody is left who could let it go."""
    departure = ShutdownSequence()
    departure.on_signal(signal.SIGINT, is_member=True)
    assert departure.on_disconnected() is ShutdownAction.END
    assert departure.exit_code == 130


def test_without_a_broker_or_when_told_twice_it_ends_at_once() -> None:
    """There is nobody to tell, or somebody is impatient."""
    assert ShutdownSequence().on_signal(signal.SIGTERM, is_member=False) is ShutdownAction.END
    departure = ShutdownSequence()
    departure.on_signal(signal.SIGTERM, is_member=True)
    assert departure.on_signal(signal.SIGTERM, is_member=True) is ShutdownAction.END


def test_who_was_not_asked_by_a_signal_goes_by_the_brokers_word() -> None:
    """A release that the broker decided, and a lost connection, are none of its business."""
    departure = ShutdownSequence()
    assert departure.on_release() is None
    assert departure.on_disconnected() is None
    assert departure.exit_code is None

"""A worker that has just joined: its welcome and its first beat may both be late."""

from __future__ import annotations

from swarm.broker.members.health import Expected, HealthSettings, judge
from swarm.broker.state.workers import Pulse, Verdict


def test_the_first_beat_may_take_longer() -> None:
    """500 ms there and 500 ms back are no silence; after that it is."""
    settings = HealthSettings(beat_timeout_s=0.7)
    pulse = Pulse(10.0)
    assert judge(pulse, settings, Expected(), 11.1).verdict is Verdict.WELL
    assert judge(pulse, settings, Expected(), 11.5).verdict is Verdict.SILENT

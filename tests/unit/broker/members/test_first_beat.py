"""A worker that has just joined: its welcome and its first beat may both be late."""

from __future__ import annotations

from swarm.broker.members.health import ExpectedTimes, HealthLimits, judge
from swarm.broker.state.workers import HeartbeatHistory, Verdict


def test_the_first_beat_may_take_longer() -> None:
    """500 ms there and 500 ms back are no silence; after that it is."""
    settings = HealthLimits(beat_timeout_s=0.7)
    pulse = HeartbeatHistory(10.0)
    assert judge(pulse, settings, ExpectedTimes(), 11.1).verdict is Verdict.WELL
    assert judge(pulse, settings, ExpectedTimes(), 11.5).verdict is Verdict.SILENT

"""Beats in, verdicts out: hung is not slow is not loading is not dead.

==============================================  =========================================
evidence                                        verdict
==============================================  =========================================
connection closed                               dead: out at once (told by the core)
no beat for ``beat_timeout_s``                  frozen or cut off: out
beats, computing, counter still for longer      hung: out
than ``hang_factor`` x the step's usual time,
at least ``hang_min_s``
beats, blocked on X                             judged by X
beats, loading, the counter moves               loading: waited for
beats, loading, counter still for longer than   hung: out
``LOADING_FACTOR`` x ``hang_min_s``
==============================================  =========================================

The broker's own pauses are not the workers' fault: ``forgive`` moves every deadline by the length of the pause.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from swarm.wire.messages import Beat

# A load shows progress with every tensor and at its end warms up: half a minute (of the default two seconds) is enough
# for the largest tensor from a slow disk, and for the warm-up of a slow machine.
LOADING_FACTOR = 15


class Verdict(enum.Enum):
    WELL = "well"
    LOADING = "loading"
    BLOCKED = "blocked"
    SILENT = "silent"
    HUNG = "hung"
    DEAD = "dead"
    LEFT = "left"

    @property
    def is_out(self) -> bool:
        return self in (Verdict.SILENT, Verdict.HUNG, Verdict.DEAD)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    beat_timeout_s: float = 0.7
    hang_factor: float = 10.0
    hang_min_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    evidence: str


@dataclass(slots=True)
class Pulse:
    """What is known of one worker's beats."""

    heard_at: float
    beat: Beat | None = None
    moved_at: float = 0.0  # when it last showed progress, began with what it does, or had nothing to do

    def take(self, beat: Beat, now: float) -> None:
        before = self.beat
        if before is None or (beat.progress, beat.state) != (before.progress, before.state):
            self.moved_at = now
        if beat.state not in ("computing", "loading"):
            self.moved_at = now
        self.beat = beat
        self.heard_at = now

    def forgive(self, pause_s: float) -> None:
        self.heard_at += pause_s
        self.moved_at += pause_s


def judge(pulse: Pulse, settings: HealthSettings, usual_step_s: float, now: float) -> Judgement:
    """The verdict on one worker, with its evidence in words."""
    silent_s = now - pulse.heard_at
    beat = pulse.beat
    if silent_s > settings.beat_timeout_s:
        return Judgement(Verdict.SILENT, f"no beat for {silent_s * 1000:.0f} ms")
    if beat is None:
        return Judgement(Verdict.WELL, "just joined")
    if beat.state == "blocked":
        return Judgement(Verdict.BLOCKED, f"blocked on {beat.blocked_on} for {beat.since_s:.1f} s")
    if beat.state in ("computing", "loading"):
        still_s = now - pulse.moved_at
        allowed_s = _allowed_s(beat, settings, usual_step_s)
        if still_s > allowed_s:
            text = f"{beat.state}, no progress for {still_s:.1f} s (allowed {allowed_s:.1f} s)"
            return Judgement(Verdict.HUNG, text)
    if beat.state == "loading":
        return Judgement(Verdict.LOADING, f"loading for {beat.since_s:.1f} s")
    return Judgement(Verdict.WELL, f"{beat.state}, last beat {silent_s * 1000:.0f} ms ago")


def _allowed_s(beat: Beat, settings: HealthSettings, usual_step_s: float) -> float:
    """How long the progress counter may stand still."""
    if beat.state == "loading":
        return LOADING_FACTOR * settings.hang_min_s
    return max(settings.hang_min_s, settings.hang_factor * usual_step_s)

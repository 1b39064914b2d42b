"""Table of evidence and verdicts, and the pure function that judges a worker by its heartbeats.

==================================================  ====================================================
evidence                                            verdict
==================================================  ====================================================
its connection closed                               dead: out immediately (reported by the core)
no heartbeat for three times the longest recent     silent (frozen or cut off): out
interval between two, within ``beat_least_s`` and
``beat_timeout_s``
heartbeats, computing, counter unchanged for        hung: out
longer than ``hang_factor`` x the time that the
step in hand should take, at least ``hang_min_s``
heartbeats, computing, counter unchanged, and for   hung: out
``asleep_s`` none of its threads ran or waited for
a core
heartbeats, its control loop blocked for longer     hung: out
than ``LOOP_FACTOR`` x ``hang_min_s``
heartbeats, the counter moves, but slowly           slow: stays; the planner uses its measured pace
heartbeats, blocked on X                            blocked: judged by X, whose verdict is shown
heartbeats, loading, the counter moves              loading: waited for
heartbeats, loading, counter unchanged for longer   hung: out
than ``LOADING_FACTOR`` x ``hang_min_s``
the next stage reports that its hidden states are   lied: out immediately (reported by the core)
not finite
its steps raise, whatever is in them                failed: out (reported by the core; ``blame``)
its sequences or memory differ from the plan,       differs: out (reported by the core;
again and again                                     ``differences``)
==================================================  ====================================================

The counter moves with every layer that was computed and every tensor that was loaded, so a step may take minutes. The
expected time of a step follows from its positions and from the worker's measurements at join (``ExpectedTimes``).

The broker's own pauses are not the workers' fault: ``shift_deadlines`` moves every deadline by the length of the pause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.broker.state.workers import HeartbeatHistory, Judgement, Verdict
from swarm.wire.messages import Heartbeat

# A load shows progress with every tensor and at its end warms up: half a minute (of the default two seconds) is enough
# for the largest tensor from a slow disk, and for the warm-up of a slow machine.
LOADING_FACTOR = 15
# The control loop only passes orders on, so ten seconds are never legitimate; a shorter stall does no harm.
LOOP_FACTOR = 5
# Slow is a worker whose steps take this many times longer than predicted; a smaller ratio is normal on busy machines. A
# step in hand is judged only after a while: before, the counter's rate is still that of the earlier steps.
SLOW_FACTOR = 3.0
# Silent is a worker whose last heartbeat is this many times older than the longest recent interval.
SILENCE_FACTOR = 3.0
SLOW_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class HealthLimits:  # A worker is always silent after this long without a heartbeat.
    """Limits of the health check (``[health]`` in the settings)."""

    beat_timeout_s: float = 0.7  # A worker is never silent before, however regular its heartbeats.
    beat_least_s: float = 0.4
    hang_factor: float = 10.0  # Allowed time without progress as a multiple of the expected time of a step.
    hang_min_s: float = 2.0
    asleep_s: float = 0.75  # A computing worker none of whose threads ran for this long is hung.


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Expected times of a worker's steps, from sources other than its heartbeats."""

    usual_s: float = 0.0  # usual time of a step through all stages
    in_hand_s: float = 0.0  # the longest of the steps under way in this stage, as predicted; 0: unknown
    num_layers: int = 0  # layers of the stage: the counter grows by this number with each step
    pace: float | None = None  # how many times longer than predicted its last steps took; None: unknown

    @property
    def step_s(self) -> float:
        """Expected time of the step in hand: the larger of the prediction (scaled by this worker's pace) and the usual
        time. A long prompt takes longer than any step before it."""
        return max(self.usual_s, self.in_hand_s * max(1.0, self.pace or 1.0))


def judge(pulse: HeartbeatHistory, settings: HealthLimits, expected: ExpectedTimes, now: float) -> Judgement:
    """Return the verdict on one worker, with its evidence as text. A blocked worker is judged further by
    ``describe_blocking_verdict``."""
    silent_s = now - pulse.received_at
    if silent_s > _allowed_silence_s(pulse, settings):
        return Judgement(Verdict.SILENT, f"no heartbeat for {silent_s * 1000:.0f} ms: frozen or cut off")
    if pulse.last is None:
        return Judgement(Verdict.WELL, "just joined")
    return _judge_hung(pulse, pulse.last, settings, expected, now) or _judge_living(
        pulse, pulse.last, expected, silent_s
    )


def _allowed_silence_s(pulse: HeartbeatHistory, settings: HealthLimits) -> float:
    """Return how long a worker may be silent. A worker with regular heartbeats is declared silent sooner. On a busy
    machine, or over a link that loses packets, heartbeats are sometimes late, so the limit is longer; it is also longer
    until enough intervals have been seen."""
    # Before the first heartbeat the worker must receive its Welcome: two messages may be late, not one.
    if pulse.last is None:
        return 2 * settings.beat_timeout_s
    if not pulse.has_enough:
        return settings.beat_timeout_s
    return min(settings.beat_timeout_s, max(settings.beat_least_s, SILENCE_FACTOR * pulse.longest_gap_s))


def _judge_hung(
    pulse: HeartbeatHistory, beat: Heartbeat, settings: HealthLimits, expected: ExpectedTimes, now: float
) -> Judgement | None:
    """Return the verdict if heartbeats arrive but one of the working threads makes no progress, else None."""
    if pulse.loop_lag_s > LOOP_FACTOR * settings.hang_min_s:
        return Judgement(Verdict.HUNG, f"its control loop has stood still for {pulse.loop_lag_s:.1f} s")
    if beat.state not in ("computing", "loading"):
        return None
    if beat.state == "computing" and beat.asleep_s >= settings.asleep_s:
        return Judgement(Verdict.HUNG, f"computing, but none of its threads has run for {beat.asleep_s:.1f} s")
    # Up to the last heartbeat: a worker that was stopped sends no counter. It is silent, and no request is to blame.
    still_s, allowed_s = pulse.received_at - pulse.progressed_at, _allowed_standstill_s(beat, settings, expected)
    if still_s <= allowed_s:
        return None
    return Judgement(Verdict.HUNG, f"{beat.state}, no progress for {still_s:.1f} s (allowed {allowed_s:.1f} s)")


def _judge_living(pulse: HeartbeatHistory, beat: Heartbeat, expected: ExpectedTimes, silent_s: float) -> Judgement:
    lasts_s = beat.since_s + silent_s
    if beat.state == "blocked":
        return Judgement(Verdict.BLOCKED, f"blocked on {beat.blocked_on} for {lasts_s:.1f} s")
    if beat.state == "loading":
        return Judgement(Verdict.LOADING, f"loading for {lasts_s:.1f} s")
    slow = _judge_slow(pulse, beat, expected)
    return slow or Judgement(Verdict.WELL, f"{beat.state}, last heartbeat {silent_s * 1000:.0f} ms ago")


def _allowed_standstill_s(beat: Heartbeat, settings: HealthLimits, expected: ExpectedTimes) -> float:
    """Return how long the progress counter may stand still."""
    if beat.state == "loading":
        return LOADING_FACTOR * settings.hang_min_s
    return max(settings.hang_min_s, settings.hang_factor * expected.step_s)


def _judge_slow(pulse: HeartbeatHistory, beat: Heartbeat, expected: ExpectedTimes) -> Judgement | None:
    """Return the verdict "slow" if the current step, or the steps before it, took too long; else None."""
    if beat.state == "computing" and beat.since_s > SLOW_AFTER_S and expected.in_hand_s > 0:
        predicted = expected.num_layers / expected.in_hand_s
        if pulse.rate * SLOW_FACTOR < predicted:
            return Judgement(
                Verdict.SLOW,
                f"computing for {beat.since_s:.1f} s at {pulse.rate:.3g} layers per second, predicted: {predicted:.3g}",
            )
    if expected.pace is not None and expected.pace >= SLOW_FACTOR:
        return Judgement(Verdict.SLOW, f"{beat.state}, its steps take {expected.pace:.1f} times as long as predicted")
    return None


def describe_blocking_verdict(
    incarnation: str, judged: Mapping[str, Judgement], blocked_on: Callable[[str], str], name_of: Callable[[str], str]
) -> str:
    """Return, as text, the verdict that decides for a blocked worker: that of the worker at the end of the chain of
    waits."""
    visited, holder = {incarnation}, blocked_on(incarnation)
    while holder in judged and judged[holder].verdict is Verdict.BLOCKED and holder not in visited:
        visited.add(holder)
        holder = blocked_on(holder)
    if holder not in judged:
        name = "the broker" if holder == "broker" else f"{name_of(holder)}, which is no member any more"
        return f"it is judged by {name}"
    verdict = judged[holder]
    return f"it is judged by {name_of(holder)}, which is {verdict.verdict.value}: {verdict.evidence}"

"""Beats in, verdicts out: hung is not slow is not loading is not dead.

==================================================  ====================================================
evidence                                            verdict
==================================================  ====================================================
its connection closed                               dead: out at once (told by the core)
no beat for three times the longest time between    silent (frozen or cut off): out
two of late, within ``beat_least_s`` and
``beat_timeout_s``
beats, computing, counter still for longer than     hung: out
``hang_factor`` x the time that the step in hand
should take, at least ``hang_min_s``
beats, computing, counter still, and for            hung: out
``asleep_s`` none of its threads ran or waited for
a core
beats, its control loop still for longer than       hung: out
``LOOP_FACTOR`` x ``hang_min_s``
beats, the counter moves, but slowly                slow: kept; its pace is told, and the plan believes it
beats, blocked on X                                 blocked: judged by X, whose verdict is told
beats, loading, the counter moves                   loading: waited for
beats, loading, counter still for longer than       hung: out
``LOADING_FACTOR`` x ``hang_min_s``
what it sent is not finite, the next stage says     lied: out at once (told by the core)
its steps raise, whatever is in them                failed: out (told by the core; ``blame``)
==================================================  ====================================================

The counter moves with every layer that was computed and every tensor that was loaded, so a step may take minutes. What
it should take follows from its positions and from what the worker measured at join (``Expected``).

The broker's own pauses are not the workers' fault: ``forgive`` moves every deadline by the length of the pause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.broker.state.workers import Judgement, Pulse, Verdict
from swarm.wire.messages import Beat

# A load shows progress with every tensor and at its end warms up: half a minute (of the default two seconds) is enough
# for the largest tensor from a slow disk, and for the warm-up of a slow machine.
LOADING_FACTOR = 15
# The control loop only hands orders on, so nothing good takes it ten seconds; a shorter stall costs nobody anything.
LOOP_FACTOR = 5
# How many times longer than predicted makes slow; less is what busy machines do. A step in hand is looked at only after
# a while: before, the counter's speed is still that of the steps before it.
SLOW_FACTOR = 3.0
# How many times longer than the longest time between two beats of late is silence.
LATE_FACTOR = 3.0
SLOW_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    beat_timeout_s: float = 0.7
    beat_least_s: float = 0.4
    hang_factor: float = 10.0
    hang_min_s: float = 2.0
    asleep_s: float = 0.75


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a worker's steps from elsewhere than its beats."""

    usual_s: float = 0.0  # a step's way through all stages, usually
    in_hand_s: float = 0.0  # the longest of the steps under way in this stage, as predicted; 0: unknown
    num_layers: int = 0  # of the stage: by so much the counter grows with each step
    pace: float | None = None  # how many times longer than predicted its last steps took; None: unknown

    @property
    def step_s(self) -> float:
        """The larger of what was predicted (for a worker as slow as this one is known to be) and what is usual: a long
        prompt takes longer than anything before it."""
        return max(self.usual_s, self.in_hand_s * max(1.0, self.pace or 1.0))


def judge(pulse: Pulse, settings: HealthSettings, expected: Expected, now: float) -> Judgement:
    """The verdict on one worker, with its evidence in words. Who is blocked is judged by ``judge_blocked``."""
    silent_s = now - pulse.heard_at
    if silent_s > _allowed_silence_s(pulse, settings):
        return Judgement(Verdict.SILENT, f"no beat for {silent_s * 1000:.0f} ms: frozen or cut off")
    if pulse.beat is None:
        return Judgement(Verdict.WELL, "just joined")
    return _hung(pulse, pulse.beat, settings, expected, now) or _living(pulse, pulse.beat, expected, silent_s)


def _allowed_silence_s(pulse: Pulse, settings: HealthSettings) -> float:
    """Whose beats come evenly is missed soon. Those of a busy machine, or over a link that loses packets, come late at
    times: there silence takes longer to mean anything. So it does until there were enough beats to tell."""
    if pulse.beat is None:  # it must hear that it is welcome before its first one: two messages may be late, not one
        return 2 * settings.beat_timeout_s
    if not pulse.is_known:
        return settings.beat_timeout_s
    return min(settings.beat_timeout_s, max(settings.beat_least_s, LATE_FACTOR * pulse.longest_s))


def _hung(pulse: Pulse, beat: Beat, settings: HealthSettings, expected: Expected, now: float) -> Judgement | None:
    """It beats, and yet nothing moves in one of the threads that do the work."""
    if pulse.loop_lag_s > LOOP_FACTOR * settings.hang_min_s:
        return Judgement(Verdict.HUNG, f"its control loop has stood still for {pulse.loop_lag_s:.1f} s")
    if beat.state not in ("computing", "loading"):
        return None
    if beat.state == "computing" and beat.asleep_s >= settings.asleep_s:
        return Judgement(Verdict.HUNG, f"computing, but none of its threads has run for {beat.asleep_s:.1f} s")
    still_s, allowed_s = now - pulse.moved_at, _allowed_s(beat, settings, expected)
    if still_s <= allowed_s:
        return None
    return Judgement(Verdict.HUNG, f"{beat.state}, no progress for {still_s:.1f} s (allowed {allowed_s:.1f} s)")


def _living(pulse: Pulse, beat: Beat, expected: Expected, silent_s: float) -> Judgement:
    lasts_s = beat.since_s + silent_s
    if beat.state == "blocked":
        return Judgement(Verdict.BLOCKED, f"blocked on {beat.blocked_on} for {lasts_s:.1f} s")
    if beat.state == "loading":
        return Judgement(Verdict.LOADING, f"loading for {lasts_s:.1f} s")
    slow = _by_pace(pulse, beat, expected)
    return slow or Judgement(Verdict.WELL, f"{beat.state}, last beat {silent_s * 1000:.0f} ms ago")


def _allowed_s(beat: Beat, settings: HealthSettings, expected: Expected) -> float:
    """How long the progress counter may stand still."""
    if beat.state == "loading":
        return LOADING_FACTOR * settings.hang_min_s
    return max(settings.hang_min_s, settings.hang_factor * expected.step_s)


def _by_pace(pulse: Pulse, beat: Beat, expected: Expected) -> Judgement | None:
    """Slow, if it is: by the step in hand, or by those before it."""
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


def judge_blocked(
    incarnation: str, judged: Mapping[str, Judgement], blocked_on: Callable[[str], str], name_of: Callable[[str], str]
) -> str:
    """In words, by whom a blocked worker is judged: the one at the end of the chain of those who wait."""
    seen, holder = {incarnation}, blocked_on(incarnation)
    while holder in judged and judged[holder].verdict is Verdict.BLOCKED and holder not in seen:
        seen.add(holder)
        holder = blocked_on(holder)
    if holder not in judged:
        who = "the broker" if holder == "broker" else f"{name_of(holder)}, which is no member any more"
        return f"it is judged by {who}"
    found = judged[holder]
    return f"it is judged by {name_of(holder)}, which is {found.verdict.value}: {found.evidence}"

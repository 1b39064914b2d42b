"""Judgement of the load: whether the swarm is quiet or busy, which decides objective ``auto``. Pure.

Two thresholds and two waiting times prevent flapping. The swarm is quiet once at most ``QUIET_SEQUENCES`` sequence has
been under way for ``quiet_s``; it is busy again once ``busy_from`` sequences have been for ``BUSY_S``. After a short
quiet time the next wait is twice as long, up to ``MAX_PATIENCE_S``; after a long one it is as long as at first.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.wire.messages import Json

QUIET_SEQUENCES = 1  # sequences under way, at most, for a quiet swarm
BUSY_S = 5.0  # a plan for one answer at a time also serves many, only less quickly
MAX_PATIENCE_S = 3600.0  # upper limit of the wait before the swarm counts as quiet
LONG_FACTOR = 10.0  # a quiet time this many times longer than its wait was worth its two changes of plan
MAX_UNSEEN_S = 1.0  # between two calls; a longer gap is a pause of the broker, in which the load was not observed


@dataclass(slots=True)
class Demand:
    """Whether the swarm is quiet or busy, with the history that the hysteresis needs (see the module)."""

    is_quiet: bool = False
    since: float | None = None  # time of the last change; None: the load is not judged
    num_short: int = 0  # short quiet times in a row
    _due_s: float | None = None  # for how long the load has met the condition for a change; None: it does not
    _updated_at: float | None = None

    def update(self, num_sequences: int, now: float, *, quiet_s: float, busy_from: int) -> bool:
        """Take the number of sequences that run or wait; return whether the judgement has changed."""
        self.since = now if self.since is None else self.since
        unseen_s = 0.0 if self._updated_at is None else now - self._updated_at
        self._updated_at = now
        is_due = num_sequences >= busy_from if self.is_quiet else num_sequences <= QUIET_SEQUENCES
        if not is_due:
            self._due_s = None
            return False
        self._due_s = 0.0 if self._due_s is None else self._due_s + min(unseen_s, MAX_UNSEEN_S)
        if self._due_s < (min(BUSY_S, quiet_s) if self.is_quiet else self._patience_s(quiet_s)):
            return False
        if self.is_quiet:
            is_long = now - self.since >= LONG_FACTOR * self._patience_s(quiet_s)
            self.num_short = 0 if is_long else self.num_short + 1
        self.is_quiet, self.since, self._due_s = not self.is_quiet, now, None
        return True

    def _patience_s(self, quiet_s: float) -> float:
        return max(quiet_s, min(MAX_PATIENCE_S, quiet_s * 2.0 ** min(self.num_short, 16)))

    def reset(self) -> bool:
        """Stop judging, since the objective is set explicitly; return whether the judgement has changed."""
        was_quiet = self.is_quiet
        self.is_quiet, self.since, self.num_short, self._due_s, self._updated_at = False, None, 0, None, None
        return was_quiet

    def report(self, now: float) -> Json:
        if self.since is None:
            return {}
        return {"demand": "quiet" if self.is_quiet else "busy", "demand_since_s": round(now - self.since, 1)}

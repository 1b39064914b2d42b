"""Measured costs of steps: how large a step may be, how long waiting takes, and what cannot be done in time.

Step times are kept by size, in classes of powers of two. Between two measured sizes the time is interpolated. Beyond
the largest it is assumed to be proportional to the size; that is an upper bound, because every step has a fixed cost. A
budget therefore approaches its target from below. Old measurements are dropped, so that a size that was slow once is
tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 32  # tokens; minimum of every budget, because smaller steps cost almost as much
FORGET_AFTER_STEPS = 64  # steps after which a measurement is dropped
_WEIGHT = 0.25  # weight of the newest step in the average of its size class
_FADE = 0.98  # per step: factor on the sums from which the rate is computed
_MIN_GROWTH = 1.01  # per step: factor by which the minimum step time rises, so that it follows a slowdown


@dataclass(slots=True)
class _Size:
    """Averages of one size class, and the step number of its last measurement."""

    tokens: float
    seconds: float
    measured_at: int


class StepCosts:
    """Measured costs of steps (see the module), updated with every step that completes."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by bit length of the number of tokens
        self._num_steps = 0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._min_step_s: float | None = None
        self._fill_ratio = 1.0  # mean ratio of generated length to maximum length
        self._num_ends = 0
        self.last_done_at = 0.0  # time at which a step last completed
        self.usual_step_s = 0.0  # moving average of the time of a step through all stages, for any size

    def record_step(
        self, tokens: int, sent_at: float, now: float, num_refused: int = 0, *, has_more: bool = False
    ) -> None:
        """Record a completed step. ``num_refused``: how many of its tokens were guessed wrongly, so that their time
        counts and they do not. ``has_more``: it had other work than these tokens, so its time says nothing of its
        size."""
        seconds = max(0.0, now - sent_at)
        self.usual_step_s += (0.1 if self.usual_step_s else 1.0) * (now - sent_at - self.usual_step_s)
        self._num_steps += 1
        self._tokens = _FADE * self._tokens + tokens - num_refused
        self._busy_s = _FADE * self._busy_s + max(0.0, now - max(sent_at, self.last_done_at))
        self.last_done_at = now
        if not tokens or has_more:
            return
        self._min_step_s = seconds if self._min_step_s is None else min(seconds, self._min_step_s * _MIN_GROWTH)
        size = self._sizes.get(tokens.bit_length())
        if size is None:
            self._sizes[tokens.bit_length()] = _Size(tokens, seconds, self._num_steps)
        else:
            size.tokens += _WEIGHT * (tokens - size.tokens)
            size.seconds += _WEIGHT * (seconds - size.seconds)
            size.measured_at = self._num_steps

    def record_sequence(self, num_generated: int, max_tokens: int) -> None:
        """Record a sequence that ended by itself."""
        self._num_ends += 1
        self._fill_ratio += max(0.05, 1 / self._num_ends) * (num_generated / max(1, max_tokens) - self._fill_ratio)

    @property
    def fill_ratio(self) -> float:
        """Mean ratio of generated length to maximum length of answers; 1 until the first one has ended."""
        return min(1.0, max(0.0, self._fill_ratio))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of prompts and answers per second of work; None before the first measurement."""
        return self._tokens / self._busy_s if self._busy_s > 0 and self._tokens > 0 else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Tokens per second of the best steps with at least a chunk of tokens; None before the first one."""
        rates = [size.tokens / size.seconds for size in self._sizes.values() if size.tokens >= CHUNK and size.seconds]
        return max(rates, default=None)

    @property
    def min_step_s(self) -> float:
        """Shortest recent step time; no token takes less."""
        return self._min_step_s or 0.0

    def expected_s(self, tokens: int) -> float | None:
        """Return the expected time of a step of this size, between two measured sizes in proportion; None before the
        first measurement."""
        sizes = sorted(self._sizes.values(), key=lambda size: size.tokens)
        above = next((size for size in sizes if size.tokens >= tokens), None)
        below = next((size for size in reversed(sizes) if size.tokens <= tokens), None)
        if above is None or below is None:
            nearest = above or below
            return None if nearest is None else nearest.seconds
        if above.tokens == below.tokens:
            return above.seconds
        part = (tokens - below.tokens) / (above.tokens - below.tokens)
        return below.seconds + part * (above.seconds - below.seconds)

    def budget(self, target_s: float, max_tokens: int, least: int = CHUNK) -> int:
        """Return the maximum number of tokens of a step that takes at most ``target_s``: at most ``max_tokens``, and at
        least ``least`` unless ``max_tokens`` is smaller."""
        if target_s <= 0:
            return max_tokens
        below: _Size | None = None
        for key in sorted(self._sizes):
            size = self._sizes[key]
            if self._num_steps - size.measured_at > FORGET_AFTER_STEPS:
                del self._sizes[key]
            elif size.seconds > target_s:
                return max(min(least, max_tokens), min(max_tokens, int(_interpolate(below, size, target_s))))
            else:
                below = size
        if below is None or below.seconds <= 0:
            return max_tokens
        return max(min(least, max_tokens), min(max_tokens, int(below.tokens * target_s / below.seconds)))


def _interpolate(below: _Size | None, above: _Size, target_s: float) -> float:
    if below is None or above.seconds <= below.seconds:
        return above.tokens * target_s / above.seconds
    return below.tokens + (above.tokens - below.tokens) * (target_s - below.seconds) / (above.seconds - below.seconds)

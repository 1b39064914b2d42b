"""What steps have been found to cost: how large one may be, how long waiting takes, what can't be done in time.

Step times are kept by size, in classes of powers of two. Between two sizes that were measured the time is interpolated;
beyond the largest it is taken to grow in proportion, which it never exceeds (every step has a fixed cost), so a budget
creeps up on its target from below. What was measured long ago is forgotten: a size that was slow on a bad day is tried
again.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 32  # no budget is below it: smaller steps cost almost as much as this one
FORGET_AFTER = 64  # steps
_WEIGHT = 0.25  # of the newest step of a size
_FADE = 0.98  # of what the rate remembers, at each step
_CREEP = 1.01  # the quickest step of late is forgotten so quickly


@dataclass(slots=True)
class _Size:
    tokens: float
    seconds: float
    measured_at: int


class StepCosts:
    """See the module's text. Fed with every step that came back."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._least_s: float | None = None
        self._fill = 1.0
        self._num_ends = 0
        self.done_at = 0.0  # when a step last came back
        self.usual_step_s = 0.0  # moving average of a step's way through all stages, whatever its size

    def step_done(self, tokens: int, sent_at: float, now: float) -> None:
        """A step of so many tokens came back."""
        seconds = max(0.0, now - sent_at)
        self.usual_step_s += (0.1 if self.usual_step_s else 1.0) * (now - sent_at - self.usual_step_s)
        self._num_steps += 1
        self._tokens = _FADE * self._tokens + tokens
        self._busy_s = _FADE * self._busy_s + max(0.0, now - max(sent_at, self.done_at))
        self.done_at = now
        if not tokens:
            return
        self._least_s = seconds if self._least_s is None else min(seconds, self._least_s * _CREEP)
        size = self._sizes.get(tokens.bit_length())
        if size is None:
            self._sizes[tokens.bit_length()] = _Size(tokens, seconds, self._num_steps)
        else:
            size.tokens += _WEIGHT * (tokens - size.tokens)
            size.seconds += _WEIGHT * (seconds - size.seconds)
            size.measured_at = self._num_steps

    def sequence_done(self, num_generated: int, max_tokens: int) -> None:
        """An answer came to an end by itself."""
        self._num_ends += 1
        self._fill += max(0.05, 1 / self._num_ends) * (num_generated / max(1, max_tokens) - self._fill)

    @property
    def fill(self) -> float:
        """Return what part of the length that they are allowed answers come to; 1 as long as none has ended."""
        return min(1.0, max(0.0, self._fill))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens computed per second of work, prompts and answers together; None before anything was measured."""
        return self._tokens / self._busy_s if self._busy_s > 0 and self._tokens > 0 else None

    @property
    def least_step_s(self) -> float:
        """The quickest step of late: no token takes less."""
        return self._least_s or 0.0

    def budget(self, target_s: float, most: int) -> int:
        """How many tokens a step may have to take at most this long; at least a chunk, if that isn't above ``most``."""
        if target_s <= 0:
            return most
        below: _Size | None = None
        for key in sorted(self._sizes):
            size = self._sizes[key]
            if self._num_steps - size.measured_at > FORGET_AFTER:
                del self._sizes[key]
            elif size.seconds > target_s:
                return max(min(CHUNK, most), min(most, int(_between(below, size, target_s))))
            else:
                below = size
        if below is None or below.seconds <= 0:
            return most
        return max(min(CHUNK, most), min(most, int(below.tokens * target_s / below.seconds)))


def _between(below: _Size | None, above: _Size, target_s: float) -> float:
    if below is None or above.seconds <= below.seconds:
        return above.tokens * target_s / above.seconds
    return below.tokens + (above.tokens - below.tokens) * (target_s - below.seconds) / (above.seconds - below.seconds)

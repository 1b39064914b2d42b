"""How much of the broker's time a member from elsewhere may take at the clients' door, all its connections together.

Its messages are taken in turns with those of others, but each takes time of the loop by which steps go on: without end,
one member could slow down all. Who has used up its allowance is not read for a moment; what it says waits with itself.
Pure.

Nobody notices that who asks as people and programs do: a submission, or a question, takes half a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SHARE: Final = 0.1  # of the time, for each
AT_ONCE_S: Final = 1.0  # what may be used up at once, by who has said nothing for ten seconds: a thousand submissions
LEAST_REST_S: Final = 0.01  # less is not worth a timer
MOST_REST_S: Final = 2.0
MOST_KNOWN: Final = 4096  # as many as there are members, at the most; who is forgotten begins anew


@dataclass(slots=True)
class Allowance:
    """See the module's text."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # what is left, and when that was true

    def spent(self, key: str, seconds: float, now: float) -> float:
        """Who has this key has taken so much: for how long it is not to be read now."""
        left, at = self._left.pop(key, (AT_ONCE_S, now))
        left = min(AT_ONCE_S, left + (now - at) * SHARE) - seconds
        self._left[key] = max(left, -MOST_REST_S * SHARE), now
        if len(self._left) > MOST_KNOWN:
            del self._left[next(iter(self._left))]
        rest_s = min(MOST_REST_S, -left / SHARE)
        return rest_s if rest_s >= LEAST_REST_S else 0.0

"""CPU budget of members on other machines: the share of the broker's time that the messages of one member may take,
over all its connections.

Messages of different members are read in turns, but each takes time of the event loop that also drives the steps.
Without a limit, one member could slow down all others. The connections of a member that has used up its budget are not
read for a moment; its messages wait on its own side. This module does no I/O.

Ordinary use never reaches the limit: a submission or a question takes half a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SHARE: Final = 0.1  # fraction of the time, for each member
BURST_S: Final = 1.0  # budget available after ten idle seconds: a thousand submissions
MIN_PAUSE_S: Final = 0.01  # shorter pauses are not worth a timer
MAX_PAUSE_S: Final = 2.0  # longest pause
MAX_MEMBERS: Final = 4096  # at least the number of members; a member that was evicted starts with a full budget


@dataclass(slots=True)
class CpuBudget:
    """CPU budget per member (see the module)."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # key -> (seconds left, time of that value)

    def charge(self, key: str, seconds: float, now: float) -> float:
        """Charge this key for used seconds. Return for how many seconds its connections must not be read."""
        left, at = self._left.pop(key, (BURST_S, now))
        left = min(BURST_S, left + (now - at) * SHARE) - seconds
        self._left[key] = max(left, -MAX_PAUSE_S * SHARE), now
        if len(self._left) > MAX_MEMBERS:
            del self._left[next(iter(self._left))]
        rest_s = min(MAX_PAUSE_S, -left / SHARE)
        return rest_s if rest_s >= MIN_PAUSE_S else 0.0

"""When requests are to be looked at again, and when who was turned away shall come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush


class Timers:
    """Moments at which something may be due for a request. A timer is no promise: whoever looks finds out whether it
    still is. So nothing is ever removed, and a look costs only what is due. They know ids: none keeps a request alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, at: float, request_id: str) -> None:
        heappush(self._heap, (at, request_id))

    def due(self, now: float) -> Iterator[str]:
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]


@dataclass(slots=True)
class TurnedAway:
    """Those who were told to come back: each is given a time of its own, as places become free one after the other."""

    come_back_at: float = 0.0  # when the last of them does

    def add(self, places: int, interval_s: float, now: float) -> float:
        """In how many seconds so many places will be free, if one becomes so each ``interval_s``."""
        self.come_back_at = max(now, self.come_back_at) + places * interval_s
        return self.come_back_at - now

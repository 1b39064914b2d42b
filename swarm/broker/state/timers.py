"""When requests are to be looked at again, and when who was turned away shall come back."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

FEW = 1024  # timers that are not worth a look at whose they are
MAX_TURNED_AWAY = 256  # clients of whom it is known when they shall come back


class Timers:
    """Moments at which something may be due for a request. A timer is no promise: whoever looks finds out whether it
    still is. So none is removed when its request goes, and a look costs only what is due; but those of requests that
    are gone, which may be due in a year, go together once they may be half of all. They know ids: none keeps a request
    alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._tidied_from = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, request_id: str) -> None:
        heappush(self._heap, (at, request_id))

    def forgive(self, pause_s: float) -> None:
        """Put all of them off by a pause; their order stays."""
        self._heap = [(at + pause_s, request_id) for at, request_id in self._heap]

    def tidy(self, alive: Container[str]) -> None:
        """Drop those of other requests, if there are twice as many as there were after the last time: so each timer
        pays for a look or two."""
        if len(self._heap) > self._tidied_from:
            self._heap = [timer for timer in self._heap if timer[1] in alive]
            heapify(self._heap)
            self._tidied_from = max(FEW, 2 * len(self._heap))

    def due(self, now: float) -> Iterator[str]:
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]


@dataclass(slots=True)
class TurnedAway:
    """Knows who was told to come back: each client has a time of its own, as places become free one after the other.
    Who asks again keeps its time: asking often moves nobody's. No time lies beyond that in which the queue drains.
    """

    times: dict[bytes, float] = field(default_factory=dict)

    def add(self, client: bytes, places: int, interval_s: float, drain_s: float, now: float) -> float:
        """In how many seconds so many places will be free for this client, if one becomes so each ``interval_s`` and
        all are after ``drain_s``."""
        latest = now + drain_s
        own = self.times.get(client)
        if own is None:
            self.times = {other: at for other, at in self.times.items() if at > now}
            if len(self.times) >= MAX_TURNED_AWAY:
                return drain_s
            own = max(self.times.values(), default=now) + places * interval_s
        self.times[client] = min(latest, max(own, now + places * interval_s))
        return self.times[client] - now

    def forget(self, client: bytes) -> None:
        """Forget a client that got in."""
        self.times.pop(client, None)

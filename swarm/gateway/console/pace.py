"""What the broker is asked at a look, and when the next look is. Pure: times go in.

While something is under way there are ten looks a second, else two. Each report is asked for as often as it can have
news: workers and the plan when the status shows that they may have changed, and now and then in any case. Looking must
not slow down what is looked at: where a look costs much (many requests under way), and all the more where the gateway
has its hands full, the next one waits until the looks together take no more than their share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from swarm.wire.messages import Json

BUSY_S: Final = 0.1
IDLE_S: Final = 0.5
AWAY_S: Final = 2.0  # without an answer, until a broker that is connected counts as away: a busy one takes its time
PATIENCE_S: Final = 0.5  # the same for one that is not connected
PRESSED: Final = 0.2  # of a core that a gateway uses; above, its time is its answers', and it may get no more
SHARE: Final = 1 / 300  # of a pressed gateway's time, for making views; asking for them takes about as much again
PRESSED_S: Final = 0.25  # between its looks, at least
ROOMY_SHARE: Final = 1 / 50  # the same of one that has time left
MAX_S: Final = 2.0  # between two looks, whatever they cost

What = Literal["status", "nodes", "plan", "recoveries", "stats", "requests"]
# How often in any case: (while something is under way, while nothing is).
_EVERY: Final[dict[What, tuple[float, float]]] = {
    "stats": (0.5, 1.0),
    "nodes": (1.0, 1.0),
    "plan": (1.0, 5.0),
    "recoveries": (2.0, 5.0),
    "requests": (0.25, 2.0),
}
_OF_PLANS: Final = ("state", "waits_for", "epoch", "num_workers", "num_stages", "loading", "model")
_OF_REQUESTS: Final = ("num_running", "num_queued", "num_requests")


@dataclass(slots=True)
class Pace:
    """One for a watch."""

    _asked_at: dict[What, float] = field(default_factory=dict)
    _of_plans: list[object] = field(default_factory=list)
    _of_requests: list[object] = field(default_factory=list)
    _is_busy: bool = False
    _is_recovering: bool = False

    def heard(self, status: Json, *, is_recovering: bool) -> None:
        """The status is asked at each look. ``is_recovering``: as far as is known."""
        of_plans, of_requests = [status.get(key) for key in _OF_PLANS], [status.get(key) for key in _OF_REQUESTS]
        if of_plans != self._of_plans:
            for what in ("nodes", "plan", "recoveries"):
                self._asked_at.pop(what, None)
        if of_requests != self._of_requests:
            self._asked_at.pop("requests", None)
        self._of_plans, self._of_requests, self._is_recovering = of_plans, of_requests, is_recovering
        self._is_busy = bool(status.get("num_running") or status.get("num_queued") or status.get("loading"))
        self._is_busy = self._is_busy or status.get("state") != "serving"

    def due(self, now: float) -> list[What]:
        """Beside the status. Counts as asked."""
        place = 0 if self.is_busy else 1
        found = [what for what, every in _EVERY.items() if now >= self._asked_at.get(what, now - 1e9) + every[place]]
        if self._is_recovering:
            found += [what for what in ("nodes", "plan", "recoveries") if what not in found]
        self._asked_at |= dict.fromkeys(found, now)
        return found

    @property
    def is_busy(self) -> bool:
        return self._is_busy or self._is_recovering

    def wait_s(self, cost_s: float, num_told: int, load: float) -> float:
        """Until the next look. ``cost_s``: what the last one took of the gateway's time; ``num_told``: how many events
        it made, of which there are at most ten a second; ``load``: the part of a core that the gateway uses."""
        least_s = (BUSY_S if self.is_busy else IDLE_S) * max(1, num_told)
        if load >= PRESSED:
            return min(MAX_S, max(least_s, PRESSED_S, cost_s / SHARE))
        return min(MAX_S, max(least_s, cost_s / ROOMY_SHARE))

    def ask_again(self, what: What) -> None:
        """What was told of it is out of date: it is asked at the next look."""
        self._asked_at.pop(what, None)

    def ask_all(self) -> None:
        """Nothing that was known counts: all is asked at the next look."""
        self._asked_at.clear()


@dataclass(slots=True)
class Load:
    """How much of a core this process uses, since the last time it was asked."""

    _cpu_s: float = 0.0
    _at: float = 0.0

    def now(self, cpu_s: float, at: float) -> float:
        """``cpu_s``: processor time until now; ``at``: on a clock that only goes forward."""
        used_s, passed_s = cpu_s - self._cpu_s, at - self._at
        self._cpu_s, self._at = cpu_s, at
        return used_s / passed_s if passed_s > 0 else 0.0

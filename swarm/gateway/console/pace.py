"""What the broker is asked at a look, and when the next look is. Pure: times go in.

While something is under way there are ten looks a second, else two. Each report is asked for as often as it can have
news: workers and the plan when the status shows that they may have changed, and now and then in any case. Looking must
not slow down what is looked at: where a look costs much, and all the more where the gateway has its hands full, the
next one waits until the looks together take no more than their share of the time. What is dear is the list of requests
(a thousand of them cost ten times all else): a gateway that has its hands full asks for it by itself, more seldom, so
that stages, rates and recoveries are told as ever.

A recovery's phases take some tens of milliseconds each. To tell them one by one, looks come quickly for a moment: from
an order on, which may bring one about, or from when the plan in force is gone, to the recovery's end. Such a look asks
for little. Whatever happens, no more than ``MAX_TOLD`` events are told in any second: so reports are asked for at the
same looks, and what happened waits where phases would have to wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from swarm.wire.messages import Json

QUICK_S: Final = 0.02
BUSY_S: Final = 0.1
IDLE_S: Final = 0.5
QUICK_FOR_S: Final = 2.0  # what takes longer is told well enough by the usual looks
AWAY_S: Final = 2.0  # without an answer, until a broker that is connected counts as away: a busy one takes its time
PATIENCE_S: Final = 0.5  # the same for one that is not connected
PRESSED: Final = 0.2  # of a core that a gateway uses; above, its time is its answers', and it may get no more
# Of a pressed gateway's time, for making views, and for lists of requests; asking for them takes more than that again.
SHARE: Final = 1 / 600
LIST_SHARE: Final = 1 / 1200
LEAST_LOAD: Final = 0.5  # a share is of the processor time that the gateway uses, though at least of so much of a core
MAX_LIST_S: Final = 6.0  # between two lists of requests, whatever they cost
PRESSED_S: Final = 0.35  # between its looks, at least
ROOMY_SHARE: Final = 1 / 50  # the same of one that has time left
QUICK_SHARE: Final = 1 / 10  # for a moment only, in which the swarm makes no tokens
MAX_S: Final = 2.0  # between two looks, whatever they cost
MAX_TOLD: Final = 10  # events in any second
SPARE: Final = 4  # of them left to phases that tick off
CALM_S: Final = 0.3  # at least between what else is told while they do

What = Literal["status", "nodes", "plan", "recoveries", "stats", "requests"]
# How often in any case, beside the status: while nothing is under way, something is, a recovery is.
_IDLE: Final[Mapping[What, float]] = {"stats": 1.0, "nodes": 1.0, "plan": 5.0, "recoveries": 5.0, "requests": 2.0}
# (0.25 is three looks of 0.1, 0.55 is six: what is due comes at the same looks.)
_BUSY: Final[Mapping[What, float]] = {"stats": 0.55, "nodes": 1.15, "plan": 1.15, "recoveries": 2.35, "requests": 0.25}
_RECOVERING: Final[Mapping[What, float]] = {**_BUSY, "nodes": BUSY_S, "plan": BUSY_S, "recoveries": 0.0}
_OF_PLANS: Final = ("state", "waits_for", "epoch", "num_workers", "num_stages", "loading", "model")
_OF_CHANGES: Final = ("state", "epoch")
_OF_REQUESTS: Final = ("num_running", "num_queued", "num_requests")
_OF_WORK: Final = ("num_running", "num_queued", "loading")


@dataclass(slots=True)
class Pace:
    """One for a watch."""

    _asked_at: dict[What, float] = field(default_factory=dict)
    _status: Json = field(default_factory=dict)
    _is_recovering: bool = False
    _quick_until: float = 0.0
    _list_from: float = 0.0  # before, the requests are not asked for
    _plain_s: float = 0.0  # what the last look without them took
    _told_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TOLD))

    def heard(self, status: Json, now: float, *, is_recovering: bool) -> None:
        """The status is asked at each look. ``is_recovering``: as far as is known."""
        if self._differs(status, _OF_PLANS):
            for what in ("nodes", "plan", "recoveries"):
                self.ask_again(what)
        if self._differs(status, _OF_REQUESTS):
            self.ask_again("requests")
        if self._status and self._differs(status, _OF_CHANGES):
            self.hurry(now)
        if is_recovering != self._is_recovering:
            self._quick_until = now + QUICK_FOR_S if is_recovering else 0.0
        self._status, self._is_recovering = status, is_recovering

    def _differs(self, status: Json, names: Sequence[str]) -> bool:
        return any(status.get(name) != self._status.get(name) for name in names)

    def hurry(self, now: float) -> None:
        """Something happens that is to be told from its beginning on."""
        self._quick_until = now + QUICK_FOR_S

    def due(self, now: float) -> list[What]:
        """Beside the status. Counts as asked."""
        every = _RECOVERING if self._is_recovering else _BUSY if self.is_busy else _IDLE
        found = [what for what, each_s in every.items() if now >= self._asked_at.get(what, now - 1e9) + each_s]
        if "requests" in found and now < self._list_from:
            found.remove("requests")
        if self._is_quick(now) and "recoveries" not in found:
            found.append("recoveries")
        self._asked_at |= dict.fromkeys(found, now)
        return found

    @property
    def is_busy(self) -> bool:
        status = self._status
        is_served = status.get("state") == "serving" and not any(status.get(name) for name in _OF_WORK)
        return self._is_recovering or not is_served

    def _is_quick(self, now: float) -> bool:
        return now < self._quick_until

    def told(self, num_events: int, now: float) -> None:
        self._told_at.extend([now] * num_events)

    def may_tell(self, now: float, *, is_of_recoveries: bool) -> bool:
        """Whether what is different may be told, or waits, to be told with what follows."""
        if is_of_recoveries or not self._is_quick(now) or not self._told_at:
            return True
        return now >= self._told_at[-1] + CALM_S

    def may_tell_news(self, now: float) -> bool:
        """Whether there is room for what happened, beside what is different."""
        num_late = sum(at > now - 1.0 for at in self._told_at)
        return MAX_TOLD - num_late > (SPARE if self._is_quick(now) else 1)

    def took(self, cost_s: float, load: float, now: float, *, has_requests: bool) -> float:
        """What of a look's cost counts for when the next one is: not the list, which waits for a look of its own."""
        if not has_requests:
            self._plain_s = cost_s
        elif load >= PRESSED:
            dear_s = max(0.0, cost_s - self._plain_s)
            self._list_from = now + min(MAX_LIST_S, dear_s / (LIST_SHARE * _used(load)))
            return min(cost_s, self._plain_s)
        return cost_s

    def wait_s(self, now: float, cost_s: float, load: float) -> float:
        """From one look's beginning to the next one's. ``cost_s``: what it took of the gateway's time; ``load``: the
        part of a core that the gateway uses."""
        return max(self._until_room_s(now), self._rest_s(now, cost_s, load))

    def _rest_s(self, now: float, cost_s: float, load: float) -> float:
        if self._is_quick(now):
            return min(MAX_S, max(QUICK_S, cost_s / QUICK_SHARE))
        least_s = BUSY_S if self.is_busy else IDLE_S
        if load >= PRESSED:
            return min(MAX_S, max(least_s, max(PRESSED_S, cost_s / SHARE) / _used(load)))
        return min(MAX_S, max(least_s, cost_s / ROOMY_SHARE))

    def _until_room_s(self, now: float) -> float:
        """Until there is room for what is different."""
        return max(0.0, self._told_at[0] + 1.0 - now) if len(self._told_at) == MAX_TOLD else 0.0

    def ask_again(self, what: What) -> None:
        """What was told of it is out of date: it is asked at the next look."""
        self._asked_at.pop(what, None)

    def ask_all(self) -> None:
        """Nothing that was known counts: all is asked at the next look."""
        self._asked_at.clear()
        self._list_from = 0.0


def _used(load: float) -> float:
    """Of a core, for what shares are taken of."""
    return min(1.0, max(LEAST_LOAD, load))


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

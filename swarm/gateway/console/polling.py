"""Poll schedule: which reports a poll of the broker requests, and when the next poll is. Pure: times are passed in.

While work is in progress there are ten polls a second, otherwise two. Each report is requested as often as it can
change: workers and the plan when the status shows that they may have changed, and from time to time in any case.
Polling must not slow down the swarm: where a poll is expensive, and even more where the gateway is busy, the next one
waits until polls together take no more than their share of the time. The most expensive report is the list of requests
(a thousand of them cost ten times as much as everything else), so a busy gateway requests it separately and less often;
stages, rates and recoveries are updated as usual.

Each phase of a recovery takes some tens of milliseconds. To show phases one by one, polls come quickly for a short
time: after a command, which may cause a recovery, or from the loss of the active plan, until the recovery ends. Such a
poll requests few reports. In any case, at most ``MAX_EVENTS_PER_S`` events are sent in any second. Therefore reports
are requested in the same polls, and other events wait where they would delay phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from swarm.wire.messages import Json

QUICK_S: Final = 0.02  # seconds between quick polls
BUSY_S: Final = 0.1  # seconds between polls while work is in progress
IDLE_S: Final = 0.5  # seconds between polls otherwise
QUICK_FOR_S: Final = 2.0  # seconds of quick polls; the usual polls are enough for anything longer
AWAY_S: Final = 2.0  # seconds without an answer until a connected broker counts as away; a busy one takes its time
PATIENCE_S: Final = 0.5  # the same for a broker that is not connected
BUSY_LOAD: Final = 0.2  # share of a core; a gateway that uses more needs its time for answers, and may get no more
# Shares of a busy gateway's time, for making views and for lists of requests. Requesting them takes the same again or
# more.
SHARE: Final = 1 / 600
LIST_SHARE: Final = 1 / 1200
# Shares refer to the processor time that the gateway uses, but at least to this share of a core.
MIN_LOAD: Final = 0.5
MAX_LIST_S: Final = 6.0  # longest time between two lists of requests, whatever they cost
BUSY_LOAD_POLL_S: Final = 0.35  # shortest time between polls of a busy gateway
IDLE_SHARE: Final = 1 / 50  # share of time for polls of a gateway that is not busy
QUICK_SHARE: Final = 1 / 10  # share of time for quick polls; brief, and the swarm generates no tokens then
MAX_S: Final = 2.0  # longest time between two polls, whatever they cost
MAX_EVENTS_PER_S: Final = 10  # events in any second
RESERVED_EVENTS: Final = 4  # of these, reserved for phases of a recovery
CHANGES_GAP_S: Final = 0.3  # seconds between other updates during a recovery

ReportName = Literal["status", "nodes", "plan", "recoveries", "stats", "requests"]
# Longest interval of each report besides the status: while idle, while busy, and during a recovery.
_IDLE: Final[Mapping[ReportName, float]] = {"stats": 1.0, "nodes": 1.0, "plan": 5.0, "recoveries": 5.0, "requests": 2.0}
# (0.25 is three polls of 0.1, 0.55 is six: reports that are due are requested in the same polls.)
_BUSY: Final[Mapping[ReportName, float]] = {
    "stats": 0.55,
    "nodes": 1.15,
    "plan": 1.15,
    "recoveries": 2.35,
    "requests": 0.25,
}
_RECOVERING: Final[Mapping[ReportName, float]] = {**_BUSY, "nodes": BUSY_S, "plan": BUSY_S, "recoveries": 0.0}
# fields of a status whose change may mean a change of workers or plan
_OF_PLANS: Final = ("state", "waits_for", "epoch", "num_workers", "num_stages", "loading", "model")
_OF_CHANGES: Final = ("state", "epoch")  # fields whose change starts quick polls
# fields whose change means a change of the list of requests
_OF_REQUESTS: Final = ("num_running", "num_queued", "num_requests")
_OF_WORK: Final = ("num_running", "num_queued", "loading")  # fields that are non-zero while there is work


@dataclass(slots=True)
class PollSchedule:
    """Poll schedule of a poller."""

    _requested_at: dict[ReportName, float] = field(default_factory=dict)  # time of each report's last request
    _status: Json = field(default_factory=dict)
    _is_recovering: bool = False
    _quick_until: float = 0.0  # quick polls end then
    _list_from: float = 0.0  # time before which the list of requests is not requested
    _cost_without_list_s: float = 0.0  # cost of the last poll without that list
    # times of the last events sent
    _sent_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS_PER_S))

    def on_status(self, status: Json, now: float, *, is_recovering: bool) -> None:
        """Handle the status, which every poll requests. ``is_recovering``: whether a recovery is in progress, as far as
        the gateway has been informed."""
        if self._differs(status, _OF_PLANS):
            for what in ("nodes", "plan", "recoveries"):
                self.request_again(what)
        if self._differs(status, _OF_REQUESTS):
            self.request_again("requests")
        if self._status and self._differs(status, _OF_CHANGES):
            self.poll_quickly(now)
        if is_recovering != self._is_recovering:
            self._quick_until = now + QUICK_FOR_S if is_recovering else 0.0
        self._status, self._is_recovering = status, is_recovering

    def _differs(self, status: Json, names: Sequence[str]) -> bool:
        return any(status.get(name) != self._status.get(name) for name in names)

    def poll_quickly(self, now: float) -> None:
        """Poll quickly for a while, to show an event from its beginning."""
        self._quick_until = now + QUICK_FOR_S

    def take_due(self, now: float) -> list[ReportName]:
        """Return the reports to request besides the status, and record them as requested."""
        every = _RECOVERING if self._is_recovering else _BUSY if self.is_busy else _IDLE
        reports = [what for what, each_s in every.items() if now >= self._requested_at.get(what, now - 1e9) + each_s]
        if "requests" in reports and now < self._list_from:
            reports.remove("requests")
        if self._is_quick(now) and "recoveries" not in reports:
            reports.append("recoveries")
        self._requested_at |= dict.fromkeys(reports, now)
        return reports

    @property
    def is_busy(self) -> bool:
        status = self._status
        is_served = status.get("state") == "serving" and not any(status.get(name) for name in _OF_WORK)
        return self._is_recovering or not is_served

    def _is_quick(self, now: float) -> bool:
        return now < self._quick_until

    def record_sent(self, num_events: int, now: float) -> None:
        self._sent_at.extend([now] * num_events)

    def may_send_changes(self, now: float, *, is_of_recoveries: bool) -> bool:
        """Whether changes may be sent now; otherwise they wait for later changes."""
        if is_of_recoveries or not self._is_quick(now) or not self._sent_at:
            return True
        return now >= self._sent_at[-1] + CHANGES_GAP_S

    def may_send_events(self, now: float) -> bool:
        """Whether the event limit allows sending what happened, besides changes."""
        num_late = sum(at > now - 1.0 for at in self._sent_at)
        return MAX_EVENTS_PER_S - num_late > (RESERVED_EVENTS if self._is_quick(now) else 1)

    def charge(self, cost_s: float, load: float, now: float, *, has_requests: bool) -> float:
        """Return the part of a poll's cost that delays the next poll. The cost of the list of requests instead delays
        the next list."""
        if not has_requests:
            self._cost_without_list_s = cost_s
        elif load >= BUSY_LOAD:
            dear_s = max(0.0, cost_s - self._cost_without_list_s)
            self._list_from = now + min(MAX_LIST_S, dear_s / (LIST_SHARE * _charged_load(load)))
            return min(cost_s, self._cost_without_list_s)
        return cost_s

    def wait_s(self, now: float, cost_s: float, load: float) -> float:
        """Return the time from the start of one poll to the start of the next. ``cost_s``: processor time of the
        gateway that the poll took; ``load``: share of a core that the gateway uses."""
        return max(self._until_allowed_s(now), self._pause_s(now, cost_s, load))

    def _pause_s(self, now: float, cost_s: float, load: float) -> float:
        if self._is_quick(now):
            return min(MAX_S, max(QUICK_S, cost_s / QUICK_SHARE))
        least_s = BUSY_S if self.is_busy else IDLE_S
        if load >= BUSY_LOAD:
            return min(MAX_S, max(least_s, max(BUSY_LOAD_POLL_S, cost_s / SHARE) / _charged_load(load)))
        return min(MAX_S, max(least_s, cost_s / IDLE_SHARE))

    def _until_allowed_s(self, now: float) -> float:
        """Return the time until the event limit allows another event."""
        return max(0.0, self._sent_at[0] + 1.0 - now) if len(self._sent_at) == MAX_EVENTS_PER_S else 0.0

    def request_again(self, what: ReportName) -> None:
        """Request a report at the next poll, since the last one is out of date."""
        self._requested_at.pop(what, None)

    def request_all(self) -> None:
        """Request all reports at the next poll: none of the earlier ones is valid."""
        self._requested_at.clear()
        self._list_from = 0.0


def _charged_load(load: float) -> float:
    """Return the load of this process, bounded, as the basis for the share of time that polls may take."""
    return min(1.0, max(MIN_LOAD, load))


@dataclass(slots=True)
class LoadMeter:
    """Meter of the share of a core that this process uses."""

    _cpu_s: float = 0.0
    _at: float = 0.0

    def measure(self, cpu_s: float, at: float) -> float:
        """Return the load since the last call. ``cpu_s``: processor time used so far; ``at``: time of a monotonic
        clock."""
        used_s, passed_s = cpu_s - self._cpu_s, at - self._at
        self._cpu_s, self._at = cpu_s, at
        return used_s / passed_s if passed_s > 0 else 0.0

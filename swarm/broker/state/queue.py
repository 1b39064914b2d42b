"""Sequences that wait for KV blocks, in the order in which they are admitted.

Three rules, one inside the other:

* *Class.* A sequence of a higher priority is always admitted first.
* *Share.* Within a class, the tenant with the least service is next. Each tenant is charged for the tokens computed
  for it in any class, so a thousand waiting sequences weigh no more than one. A tenant that returns after a pause is
  raised to the level of the tenant served now: idle time earns no credit.
* *Deadline.* Among the sequences of one tenant, the earliest deadline is first, then the earliest arrival. A
  preempted sequence keeps the position of its arrival.

Adding, popping and removing cost O(log n). A sequence that is removed out of turn leaves a tombstone in its heap until
its turn comes, or until there are more tombstones than sequences.

The module also has the requests that wait for the journal (``AwaitingJournal``), the clients that were asked to retry
later (``RetryAfter``), and the times at which requests must be checked again (``RequestTimers``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.broker.state.sequences import Request, Sequence

NO_DEADLINE = float("inf")
MAX_IDLE_TENANTS = 1024
MIN_TOMBSTONES = 64


@dataclass(slots=True, eq=False)
class Tenant:
    """Service that one tenant has received, in tokens, and the number of its waiting sequences."""

    name: str
    served: float = 0.0
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence's entry in a heap; a tombstone if ``sequence`` is None."""

    sequence: Sequence | None
    tenant: Tenant
    priority: int
    num_known: int  # known tokens when it was added
    num_open: int  # tokens that could still be added, when it was added


_Heap = list[tuple[float, int, int, _Entry]]  # (deadline, arrival, tie breaker, entry)


@dataclass(slots=True)
class _Class:
    """One priority: its tenants, the least served first, and the waiting sequences of each."""

    turns: list[tuple[float, int, Tenant]] = field(default_factory=list)
    heaps: dict[str, _Heap] = field(default_factory=dict)
    num_waiting: int = 0


class WaitingQueue:
    """Waiting sequences, ordered by class, share and deadline (see the module). ``aside`` holds sequences that the
    active plan could not hold even alone. They count as waiting, but are not popped until the plan changes."""

    def __init__(self) -> None:
        self.aside: dict[int, Sequence] = {}
        self._classes: dict[int, _Class] = {}
        self._tenants: dict[str, Tenant] = {}
        self._entries: dict[int, _Entry] = {}
        self._num_tombstones = 0
        self._level = 0.0  # service of the tenant that was popped last
        self._ties = count()  # breaks ties in heaps, so that entries are never compared
        self._num_known = 0
        self._num_open = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self.aside)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._entries or sequence.id in self.aside

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences by class and arrival. Sorts the whole queue, so no step uses it."""
        waiting = [entry.sequence for entry in self._entries.values() if entry.sequence is not None]
        return iter(sorted([*waiting, *self.aside.values()], key=lambda s: (-s.priority, s.id)))

    # --- adding and removing -----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        tenant = self._get_tenant(sequence.request.tenant)
        if not tenant.num_waiting:
            tenant.served = max(tenant.served, self._level)
        num_known = sequence.sampled
        entry = _Entry(sequence, tenant, sequence.priority, num_known, sequence.max_remaining)
        self._entries[sequence.id] = entry
        tenant.num_waiting += 1
        self._num_known += entry.num_known
        self._num_open += entry.num_open
        group = self._classes.setdefault(entry.priority, _Class())
        group.num_waiting += 1
        heap = group.heaps.get(tenant.name)
        if heap is None:
            heap = group.heaps[tenant.name] = []
            heappush(group.turns, (tenant.served, next(self._ties), tenant))
        deadline = sequence.request.deadline_at
        heappush(heap, (NO_DEADLINE if deadline is None else deadline, sequence.id, next(self._ties), entry))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; an unknown one is no error."""
        if self.aside.pop(sequence.id, None) is not None:
            return
        entry = self._entries.get(sequence.id)
        if entry is not None:
            self._detach(entry, sequence)
            entry.sequence = None
            self._num_tombstones += 1
            if self._num_tombstones > max(MIN_TOMBSTONES, len(self._entries)):
                self._drop_tombstones()

    def pop(self) -> Sequence | None:
        """Remove and return the next sequence; None if no sequence is eligible."""
        for priority in sorted(self._classes, reverse=True):
            group = self._classes[priority]
            sequence = self._pop_from(group)
            if not group.heaps:
                del self._classes[priority]
            if sequence is not None:
                return sequence
        return None

    def set_aside(self, sequence: Sequence) -> None:
        self.aside[sequence.id] = sequence

    def restore_aside(self) -> None:
        """Make the sequences that were set aside eligible again: the plan has changed and may hold them."""
        aside, self.aside = self.aside, {}
        for sequence in aside.values():
            self.add(sequence)

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def highest_class(self) -> int | None:
        """The highest class with an eligible sequence."""
        return max((priority for priority, group in self._classes.items() if group.num_waiting), default=None)

    def pending_tokens(self, fill: float) -> float:
        """Return the tokens to compute for all eligible sequences, if answers reach the fraction ``fill`` of their
        maximum length."""
        return self._num_known + fill * self._num_open

    def counts_by_class(self) -> dict[int, int]:
        return {priority: group.num_waiting for priority, group in self._classes.items() if group.num_waiting}

    def num_waiting(self, tenant: str) -> int:
        """Return the number of this tenant's waiting sequences, those set aside included."""
        account = self._tenants.get(tenant)
        num_set_aside = sum(sequence.request.tenant == tenant for sequence in self.aside.values())
        return num_set_aside + (0 if account is None else account.num_waiting)

    def seconds_until_given_up(self, num_places: int, patience_s: float) -> float:
        """Return the seconds after which ``num_places`` of the sequences set aside (or all) will have been given up, if
        the plan does not change."""
        left = sorted(max(0.0, patience_s - sequence.unfit_s) for sequence in self.aside.values())
        return left[min(num_places, len(left)) - 1] if left and num_places > 0 else 0.0

    def loads_by_tenant(self) -> list[tuple[str, int, float]]:
        """Return (tenant, number of waiting sequences, tokens served), the longest queue first."""
        loads = [(t.name, t.num_waiting, t.served) for t in self._tenants.values()]
        return sorted(loads, key=lambda item: (-item[1], -item[2], item[0]))

    def charge(self, tenant: str, tokens: int) -> None:
        """Add computed tokens to a tenant's service."""
        self._get_tenant(tenant).served += tokens

    # --- inside ------------------------------------------------------------------------------------------------------

    def _get_tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_IDLE_TENANTS:
                self._evict_idle_tenants()
            tenant = self._tenants[name] = Tenant(name, self._level)
        return tenant

    def _evict_idle_tenants(self) -> None:
        """Drop half of the tenants that have nothing waiting. A dropped tenant restarts at the current level, which is
        an advantage for a tenant above that level; therefore the least served half is dropped."""
        named = {name for group in self._classes.values() for name in group.heaps}
        idle = sorted((t for t in self._tenants.values() if t.name not in named), key=lambda t: t.served)
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._tenants[tenant.name]

    def _pop_from(self, group: _Class) -> Sequence | None:
        while group.turns:
            served, _, tenant = group.turns[0]
            heap = group.heaps[tenant.name]
            while heap and heap[0][3].sequence is None:
                heappop(heap)
                self._num_tombstones -= 1
            if not heap:
                heappop(group.turns)
                del group.heaps[tenant.name]
                continue
            if served < tenant.served:  # its service has grown since it was pushed: reinsert it
                heapreplace(group.turns, (tenant.served, next(self._ties), tenant))
                continue
            entry = heappop(heap)[3]
            sequence = entry.sequence
            assert sequence is not None
            self._detach(entry, sequence)
            if not heap:
                heappop(group.turns)
                del group.heaps[tenant.name]
            self._level = max(self._level, tenant.served)
            return sequence
        return None

    def _detach(self, entry: _Entry, sequence: Sequence) -> None:
        del self._entries[sequence.id]
        entry.tenant.num_waiting -= 1
        self._classes[entry.priority].num_waiting -= 1
        self._num_known -= entry.num_known
        self._num_open -= entry.num_open

    def _drop_tombstones(self) -> None:
        """Drop all tombstones. Runs when there are more tombstones than sequences: constant cost per removal."""
        self._num_tombstones = 0
        for priority, group in list(self._classes.items()):
            for name, heap in list(group.heaps.items()):
                heap[:] = [item for item in heap if item[3].sequence is not None]
                heapify(heap)
                if not heap:
                    del group.heaps[name]
            group.turns = [turn for turn in group.turns if turn[2].name in group.heaps]
            heapify(group.turns)
            if not group.heaps:
                del self._classes[priority]


class AwaitingJournal:
    """Sequences of requests that the journal does not have yet. They count against the queue's limits, even if
    cancelled, until the journal answers."""

    def __init__(self) -> None:
        self._tenants: dict[tuple[int, ...], str] = {}
        self._nums: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._nums.total()

    def add(self, request: Request) -> None:
        self._tenants[tuple(s.id for s in request.sequences)] = request.tenant
        self._nums[request.tenant] += len(request.sequences)

    def clear(self) -> None:
        self._tenants.clear()
        self._nums.clear()

    def remove(self, sequences: tuple[int, ...]) -> None:
        """Remove the sequences of one request, which the journal has now; unknown ones are no error."""
        tenant = self._tenants.pop(sequences, None)
        if tenant is None:
            return
        self._nums[tenant] -= len(sequences)
        if not self._nums[tenant]:
            del self._nums[tenant]

    def num_waiting(self, tenant: str) -> int:
        return self._nums[tenant]


MIN_TIMERS = 1024  # with fewer timers, ``drop_stale`` does nothing
MAX_RETRY_TIMES = 256  # clients whose retry time is remembered


class RequestTimers:
    """Times at which something may be due for a request. The caller checks whether it still is.

    A timer is not removed when its request ends, so popping costs only what is due. Timers of ended requests, which may
    lie a year ahead, are dropped together once they may be half of all timers. Timers hold ids, so they keep no request
    alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._tidy_threshold = MIN_TIMERS

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, request_id: str) -> None:
        heappush(self._heap, (at, request_id))

    def shift_deadlines(self, pause_s: float) -> None:
        """Postpone all timers by the length of a pause of the broker. Their order does not change."""
        self._heap = [(at + pause_s, request_id) for at, request_id in self._heap]

    def drop_stale(self, alive: Container[str]) -> None:
        """Drop the timers of requests that are gone, if the number of timers has doubled since the last time:
        amortised, each timer is visited once or twice."""
        if len(self._heap) > self._tidy_threshold:
            self._heap = [timer for timer in self._heap if timer[1] in alive]
            heapify(self._heap)
            self._tidy_threshold = max(MIN_TIMERS, 2 * len(self._heap))

    def pop_due(self, now: float) -> Iterator[str]:
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]


@dataclass(slots=True)
class RetryAfter:
    """Retry times of rejected clients. Each client has a time of its own, because places become free one after the
    other. A client that retries early keeps its time, so frequent retries gain nothing. No time lies beyond the moment
    at which the queue drains."""

    times: dict[bytes, float] = field(default_factory=dict)

    def schedule(self, client: bytes, places: int, interval_s: float, drain_s: float, now: float) -> float:
        """Return the seconds after which ``places`` places will be free for this client, if one becomes free per
        ``interval_s`` and all are free after ``drain_s``."""
        latest = now + drain_s
        own = self.times.get(client)
        if own is None:
            self.times = {other: at for other, at in self.times.items() if at > now}
            if len(self.times) >= MAX_RETRY_TIMES:
                return drain_s
            own = max(self.times.values(), default=now) + places * interval_s
        self.times[client] = min(latest, max(own, now + places * interval_s))
        return self.times[client] - now

    def forget(self, client: bytes) -> None:
        """Forget a client that was admitted."""
        self.times.pop(client, None)

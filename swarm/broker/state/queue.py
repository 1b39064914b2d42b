"""Who waits for room in the stages, and whose turn it is.

Three rules, one inside the other:

* *Class.* A higher priority goes first, always.
* *Share.* Inside a class the tenant goes first that was given least: each has an account of the tokens computed for
  it, whatever their class, and a thousand waiting sequences weigh no more than one. Who comes back after a pause starts
  level with the one that is served now: silence earns nothing.
* *Deadline.* Of one tenant, the earliest deadline goes first, then who came first. Who had to give room back keeps the
  place in this order that its arrival gave it.

Adding, taking and removing cost O(log n). What is removed out of turn stays in its heap as a husk until its turn
comes, or until there are more husks than sequences.

Beside the queue stand those whom the journal does not have yet (``Unwritten``), those who were told to come back
(``TurnedAway``), and the moments at which requests are to be looked at again (``Timers``).
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
MIN_HUSKS = 64


@dataclass(slots=True, eq=False)
class Tenant:
    """What one tenant was given, in tokens; and how many of its sequences wait."""

    name: str
    served: float = 0.0
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence's place. ``sequence`` None: a husk. The work is as it was when it came."""

    sequence: Sequence | None
    tenant: Tenant
    priority: int
    num_known: int
    num_open: int


_Heap = list[tuple[float, int, int, _Entry]]  # (deadline, arrival, tie, who)


@dataclass(slots=True)
class _Class:
    """One priority: the tenants that wait in it, least served first, and what each has waiting."""

    turns: list[tuple[float, int, Tenant]] = field(default_factory=list)
    heaps: dict[str, _Heap] = field(default_factory=dict)
    num_waiting: int = 0


class Queue:
    """See the module's text. ``aside`` are those that the plan in force could not hold even alone: they wait too, but
    have no turn before there is another plan."""

    def __init__(self) -> None:
        self.aside: dict[int, Sequence] = {}
        self._classes: dict[int, _Class] = {}
        self._tenants: dict[str, Tenant] = {}
        self._entries: dict[int, _Entry] = {}
        self._num_husks = 0
        self._level = 0.0  # what the tenant had been given that was served last
        self._ties = count()
        self._num_known = 0
        self._num_open = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self.aside)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._entries or sequence.id in self.aside

    def __iter__(self) -> Iterator[Sequence]:
        """Go through all that wait, by class and arrival: for whoever looks at the whole queue, which no step does."""
        waiting = [entry.sequence for entry in self._entries.values() if entry.sequence is not None]
        return iter(sorted([*waiting, *self.aside.values()], key=lambda s: (-s.priority, s.id)))

    # --- coming and going --------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.request.tenant)
        if not tenant.num_waiting:
            tenant.served = max(tenant.served, self._level)
        num_known = sequence.sampled
        entry = _Entry(sequence, tenant, sequence.priority, num_known, sequence.most_to_come)
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
        """Take it out of the queue; an unknown one is no error."""
        if self.aside.pop(sequence.id, None) is not None:
            return
        entry = self._entries.get(sequence.id)
        if entry is not None:
            self._leave(entry, sequence)
            entry.sequence = None
            self._num_husks += 1
            if self._num_husks > max(MIN_HUSKS, len(self._entries)):
                self._sweep()

    def pop(self) -> Sequence | None:
        """Take the sequence whose turn it is out of the queue. None: nobody has one."""
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

    def bring_back(self) -> None:
        """Give those that were set aside a turn again: there is another plan, which may hold them."""
        aside, self.aside = self.aside, {}
        for sequence in aside.values():
            self.add(sequence)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def highest(self) -> int | None:
        """The highest class in which somebody has a turn."""
        return max((priority for priority, group in self._classes.items() if group.num_waiting), default=None)

    def work(self, fill: float) -> float:
        """Tokens to compute for all that have a turn, if answers come to this part of the length they were allowed."""
        return self._num_known + fill * self._num_open

    def by_class(self) -> dict[int, int]:
        return {priority: group.num_waiting for priority, group in self._classes.items() if group.num_waiting}

    def num_of(self, tenant: str) -> int:
        """How many of this tenant's sequences wait, those set aside included."""
        known = self._tenants.get(tenant)
        num_aside = sum(sequence.request.tenant == tenant for sequence in self.aside.values())
        return num_aside + (0 if known is None else known.num_waiting)

    def patience_left(self, num_places: int, patience_s: float) -> float:
        """In how many seconds so many of those set aside will have been given up, if no other plan comes; or all."""
        left = sorted(max(0.0, patience_s - sequence.unfit_s) for sequence in self.aside.values())
        return left[min(num_places, len(left)) - 1] if left and num_places > 0 else 0.0

    def by_tenant(self) -> list[tuple[str, int, float]]:
        """(tenant, how many wait, tokens given), the longest queue first."""
        found = [(t.name, t.num_waiting, t.served) for t in self._tenants.values()]
        return sorted(found, key=lambda item: (-item[1], -item[2], item[0]))

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant with what was computed for it."""
        self._tenant(tenant).served += tokens

    # --- inside ------------------------------------------------------------------------------------------------------

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_IDLE_TENANTS:
                self._forget_the_idle()
            tenant = self._tenants[name] = Tenant(name, self._level)
        return tenant

    def _forget_the_idle(self) -> None:
        """Whoever has nothing waiting; a tenant that is ahead would be the better for it, so half are enough."""
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
                self._num_husks -= 1
            if not heap:
                heappop(group.turns)
                del group.heaps[tenant.name]
                continue
            if served < tenant.served:
                heapreplace(group.turns, (tenant.served, next(self._ties), tenant))
                continue
            entry = heappop(heap)[3]
            sequence = entry.sequence
            assert sequence is not None
            self._leave(entry, sequence)
            if not heap:
                heappop(group.turns)
                del group.heaps[tenant.name]
            self._level = max(self._level, tenant.served)
            return sequence
        return None

    def _leave(self, entry: _Entry, sequence: Sequence) -> None:
        del self._entries[sequence.id]
        entry.tenant.num_waiting -= 1
        self._classes[entry.priority].num_waiting -= 1
        self._num_known -= entry.num_known
        self._num_open -= entry.num_open

    def _sweep(self) -> None:
        """Drop the husks: as often as there are as many of them as sequences, so each costs no more than its share."""
        self._num_husks = 0
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


class Unwritten:
    """Sequences of requests that the journal does not have yet. They wait at the door, and take places: also those that
    were cancelled meanwhile, until it answers."""

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
        """The journal has these of one request; unknown ones are no error."""
        tenant = self._tenants.pop(sequences, None)
        if tenant is None:
            return
        self._nums[tenant] -= len(sequences)
        if not self._nums[tenant]:
            del self._nums[tenant]

    def num_of(self, tenant: str) -> int:
        return self._nums[tenant]


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

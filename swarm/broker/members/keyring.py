"""Who is heard at the broker's own doors for beats and data, where these go by keys, and whose steps its relay passes
on; the shell is told whenever that changes.

* *Beats:* whoever said Hello. That its worker was put out since is no reason not to hear it: it is by its beats that
  the broker notices that it lives, and calls it back. A revoked key is heard no more.
* *Data:* the last stage of the plan that is being activated or in force. What a recheck comes to is told over the
  control connection, so that nobody else sends anything there.
* *Relay:* the stages of the plans in force and under way that can only be reached so.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from swarm.broker.actions import Admit, Relay
from swarm.broker.state import State

MAX_FORMER = 4096  # keys of workers that are members no more


@dataclass(slots=True)
class Keyring:
    """``own``: the broker's key; without one no doors go by keys, and nothing is told."""

    state: State
    own: str | None
    _known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _has_changed: bool = False
    _heard_at: dict[str, frozenset[str]] = field(default_factory=dict)  # by door, as it was told last
    _passed_on: frozenset[str] = frozenset()  # the tickets, as they were told last

    def add(self, key: str | None) -> None:
        """Somebody with this key has become a member."""
        if key is None or self.own is None:
            return
        self._has_changed |= key not in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MAX_FORMER + len(self.state.workers):
            members = {worker.hello.key for worker in self.state.workers.values() if not worker.is_gone}
            del self._known[next(former for former in self._known if former not in members)]

    def revoke(self, key: str) -> bool:
        """Was it one of a worker's?"""
        was_known = key in self._known
        self._has_changed |= was_known
        self._known.pop(key, None)
        return was_known

    def tells_apart(self, key: str, said: str | None) -> bool:
        """Whether who knocked with ``key`` is not the worker that introduced itself with ``said``."""
        return self.own is not None and key != (said or "")

    def changes(self) -> list[Admit | Relay]:
        """What doors are to be told now."""
        if self.own is None:
            return []
        current = self.state.book.current
        last = None if current is None else current.stages[-1].key
        wanted = {"data": frozenset() if last is None else frozenset((last,))}
        if self._has_changed:
            wanted["beat"] = frozenset(self._known)
            self._has_changed = False
        changed: list[Admit | Relay] = [
            Admit(door, keys) for door, keys in wanted.items() if keys != self._heard_at.get(door, frozenset())
        ]
        self._heard_at.update(wanted)
        coming = self.state.book.coming
        tickets = frozenset().union(*(plan.tickets for plan in (current, coming) if plan is not None))
        if tickets != self._passed_on:
            self._passed_on = tickets
            changed.append(Relay(tickets))
        return changed

"""Who is heard at the broker's own doors for beats and data, where these go by keys, and whose steps its relay passes
on; the shell is told whenever that changes.

* *Beats:* whoever said Hello. That its worker was put out since is no reason not to hear it: it is by its beats that
  the broker notices that it lives, and calls it back. A revoked key is heard no more.
* *Data:* the last stage of the plan that is being activated or in force. What a recheck comes to is told over the
  control connection, so that nobody else sends anything there.
* *Relay:* the stages of the plans in force and under way that can only be reached so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.actions import Admit, Relay
from swarm.broker.state import KeyBook, State

MAX_FORMER = 4096  # keys of workers that are members no more


@dataclass(slots=True)
class Keyring:
    """Keeps ``state.keys``. ``own``: the broker's key; without one no doors go by keys, and nothing is told."""

    state: State
    own: str | None
    book: KeyBook = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.state.keys

    def add(self, key: str | None) -> None:
        """Somebody with this key has become a member."""
        if key is None or self.own is None:
            return
        self.book.has_changed |= key not in self.book.known
        self.book.known[key] = None
        self.book.known.move_to_end(key)
        if len(self.book.known) > MAX_FORMER + len(self.state.workers):
            members = {worker.hello.key for worker in self.state.workers.values() if not worker.is_gone}
            del self.book.known[next(former for former in self.book.known if former not in members)]

    def revoke(self, key: str) -> bool:
        """Was it one of a worker's?"""
        was_known = key in self.book.known
        self.book.has_changed |= was_known
        self.book.known.pop(key, None)
        return was_known

    def tells_apart(self, key: str, said: str | None) -> bool:
        """Whether who knocked with ``key`` is not the worker that introduced itself with ``said``."""
        return self.own is not None and key != (said or "")

    def changes(self) -> list[Admit | Relay]:
        """Return what doors are to be told now."""
        if self.own is None:
            return []
        current = self.state.book.current
        last = None if current is None else current.stages[-1].key
        wanted = {"data": frozenset() if last is None else frozenset((last,))}
        if self.book.has_changed:
            wanted["beat"] = frozenset(self.book.known)
            self.book.has_changed = False
        changed: list[Admit | Relay] = [
            Admit(door, keys) for door, keys in wanted.items() if keys != self.book.heard_at.get(door, frozenset())
        ]
        self.book.heard_at.update(wanted)
        coming = self.state.book.coming
        tickets = frozenset().union(*(plan.tickets for plan in (current, coming) if plan is not None))
        if tickets != self.book.passed_on:
            self.book.passed_on = tickets
            changed.append(Relay(tickets))
        return changed

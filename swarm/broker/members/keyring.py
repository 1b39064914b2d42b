"""Worker keys that the broker's heartbeat and data sockets accept, where connections are authenticated by keys, and the
stages whose steps its relay forwards. The service is notified whenever these sets change.

* *Heartbeats:* every worker that has sent Hello. A worker that was put out since is still accepted: by its heartbeats
  the
  broker notices that it lives, and calls it back. A revoked key is no longer accepted.
* *Data:* the last stage of the plan that is being activated or active. The result of a recheck is sent over the control
  connection, so that no other worker sends anything to this socket.
* *Relay:* the stages of the active and the prepared plan that can be reached only through the relay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.actions import Admit, Relay
from swarm.broker.state import KeyBook, State

MAX_FORMER = 4096  # keys of former members


@dataclass(slots=True)
class Keyring:
    """Accepted keys. Owns ``state.keys``. ``own``: the broker's key; without it no socket checks keys, and no action
    results."""

    state: State
    own: str | None
    book: KeyBook = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.state.keys

    def add(self, key: str | None) -> None:
        """Accept the key of a new member."""
        if key is None or self.own is None:
            return
        self.book.has_changed |= key not in self.book.known
        self.book.known[key] = None
        self.book.known.move_to_end(key)
        if len(self.book.known) > MAX_FORMER + len(self.state.workers):
            members = {worker.hello.key for worker in self.state.workers.values() if not worker.is_gone}
            del self.book.known[next(former for former in self.book.known if former not in members)]

    def revoke(self, key: str) -> bool:
        """Remove a key. Returns whether it was a worker's."""
        was_known = key in self.book.known
        self.book.has_changed |= was_known
        self.book.known.pop(key, None)
        return was_known

    def tells_apart(self, key: str, said: str | None) -> bool:
        """Whether the key that authenticated the connection differs from the key that the worker named in its Hello
        (``said``)."""
        return self.own is not None and key != (said or "")

    def changes(self) -> list[Admit | Relay]:
        """Return the actions that bring the sockets and the relay up to date."""
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

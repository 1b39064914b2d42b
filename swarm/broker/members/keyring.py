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

from swarm.broker.actions import SetAllowedKeys, SetRelayTickets
from swarm.broker.state import KeyState, State

MAX_FORMER = 4096  # keys of former members


@dataclass(slots=True)
class Keyring:
    """Public keys that the broker's own sockets accept. Owns ``state.keys``. ``broker_key``: the broker's public key;
    None if the sockets check no keys, and then no action results."""

    state: State
    broker_key: str | None
    keys: KeyState = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.state.keys

    def add(self, key: str | None) -> None:
        """Accept the key of a new member."""
        if key is None or self.broker_key is None:
            return
        self.keys.must_resend |= key not in self.keys.accepted
        self.keys.accepted[key] = None
        self.keys.accepted.move_to_end(key)
        if len(self.keys.accepted) > MAX_FORMER + len(self.state.workers):
            members = {worker.hello.key for worker in self.state.workers.values() if not worker.is_gone}
            del self.keys.accepted[next(former for former in self.keys.accepted if former not in members)]

    def revoke(self, key: str) -> bool:
        """Remove a key. Returns whether it was a worker's."""
        was_known = key in self.keys.accepted
        self.keys.must_resend |= was_known
        self.keys.accepted.pop(key, None)
        return was_known

    def is_other_key(self, key: str, declared: str | None) -> bool:
        """Whether the key that authenticated the connection differs from the one declared in the worker's Hello."""
        return self.broker_key is not None and key != (declared or "")

    def pending_actions(self) -> list[SetAllowedKeys | SetRelayTickets]:
        """Return the actions that bring the sockets and the relay up to date."""
        if self.broker_key is None:
            return []
        current = self.state.plans.current
        last = None if current is None else current.stages[-1].key
        wanted = {"data": frozenset() if last is None else frozenset((last,))}
        if self.keys.must_resend:
            wanted["beat"] = frozenset(self.keys.accepted)
            self.keys.must_resend = False
        changed: list[SetAllowedKeys | SetRelayTickets] = [
            SetAllowedKeys(door, keys)
            for door, keys in wanted.items()
            if keys != self.keys.sent_keys.get(door, frozenset())
        ]
        self.keys.sent_keys.update(wanted)
        prepared = self.state.plans.upcoming
        tickets = frozenset().union(*(plan.tickets for plan in (current, prepared) if plan is not None))
        if tickets != self.keys.sent_tickets:
            self.keys.sent_tickets = tickets
            changed.append(SetRelayTickets(tickets))
        return changed

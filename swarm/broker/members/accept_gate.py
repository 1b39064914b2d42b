"""Resume accepting connections after the broker has run out of file descriptors.

A listening socket stops accepting by itself before the last descriptors are gone (``wire.transport``); connected peers
are still served. It accepts again after a pause, if enough descriptors are free: the reserve that new connections never
get, and a few more. The pause doubles while the descriptors keep running out, because many waiting peers would
otherwise use them up again immediately.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from swarm.broker.actions import CountDescriptors, Outbox, ResumeAccepting
from swarm.broker.events import AcceptStopped, DescriptorsCounted
from swarm.broker.state import AcceptState

PAUSE_S = 1.0
MAX_PAUSE_S = 8.0
# after accepting for this long, running out again counts as a new incident: a short pause, and a warning
QUIET_S = 20.0
MIN_FREE = 24  # descriptors: the reserve that no new connection gets, and a few for new connections
MAX_FREE = 64
FREE_DIVISOR = 16  # divisor of the descriptor limit


@dataclass(slots=True)
class AcceptGate:
    """Resumes accepting connections on all of the broker's listening sockets together, because they share the file
    descriptors."""

    accept_state: AcceptState
    out: Outbox

    def handle(self, event: AcceptStopped | DescriptorsCounted, now: float) -> None:
        match event:
            case AcceptStopped():
                self._on_stopped(event, now)
            case DescriptorsCounted(used, limit):
                if self.accept_state.closed and now >= self.accept_state.retry_at:
                    self._resume_if_possible(used, limit, now)

    def tick(self, now: float) -> None:
        if self.accept_state.closed and now >= self.accept_state.retry_at:
            self.out.append(CountDescriptors())

    def _on_stopped(self, event: AcceptStopped, now: float) -> None:
        reason, remedy = _describe_cause(event)
        if not self.accept_state.closed:
            is_new = not self.accept_state.num_closures or now - self.accept_state.opened_at > QUIET_S
            self.accept_state.pause_s = PAUSE_S if is_new else min(MAX_PAUSE_S, 2 * self.accept_state.pause_s)
            self.accept_state.closed_at = now
            self.accept_state.num_closures += 1
            fields: dict[str, object] = {"door": event.socket, "limit": event.limit, "reason": reason, "remedy": remedy}
            self.out.note("newcomers_wait", "warning" if is_new else "info", **fields)
        self.accept_state.closed.add(event.socket)
        self.accept_state.retry_at = now + self.accept_state.pause_s
        self.accept_state.reason = f"{reason}: {remedy}"
        doors = " and ".join(sorted(self.accept_state.closed))
        self.accept_state.problem = f"new connections wait at the {doors} port: {self.accept_state.reason}"

    def _resume_if_possible(self, used: int, limit: int, now: float) -> None:
        if limit - used < required_free(limit):
            self.accept_state.retry_at = now + PAUSE_S
            return
        self.out += [ResumeAccepting(door) for door in sorted(self.accept_state.closed)]
        self.accept_state.closed.clear()
        self.accept_state.problem = ""
        self.accept_state.closed_s += now - self.accept_state.closed_at
        self.accept_state.opened_at = now
        self.out.note("newcomers_let_in", after_s=round(now - self.accept_state.closed_at, 1), used=used, limit=limit)


def required_free(limit: int) -> int:
    """Return how many descriptors must be free before the sockets accept connections again."""
    return min(MAX_FREE, max(MIN_FREE, limit // FREE_DIVISOR))


def _describe_cause(event: AcceptStopped) -> tuple[str, str]:
    """Return why the socket stopped accepting (descriptors or memory ran out), and the remedy."""
    match event.code:
        case errno.EMFILE:
            return (
                f"all {event.limit} descriptors that the broker may have are in use",
                "raise its limit (LimitNOFILE= of its service, or ulimit -n), or disconnect clients",
            )
        case errno.ENFILE:
            return (
                "this machine has no descriptors left",
                "raise fs.file-max, or stop what opens the most files",
            )
        case _:
            return "this machine has no memory left for connections", "stop some processes, or add memory"

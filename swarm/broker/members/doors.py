"""Resume accepting connections after the broker has run out of file descriptors.

A listening socket stops accepting by itself before the last descriptors are gone (``wire.transport``); connected peers
are served on. It accepts again when enough descriptors are free: the reserve that new connections never get, and
somewhat more. Before that comes a pause, which doubles while the descriptors keep running out: many waiting peers would
otherwise use them up again immediately.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from swarm.broker.actions import CountDescriptors, OpenDoor, Outbox
from swarm.broker.events import DescriptorsCounted, DoorClosed
from swarm.broker.state import DoorBook

PAUSE_S = 1.0
MAX_PAUSE_S = 8.0
# after accepting for this long, running out again counts as a new incident: a short pause, and a warning
QUIET_S = 20.0
LEAST_ROOM = 24  # descriptors: the reserve that no new connection gets, and a few for new connections
MOST_ROOM = 64
ROOM_SHARE = 16  # divisor of the descriptor limit


@dataclass(slots=True)
class Doors:
    """Gate for all listening sockets of the broker together: they share the descriptors."""

    book: DoorBook
    out: Outbox

    def handle(self, event: DoorClosed | DescriptorsCounted, now: float) -> None:
        match event:
            case DoorClosed():
                self._closed(event, now)
            case DescriptorsCounted(used, limit):
                if self.book.closed and now >= self.book.look_at:
                    self._look(used, limit, now)

    def tick(self, now: float) -> None:
        if self.book.closed and now >= self.book.look_at:
            self.out.append(CountDescriptors())

    def _closed(self, event: DoorClosed, now: float) -> None:
        reason, remedy = _reason(event)
        if not self.book.closed:
            is_new = not self.book.times or now - self.book.opened_at > QUIET_S
            self.book.pause_s = PAUSE_S if is_new else min(MAX_PAUSE_S, 2 * self.book.pause_s)
            self.book.closed_at = now
            self.book.times += 1
            fields: dict[str, object] = {"door": event.door, "limit": event.limit, "reason": reason, "remedy": remedy}
            self.out.note("newcomers_wait", "warning" if is_new else "info", **fields)
        self.book.closed.add(event.door)
        self.book.look_at = now + self.book.pause_s
        self.book.reason = f"{reason}: {remedy}"
        doors = " and ".join(sorted(self.book.closed))
        self.book.problem = f"new connections wait at the {doors} port: {self.book.reason}"

    def _look(self, used: int, limit: int, now: float) -> None:
        if limit - used < room_for_opening(limit):
            self.book.look_at = now + PAUSE_S
            return
        self.out += [OpenDoor(door) for door in sorted(self.book.closed)]
        self.book.closed.clear()
        self.book.problem = ""
        self.book.closed_s += now - self.book.closed_at
        self.book.opened_at = now
        self.out.note("newcomers_let_in", after_s=round(now - self.book.closed_at, 1), used=used, limit=limit)


def room_for_opening(limit: int) -> int:
    """Return how many descriptors must be free before the sockets accept connections again."""
    return min(MOST_ROOM, max(LEAST_ROOM, limit // ROOM_SHARE))


def _reason(event: DoorClosed) -> tuple[str, str]:
    """Return what has run out, and the remedy."""
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

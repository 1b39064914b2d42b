"""The doors when there are no descriptors left for newcomers: what is told, and when they are opened again.

A door closes by itself before the last descriptors are gone (``wire.door``); who is connected is served on. It is
opened again when there is room for what newcomers never get and somewhat more, and not sooner than after a pause, which
doubles while that goes wrong: a crowd that waits outside would fill it again at once.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from swarm.broker.actions import CountDescriptors, OpenDoor, Outbox
from swarm.broker.events import DescriptorsCounted, DoorClosed
from swarm.broker.state import DoorBook

PAUSE_S = 1.0
MAX_PAUSE_S = 8.0
QUIET_S = 20.0  # open for so long, and the next time is a new matter: a short pause, and a warning
LEAST_ROOM = 24  # descriptors: those that no newcomer gets, and a few for newcomers
MOST_ROOM = 64
ROOM_SHARE = 16  # of the limit, one part in so many


@dataclass(slots=True)
class Doors:
    """Decides for all of them together: they share the descriptors."""

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
        self.book.problem = f"newcomers wait at the {doors} door: {self.book.reason}"

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
    """Count the descriptors that must be free before doors are opened again."""
    return min(MOST_ROOM, max(LEAST_ROOM, limit // ROOM_SHARE))


def _reason(event: DoorClosed) -> tuple[str, str]:
    """Say what is short, and what to do."""
    match event.code:
        case errno.EMFILE:
            return (
                f"all {event.limit} descriptors that the broker may have are in use",
                "raise its limit (LimitNOFILE= of its service, or ulimit -n), or end clients",
            )
        case errno.ENFILE:
            return "this machine has no descriptors left", "raise fs.file-max, or end whatever opens so many files"
        case _:
            return "this machine has no memory left for connections", "end something, or give it more memory"

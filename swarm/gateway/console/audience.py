"""What is told to those who may see the same: numbered, remembered for those who come back, never more than fits.

An audience has the view as all its readers have it who have heard the last number. A reader that names a number which
is remembered gets what came after it; any other one gets the whole view. Memory is bounded: old tellings are forgotten,
and who lags behind by more than ``MAX_WAITING`` gets a whole view instead of all that it missed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from swarm.gateway.console.patch import Tree, difference

REMEMBERED: Final = 600  # tellings: a minute at most
REMEMBERED_BYTES: Final = 1 << 19
MAX_WAITING: Final = 64  # tellings that a reader hasn't taken
KEPT_EVENTS: Final = 200
CLOCK: Final = "at"  # of a view: changes by the clock, and is told with what else has changed

_ID: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,12})")


@dataclass(slots=True)
class Audience:
    """``tenant``: whose requests its readers see; None: all. ``life``: no other audience's, ever. ``read_at``: when
    anybody last read it."""

    life: str
    tenant: str | None = None
    view: Tree = field(default_factory=dict)
    number: int = 0
    read_at: float = 0.0
    _tellings: deque[tuple[int, bytes]] = field(default_factory=deque)
    _num_bytes: int = 0

    def tell(self, view: Tree, events: Sequence[Tree] = ()) -> list[bytes]:
        """What readers who are up to date get: nothing, if all is as before."""
        told = []
        patch = difference(self.view, view)
        patch.pop(CLOCK, None)
        if patch:
            patch[CLOCK] = view.get(CLOCK)
            told.append(self._numbered("delta", patch))
            self.view = view
        if events:
            told.append(self._numbered("events", list(events)))
        return told

    def begin(self, view: Tree) -> None:
        """The first view, before anybody has heard anything."""
        self.view = view

    def whole(self, more: Mapping[str, Any], events: Sequence[Tree]) -> bytes:
        """All that there is to know: for who begins, and who lagged behind. ``more``: what only a whole view has."""
        told = self._event("snapshot", {**self.view, **more})
        return told + self._event("events", list(events)) if events else told

    def since(self, last_event_id: str) -> list[bytes] | None:
        """What a reader lacks who has heard this; None: that is not known any more."""
        match = _ID.fullmatch(last_event_id)
        if match is None or match[1] != self.life:
            return None
        number = int(match[2])
        oldest = self._tellings[0][0] if self._tellings else self.number + 1
        if not oldest - 1 <= number <= self.number:
            return None
        return [told for its, told in self._tellings if its > number]

    def _numbered(self, event: str, data: object) -> bytes:
        self.number += 1
        told = self._event(event, data)
        self._tellings.append((self.number, told))
        self._num_bytes += len(told)
        while len(self._tellings) > REMEMBERED or self._num_bytes > REMEMBERED_BYTES:
            self._num_bytes -= len(self._tellings.popleft()[1])
        return told

    def _event(self, event: str, data: object) -> bytes:
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self.life.encode(),
            self.number,
            event.encode(),
            msgspec.json.encode(data),
        )

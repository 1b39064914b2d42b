"""Broadcast of updates to viewers with the same permissions: numbered, buffered for readers that reconnect, and
bounded.

A broadcast holds the current view: the view of every reader that has received the last numbered update. A reader that
reconnects with a buffered number gets the updates after it; any other reader gets a full snapshot. The buffer is
bounded: old updates are dropped, and a reader with more than ``MAX_WAITING`` unread updates gets a snapshot instead.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from swarm.gateway.console.patch import Tree, diff

MAX_UPDATES: Final = 600  # updates in the buffer, enough for a minute
MAX_UPDATE_BYTES: Final = 1 << 19
MAX_WAITING: Final = 64  # unread updates of one reader
KEPT_EVENTS: Final = 200  # recent events sent with a snapshot
CLOCK: Final = "at"  # the view's timestamp: not a change by itself, but sent with other changes

_ID: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,12})")


@dataclass(slots=True)
class Broadcast:
    """Stream of updates to all readers with the same permission.

    ``tenant``: the readers see only requests of this tenant; None: all requests. ``broadcast_id``: a random, unique id.
    ``read_at``: time at which the broadcast last had a reader.
    """

    broadcast_id: str
    tenant: str | None = None
    view: Tree = field(default_factory=dict)  # the last view that was sent
    last_number: int = 0  # number of the last update
    read_at: float = 0.0
    _updates: deque[tuple[int, bytes]] = field(default_factory=deque)  # buffered updates by number
    _num_bytes: int = 0

    def publish(self, view: Tree, events: Sequence[Tree] = ()) -> list[bytes]:
        """Return the updates for readers that are up to date; empty if nothing has changed."""
        updates = []
        patch = diff(self.view, view)
        patch.pop(CLOCK, None)
        if patch:
            patch[CLOCK] = view.get(CLOCK)
            updates.append(self._add_update("delta", patch))
            self.view = view
        if events:
            updates.append(self._add_update("events", list(events)))
        return updates

    def set_first_view(self, view: Tree) -> None:
        """Set the first view, before there are readers."""
        self.view = view

    def snapshot(self, more: Mapping[str, Any], events: Sequence[Tree]) -> bytes:
        """Return a full snapshot, for a new reader or one that lagged behind. ``more``: fields that only a snapshot
        has."""
        encoded = self._encode_event("snapshot", {**self.view, **more})
        return encoded + self._encode_event("events", list(events)) if events else encoded

    def updates_since(self, last_event_id: str) -> list[bytes] | None:
        """Return the updates after this event id; None if they are no longer buffered."""
        match = _ID.fullmatch(last_event_id)
        if match is None or match[1] != self.broadcast_id:
            return None
        number = int(match[2])
        oldest = self._updates[0][0] if self._updates else self.last_number + 1
        if not oldest - 1 <= number <= self.last_number:
            return None
        return [told for its, told in self._updates if its > number]

    def _add_update(self, event: str, data: object) -> bytes:
        self.last_number += 1
        encoded = self._encode_event(event, data)
        self._updates.append((self.last_number, encoded))
        self._num_bytes += len(encoded)
        while len(self._updates) > MAX_UPDATES or self._num_bytes > MAX_UPDATE_BYTES:
            self._num_bytes -= len(self._updates.popleft()[1])
        return encoded

    def _encode_event(self, event: str, data: object) -> bytes:
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self.broadcast_id.encode(),
            self.last_number,
            event.encode(),
            msgspec.json.encode(data),
        )

"""The sender's log: the exact inputs that a stage has sent over a boundary, kept so that the layers behind it can be
rebuilt after their holder's death without asking anybody else.

An entry is keyed (sequence, boundary, position), so it outlives a change of plan as long as its holder lives. Positions
of one key are contiguous from the first one logged; they are kept in segments of 32, filled in place. Sequences that
begin alike share full segments: a segment lives as long as anybody's log needs it, and is copied before somebody who is
not alone with it writes into it.

The log is bounded in bytes. When it is full, whole sequences go, the least recently extended first: a log that lacks
its beginning can't rebuild anything, and the next tier (the tokens, which the broker has) needs no part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.wire.messages import LogRange

SEGMENT = 32

_Array = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class _Segment:
    data: _Array
    num_users: int = 1


@dataclass(slots=True)
class _Entry:
    start: int
    stop: int
    segments: list[_Segment] = field(default_factory=list)


class ActivationLog:
    """Bounded; see the module's text."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._num_bytes = 0
        self.num_evicted = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def append(self, sequence: int, boundary: int, start: int, hidden: _Array) -> None:
        """Log the inputs at ``start`` … of this boundary. What was logged from ``start`` on before is replaced."""
        key = (sequence, boundary)
        entry = self._entries.get(key)
        if entry is not None and not entry.start <= start <= entry.stop:
            self._drop(key)  # a gap: what lies before it can't be joined to this
            entry = None
        if entry is None:
            entry = self._entries[key] = _Entry(start, start)
        self._cut(entry, start)
        self._fill(entry, hidden)
        self._entries.move_to_end(key)
        self._evict(keep=key)

    def fork(self, sequence: int, source: int, position: int) -> None:
        """Let a sequence begin with what the log holds of another one's positions before ``position``."""
        for (other, boundary), entry in list(self._entries.items()):
            if other != source or entry.stop < position or (position - entry.start) % SEGMENT:
                continue
            shared = entry.segments[: (position - entry.start) // SEGMENT]
            for segment in shared:
                segment.num_users += 1
            self._entries[sequence, boundary] = _Entry(entry.start, position, shared)

    def truncate(self, sequence: int, position: int) -> None:
        """Forget positions from ``position`` on."""
        for key in [k for k in self._entries if k[0] == sequence]:
            entry = self._entries[key]
            if position <= entry.start:
                self._drop(key)
            else:
                self._cut(entry, min(position, entry.stop))

    def release(self, sequence: int) -> None:
        for key in [k for k in self._entries if k[0] == sequence]:
            self._drop(key)

    def clear(self) -> None:
        self._entries.clear()
        self._num_bytes = 0

    def read(self, sequence: int, boundary: int, start: int, stop: int) -> _Array | None:
        """The logged inputs at ``start`` up to ``stop``, or None unless all of them are there."""
        entry = self._entries.get((sequence, boundary))
        if entry is None or start < entry.start or stop > entry.stop or start >= stop:
            return None
        parts = []
        position = start
        while position < stop:
            index, offset = divmod(position - entry.start, SEGMENT)
            count = min(SEGMENT - offset, stop - position)
            parts.append(entry.segments[index].data[offset : offset + count])
            position += count
        return np.concatenate(parts)

    def ranges(self) -> Iterator[LogRange]:
        for (sequence, boundary), entry in self._entries.items():
            yield LogRange(sequence, boundary, entry.start, entry.stop)

    def _fill(self, entry: _Entry, hidden: _Array) -> None:
        taken = 0
        while taken < len(hidden):
            index, offset = divmod(entry.stop - entry.start, SEGMENT)
            if index == len(entry.segments):
                entry.segments.append(self._new_segment(np.empty((SEGMENT, *hidden.shape[1:]), hidden.dtype)))
            elif entry.segments[index].num_users > 1:
                shared = entry.segments[index]
                entry.segments[index] = self._new_segment(shared.data.copy())
                self._leave(shared)
            count = min(SEGMENT - offset, len(hidden) - taken)
            entry.segments[index].data[offset : offset + count] = hidden[taken : taken + count]
            entry.stop += count
            taken += count

    def _new_segment(self, data: _Array) -> _Segment:
        self._num_bytes += data.nbytes
        return _Segment(data)

    def _leave(self, segment: _Segment) -> None:
        segment.num_users -= 1
        if not segment.num_users:
            self._num_bytes -= segment.data.nbytes

    def _cut(self, entry: _Entry, position: int) -> None:
        entry.stop = position
        keep = -(-(position - entry.start) // SEGMENT)
        for segment in entry.segments[keep:]:
            self._leave(segment)
        del entry.segments[keep:]

    def _drop(self, key: tuple[int, int]) -> None:
        for segment in self._entries.pop(key).segments:
            self._leave(segment)

    def _evict(self, keep: tuple[int, int]) -> None:
        while self._num_bytes > self._limit_bytes and len(self._entries) > 1:
            oldest = next(iter(self._entries))
            if oldest == keep:
                break
            self._drop(oldest)
            self.num_evicted += 1
        if self._num_bytes > self._limit_bytes:
            self._drop(keep)
            self.num_evicted += 1

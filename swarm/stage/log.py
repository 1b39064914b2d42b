"""The sender's log: the exact inputs that a stage has sent over a boundary. From it, the layers behind the boundary are
rebuilt after the loss of their worker, without any other source.

An entry is keyed (sequence, boundary), so it survives a change of plan as long as its worker lives. It holds the
positions from 0 on without a gap: a log without its beginning can't rebuild anything. Positions are stored in segments
of 32, filled in place. Sequences with a common beginning share segments: a segment lives as long as any sequence's log
needs it, and is copied before a sequence that shares it writes into it.

The log is bounded in bytes. When it is full, whole sequences are evicted, the least recently extended first. An evicted
sequence is logged again only from position 0 on; until then its tokens, which the broker has, serve for a rebuild.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.wire.messages import LogRange, Row

SEGMENT = 32

_Array = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class _Segment:
    data: _Array  # positions × hidden size; all positions are allocated
    num_users: int = 1  # entries that share this segment


@dataclass(slots=True)
class _Entry:
    """Logged activations of one sequence at one layer boundary, for the positions before ``stop``."""

    stop: int = 0
    segments: list[_Segment] = field(default_factory=list)


class ActivationLog:
    """Log of sent activations, bounded in bytes. See the module's docstring."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # by sequence, then by boundary; the least recently extended sequence first
        self._sequences: OrderedDict[int, dict[int, _Entry]] = OrderedDict()
        self._num_bytes = 0  # memory of all segments, each counted once
        self.num_evicted = 0  # sequences evicted so far

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def append_rows(self, rows: Sequence[Row], boundary: int, hidden: _Array) -> None:
        """Log a step's output, row by row (see ``append``)."""
        taken = 0
        for row in rows:
            self.append(row.sequence, boundary, row.start, hidden[taken : taken + row.count])
            taken += row.count

    def append(self, sequence: int, boundary: int, start: int, hidden: _Array) -> None:
        """Log the inputs from position ``start`` on at this boundary, replacing logged ones from ``start`` on.

        Inputs that do not join the logged beginning of the sequence are not logged.
        """
        entry = self._entry_for(sequence, boundary, start)
        if entry is None:
            return
        self._cut(entry, start)
        self._fill(entry, hidden)
        self._sequences.move_to_end(sequence)
        while self._num_bytes > self._limit_bytes:
            self.release(next(iter(self._sequences)))
            self.num_evicted += 1

    def fork(self, sequence: int, source: int, position: int) -> None:
        """Start a sequence's log with another sequence's positions before ``position``, sharing their segments."""
        self.release(sequence)
        for boundary, entry in self._sequences.get(source, {}).items():
            if entry.stop >= position > 0:
                shared = entry.segments[: -(-position // SEGMENT)]
                for segment in shared:
                    segment.num_users += 1
                self._sequences.setdefault(sequence, {})[boundary] = _Entry(position, shared)

    def truncate(self, sequence: int, position: int) -> None:
        """Drop positions from ``position`` on."""
        if position <= 0:
            self.release(sequence)
        for entry in self._sequences.get(sequence, {}).values():
            self._cut(entry, min(position, entry.stop))

    def release(self, sequence: int) -> None:
        for entry in self._sequences.pop(sequence, {}).values():
            self._cut(entry, 0)

    def clear(self) -> None:
        self._sequences.clear()
        self._num_bytes = 0

    def read(self, sequence: int, boundary: int, start: int, stop: int) -> _Array | None:
        """Return the logged inputs from ``start`` to ``stop``, or None if any of them is missing."""
        entry = self._sequences.get(sequence, {}).get(boundary)
        if entry is None or not 0 <= start < stop <= entry.stop:
            return None
        parts = []
        position = start
        while position < stop:
            index, offset = divmod(position, SEGMENT)
            count = min(SEGMENT - offset, stop - position)
            parts.append(entry.segments[index].data[offset : offset + count])
            position += count
        return np.concatenate(parts)

    def ranges(self) -> Iterator[LogRange]:
        for sequence, entries in self._sequences.items():
            for boundary, entry in entries.items():
                yield LogRange(sequence, boundary, 0, entry.stop)

    def _entry_for(self, sequence: int, boundary: int, start: int) -> _Entry | None:
        """Return the entry that ends at or after ``start`` (a new one for position 0), or None."""
        entries = self._sequences.get(sequence, {})
        if start == 0 and boundary not in entries:
            entries = self._sequences.setdefault(sequence, entries)
            entries[boundary] = _Entry()
        entry = entries.get(boundary)
        if entry is not None and start > entry.stop:
            self._drop_entry(sequence, boundary)  # a gap: this entry can't grow any more, nor rebuild the sequence
            return None
        return entry

    def _fill(self, entry: _Entry, hidden: _Array) -> None:
        taken = 0
        while taken < len(hidden):
            index, offset = divmod(entry.stop, SEGMENT)
            if index == len(entry.segments):
                entry.segments.append(self._new_segment(np.empty((SEGMENT, *hidden.shape[1:]), hidden.dtype)))
            elif entry.segments[index].num_users > 1:  # copy on write: another sequence shares this segment
                shared = entry.segments[index]
                entry.segments[index] = self._new_segment(shared.data.copy())
                self._release_segment(shared)
            count = min(SEGMENT - offset, len(hidden) - taken)
            entry.segments[index].data[offset : offset + count] = hidden[taken : taken + count]
            entry.stop += count
            taken += count

    def _new_segment(self, data: _Array) -> _Segment:
        self._num_bytes += data.nbytes
        return _Segment(data)

    def _release_segment(self, segment: _Segment) -> None:
        segment.num_users -= 1
        if not segment.num_users:
            self._num_bytes -= segment.data.nbytes

    def _cut(self, entry: _Entry, position: int) -> None:
        entry.stop = position
        keep = -(-position // SEGMENT)
        for segment in entry.segments[keep:]:
            self._release_segment(segment)
        del entry.segments[keep:]

    def _drop_entry(self, sequence: int, boundary: int) -> None:
        entries = self._sequences[sequence]
        self._cut(entries.pop(boundary), 0)
        if not entries:
            del self._sequences[sequence]

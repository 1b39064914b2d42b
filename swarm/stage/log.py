"""The sender's log: the exact inputs that a stage has sent over a boundary between two layers. If the worker behind the
boundary is lost, its layers are rebuilt from this log, without any other source.

An entry is keyed (sequence, boundary), so it survives a change of plan as long as its worker lives. It holds positions
without a gap: from 0 on, or, if the stage has taken over layers with their keys and values, from the first one that it
computed itself. Such an entry rebuilds what copies of the layers behind the boundary lack. For a layer without copies,
an earlier boundary's entry serves, or the tokens, which the broker has. Positions are stored in segments of 32, filled
in place. Sequences with a common beginning share segments: a segment lives as long as any sequence's log needs it, and
is copied before a sequence that shares it writes into it.

The log is bounded in bytes. When it is full, whole sequences are evicted, the least recently extended first. An evicted
sequence is logged again from position 0 on, or under the next plan.
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
    """Logged activations of one sequence at one layer boundary, at the positions from ``start`` to ``stop``. An empty
    entry may begin anywhere."""

    start: int = 0
    stop: int = 0
    segments: list[_Segment] = field(default_factory=list)  # the first one has position ``start``

    @property
    def first_segment(self) -> int:
        """Number of the first segment, counted from position 0."""
        return self.start // SEGMENT


def _num_segments(start: int, stop: int) -> int:
    """Return the number of segments that hold the positions from ``start`` to ``stop``."""
    return -(-stop // SEGMENT) - start // SEGMENT if stop > start else 0


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

    def expect(self, sequence: int, boundary: int) -> None:
        """Log this boundary from wherever the sequence continues, unless it is logged already."""
        self._sequences.setdefault(sequence, {}).setdefault(boundary, _Entry())

    def fork(self, sequence: int, source: int, position: int) -> None:
        """Start a sequence's log with another sequence's positions before ``position``, sharing their segments."""
        self.release(sequence)
        for boundary, entry in self._sequences.get(source, {}).items():
            if entry.stop >= position > 0:
                start = min(entry.start, position)
                shared = entry.segments[: _num_segments(start, position)]
                for segment in shared:
                    segment.num_users += 1
                self._sequences.setdefault(sequence, {})[boundary] = _Entry(start, position, shared)

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
        if entry is None or not entry.start <= start < stop <= entry.stop:
            return None
        parts = []
        position = start
        while position < stop:
            index, offset = divmod(position, SEGMENT)
            count = min(SEGMENT - offset, stop - position)
            parts.append(entry.segments[index - entry.first_segment].data[offset : offset + count])
            position += count
        return np.concatenate(parts)

    def ranges(self) -> Iterator[LogRange]:
        for sequence, entries in self._sequences.items():
            for boundary, entry in entries.items():
                if entry.segments:
                    yield LogRange(sequence, boundary, entry.start, entry.stop)

    def _entry_for(self, sequence: int, boundary: int, start: int) -> _Entry | None:
        """Return the entry that ends at or after ``start``, or None. For position 0 it may be a new one."""
        entries = self._sequences.get(sequence, {})
        if start == 0 and boundary not in entries:
            entries = self._sequences.setdefault(sequence, entries)
            entries[boundary] = _Entry()
        entry = entries.get(boundary)
        if entry is not None and not entry.segments:
            entry.start = entry.stop = start
        if entry is not None and start > entry.stop:
            self._drop_entry(sequence, boundary)  # a gap: this entry can't grow any more, nor rebuild the sequence
            return None
        return entry

    def _fill(self, entry: _Entry, hidden: _Array) -> None:
        taken = 0
        while taken < len(hidden):
            number, offset = divmod(entry.stop, SEGMENT)
            index = number - entry.first_segment
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
        """Drop positions from ``position`` on. An entry of which nothing is left may begin anywhere."""
        keep = _num_segments(entry.start, position)
        entry.start, entry.stop = min(entry.start, position), position
        for segment in entry.segments[keep:]:
            self._release_segment(segment)
        del entry.segments[keep:]

    def _drop_entry(self, sequence: int, boundary: int) -> None:
        entries = self._sequences[sequence]
        self._cut(entries.pop(boundary), 0)
        if not entries:
            del self._sequences[sequence]

"""Rebuilding layers that were just taken over, from the log of the inputs that were sent to their former worker.

The broker orders one chunk at a time: ``Replay(sequence, boundary, start … stop, through)``, a part of one sequence, or
the rests of several (``more``), which share a step like the rows of any other. The worker with the log at that boundary
sends its entries down the pipeline as a separate step, flagged ``replay``; or, if the layers behind the boundary are
its own now, computes them itself. At boundary 0 the log is the tokens, and the broker sends the step. Each stage runs
the chunk through its part of the layers ``through`` and passes it on if the range continues in the next stage; the last
one reports to the broker. A stage logs its output like that of any step, but sends nothing beyond ``through``: a
surviving stage behind it receives nothing.

Replays have no number among the steps: the sequence waits for them, so none of its steps can overtake them, and
``ReplayDone`` reports whether all have arrived. They run when no step is due. A repeated chunk
must not run again: the cache is written in units, and the positions behind the chunk in its last unit would be lost. So
a sequence's chunks go forward only, and none of them runs once a step has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from swarm.stage.actions import Action, Compute, SendStep, SendToBroker
from swarm.stage.executor import Batch
from swarm.stage.sequences import SequenceStore, pixels_of
from swarm.wire.messages import (
    REPLAY_STEP,
    Hop,
    LayerRange,
    Replay,
    ReplayDone,
    ReplayMissing,
    Row,
    SequencePosition,
    SequenceRange,
    Step,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.stage.executor import ForwardResult

MAX_WAITING = 1024  # chunks; the broker has far fewer in flight
MAX_RELEASED = 256  # sequences; replays are ordered at an epoch's beginning, a few at a time


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A replay step that waits, with its input."""

    step: Step
    hidden: NDArray[np.float32] | None

    def keep(self, is_wanted: Callable[[Row], bool]) -> _Chunk | None:
        """Return the chunk with these rows only; None if there are none."""
        rows = self.step.rows
        wanted = [is_wanted(row) for row in rows]
        if not any(wanted):
            return None
        if all(wanted):
            return self
        places = np.repeat(wanted, [row.count for row in rows])
        tokens = tuple(token for token, stays in zip(self.step.tokens, places, strict=True) if stays)
        rows = tuple(row for row, stays in zip(rows, wanted, strict=True) if stays)
        step = msgspec.structs.replace(self.step, rows=rows, tokens=tokens)
        return _Chunk(step, None if self.hidden is None else self.hidden[places])

    def parts(self) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Yield each row with its tokens."""
        taken = 0
        for row in self.step.rows:
            yield row, self.step.tokens[taken : taken + row.count]
            taken += row.count


@dataclass(slots=True)
class _ReplayProgress:
    """Progress of a sequence's replay in this epoch."""

    through: LayerRange | None  # the rebuilt layers
    stop: int  # position up to which they are rebuilt
    is_resumed: bool = False  # steps have computed the sequence since

    def has_run(self, row: Row, through: LayerRange | None) -> bool:
        """Whether this row has run before through these layers, or steps have made it superfluous."""
        return self.is_resumed or (self.through == through and row.start < self.stop)


@dataclass(slots=True)
class ReplayQueue:
    """Queue of replay chunks, and the chunk on the device."""

    name: str
    incarnation: str
    num_layers: int
    store: SequenceStore
    count: Callable[[str, float], None]
    waiting: deque[_Chunk] = field(default_factory=deque)
    # sequences released in this epoch, the latest last
    released: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELEASED))
    progress: dict[int, _ReplayProgress] = field(default_factory=dict)  # by sequence, in this epoch
    current: Step | None = None  # the chunk on the device

    def clear(self) -> None:
        """Drop all chunks: the epoch has ended, and the broker orders needed replays again. A chunk on the device still
        finishes."""
        self.waiting.clear()
        self.released.clear()
        self.progress.clear()

    def send_logged(self, order: Replay, layers: LayerRange) -> list[Action]:
        """Send the logged positions, and report those that are missing."""
        rows: list[Row] = []
        inputs: list[NDArray[np.float32]] = []
        actions: list[Action] = []
        for part in (SequenceRange(order.sequence, order.start, order.stop), *order.more):
            hidden = self._read_log(part, order.boundary) if layers.first < order.boundary <= layers.stop else None
            if hidden is None:
                actions.append(self._build_missing(order, part))
            else:
                rows.append(Row(part.sequence, part.start, part.stop - part.start, False))
                inputs.append(hidden)
        if not rows:
            return actions
        stored = [self.store.sequences[row.sequence] for row in rows]
        step = Step(
            epoch=order.epoch,
            step=REPLAY_STEP,
            rows=tuple(rows),
            tokens=tuple(
                token
                for row, held in zip(rows, stored, strict=True)
                for token in held.history[row.start : row.start + row.count]
            ),
            open=tuple(
                held.open
                for row, held in zip(rows, stored, strict=True)
                if row.start in (0, self.store.prefixes.position(row.sequence))
            ),
            replay=True,
            through=order.through,
            alone=order.alone,
            hops=(self._sender_hop(layers),),
            cause=order.cause,
            lineage=order.lineage,
        )
        chunk = _Chunk(step, np.concatenate(inputs))
        if order.boundary == layers.stop:
            self.count("replayed_positions_sent", len(step.tokens))
            return [*actions, SendStep(step, chunk.hidden)]
        self.waiting.append(chunk)
        return actions

    def _read_log(self, part: SequenceRange, boundary: int) -> NDArray[np.float32] | None:
        """Return the logged inputs of these positions; None if they are missing or of no use."""
        # The sequence was released after the order, and perhaps admitted again: then steps compute it, and the replay
        # is not needed.
        if part.sequence in self.released or part.sequence not in self.store.sequences:
            return None
        hidden = self.store.log.read(part.sequence, boundary, part.start, part.stop)
        if hidden is not None and not np.isfinite(hidden).all():
            # A replay's output at its end is logged unchecked. If the layers behind it have moved to this worker since,
            # no receiver would check it any more. Drop the sequence's log; it is rebuilt from tokens instead.
            self.count("logs_not_finite", 1)
            self.store.log.release(part.sequence)
            return None
        return hidden

    def _build_missing(self, order: Replay, part: SequenceRange) -> SendToBroker:
        missing = ReplayMissing(
            epoch=order.epoch,
            incarnation=self.incarnation,
            sequence=part.sequence,
            boundary=order.boundary,
            has_from=part.stop,
        )
        return SendToBroker(missing)

    def add(self, step: Step, hidden: NDArray[np.float32] | None) -> str | None:
        """Queue a chunk, or return an error text."""
        # a release may have overtaken the chunk
        if num_stale := sum(row.sequence in self.released for row in step.rows):
            self.count("stale_replays", num_stale)
        chunk = _Chunk(step, hidden).keep(lambda row: row.sequence not in self.released)
        if chunk is not None and len(self.waiting) >= MAX_WAITING:
            return "more replays wait than the broker can have ordered"
        if chunk is not None:
            self.waiting.append(chunk)
        return None

    def drop_released(self, sequences: Iterable[int]) -> None:
        """Drop the chunks of released sequences, waiting or still to arrive: they must not open the sequences again.

        A sequence that is admitted again in the same epoch is computed by steps.
        """
        released = set(sequences)
        self.released.extend(released)
        for sequence in released & self.progress.keys():
            del self.progress[sequence]
        if released and self.waiting:
            kept = (chunk.keep(lambda row: row.sequence not in released) for chunk in self.waiting)
            self.waiting = deque(chunk for chunk in kept if chunk is not None)

    def mark_resumed(self, rows: Iterable[Row]) -> None:
        """Record that a step computes these sequences, which makes their further chunks superfluous."""
        for row in rows if self.progress else ():
            if row.sequence in self.progress:
                self.progress[row.sequence].is_resumed = True

    def start(self, layers: LayerRange) -> Compute | str | None:
        """Start the next chunk. Return its computation, an error text if it can't run, or None if none is waiting."""
        result: Compute | str | None = None
        while result is None and self.current is None and self.waiting:
            result = self._start_one(self.waiting.popleft(), layers)
        return result

    def _start_one(self, chunk: _Chunk, layers: LayerRange) -> Compute | str | None:
        """Start one chunk; return None if it is not needed any more."""
        own = self._own_layers(chunk.step, layers)
        if own is None:
            return f"a replay through layers {chunk.step.through} came to layers {layers}"
        needed = chunk.keep(lambda row: self._is_needed(row, chunk.step, layers))
        if needed is None:
            return None
        step = needed.step
        for row in step.rows:
            held = self.store.sequences[row.sequence]
            if held.min_position(own) < row.start:
                self.store.prefixes.apply(row.sequence, layers)
            if row.start + row.count > held.open.limit:
                return f"a replay of sequence {row.sequence} would outgrow its limit of {held.open.limit}"
            if held.min_position(own) < row.start:
                return f"a replay of sequence {row.sequence} begins at {row.start}, but layers {own} stand at {held.kv}"
            if not held.can_begin(own, row.start):
                return f"a replay of sequence {row.sequence} begins at {row.start}, where layers {own} hold no state"
        for row, row_tokens in needed.parts():
            held = self.store.sequences[row.sequence]
            held.history[row.start : row.start + row.count] = row_tokens
            self.progress[row.sequence] = _ReplayProgress(step.through, row.start + row.count)
            # If the plan fails before the chunk is done, the positions behind it do not count.
            held.recede(own, row.start)
        self.current = step
        tokens = np.asarray(step.tokens, dtype=np.int64)
        batch = Batch(
            step.rows,
            tokens,
            needed.hidden,
            (),
            step.alone,
            own,
            adapters=self.store.adapters(step.rows),
            images=self.store.images(step.rows),
            pixels=pixels_of(step),
        )
        return Compute(step.epoch, step.step, batch, step.cause)

    def _is_needed(self, row: Row, step: Step, layers: LayerRange) -> bool:
        """Return whether a row must be computed. Opens its sequence if it is not open yet."""
        if row.sequence in self.progress and self.progress[row.sequence].has_run(row, step.through):
            self.count("duplicate_replays", 1)
            return False
        item = next((item for item in step.open if item.sequence == row.sequence), None)
        if item is not None and self.store.find_reserved(item) is None:
            self.store.open_empty(item, layers)
        if row.sequence not in self.store.sequences:
            self.count("late_replays", 1)  # the sequence was released while the chunk was on its way
            return False
        return True

    def on_computed(self, forwarded: ForwardResult, layers: LayerRange) -> list[Action]:
        """Record a finished chunk: log the output, and send it on or report to the broker."""
        step, self.current = self.current, None
        assert step is not None
        assert step.through is not None
        own = self._own_layers(step, layers)
        assert own is not None
        reached: list[SequencePosition] = []
        taken = 0
        for row in step.rows:
            hidden = None if forwarded.hidden is None else forwarded.hidden[taken : taken + row.count]
            taken += row.count
            held = self.store.sequences.get(row.sequence)
            if held is None:
                continue
            reached.append(SequencePosition(row.sequence, row.start + row.count))
            held.advance(own, row.start + row.count)
            self.count("replayed_positions", row.count)
            self.count("replayed_layer_positions", row.count * len(own))
            if own.stop == layers.stop < self.num_layers:
                assert hidden is not None
                self.store.log.append(row.sequence, layers.stop, row.start, hidden)
        if not reached:
            return []
        if step.through.stop > layers.stop:
            hops = (*step.hops, self._sender_hop(own))
            onward = msgspec.structs.replace(step, hops=hops, tensor=None, pixels=msgspec.UNSET)
            return [SendStep(onward, forwarded.hidden)]
        first, *more = reached
        done = ReplayDone(
            epoch=step.epoch,
            incarnation=self.incarnation,
            sequence=first.sequence,
            layers=step.through,
            kv=first.position,
            more=tuple(more),
        )
        return [SendToBroker(done)]

    def _sender_hop(self, layers: LayerRange) -> Hop:
        """Return a hop that names the sender of a chunk, without times."""
        return Hop(self.name, layers, 0.0, 0.0, 0.0, 0.0, 0)

    @staticmethod
    def _own_layers(step: Step, layers: LayerRange) -> LayerRange | None:
        """Return the part of a chunk's layers that this stage has."""
        if step.through is None:
            return None
        first, stop = max(step.through.first, layers.first), min(step.through.stop, layers.stop)
        return LayerRange(first, stop) if first < stop else None

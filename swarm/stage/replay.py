"""Rebuilding layers that were just taken over, from the log of the inputs that were sent to their former worker.

The broker orders one chunk of one sequence at a time: ``Replay(sequence, boundary, start … stop, through)``. The worker
with the log at that boundary sends its entries down the pipeline as a separate step, flagged ``replay``; or, if the
layers behind the boundary are its own now, computes them itself. At boundary 0 the log is the tokens, and the broker
sends the step. Each stage runs the chunk through its part of the layers ``through`` and passes it on if the range
continues in the next stage; the last one reports to the broker. A stage logs its output like that of any step, but
sends nothing beyond ``through``: a surviving stage behind it receives nothing.

Replays have no number among the steps: the sequence waits for them, so none of its steps can overtake them, and
``ReplayDone`` reports whether all have arrived. They run when no step is due. A repeated chunk must not run again: the
cache is written in units, and the positions behind the chunk in its last unit would be lost. So a sequence's chunks go
forward only, and none of them runs once a step has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from swarm.stage.actions import Action, Compute, SendStep, SendToBroker
from swarm.stage.executor import Batch
from swarm.stage.sequences import SequenceStore
from swarm.wire.messages import REPLAY_STEP, Hop, LayerRange, Replay, ReplayDone, ReplayMissing, Row, Step

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


@dataclass(slots=True)
class _ReplayProgress:
    """Progress of a sequence's replay in this epoch."""

    through: LayerRange | None  # the rebuilt layers
    stop: int  # position up to which they are rebuilt
    is_resumed: bool = False  # steps have computed the sequence since

    def has_run(self, step: Step) -> bool:
        """Whether this chunk has run before, or steps have made it superfluous."""
        return self.is_resumed or (self.through == step.through and step.rows[0].start < self.stop)


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
        """Send the logged positions, or report that they are missing."""
        held = self.store.sequences.get(order.sequence)
        hidden = self.store.log.read(order.sequence, order.boundary, order.start, order.stop)
        if hidden is not None and not np.isfinite(hidden).all():
            # A replay's output at its end is logged unchecked. If the layers behind it have moved to this worker since,
            # no receiver would check it any more. Drop the sequence's log; it is rebuilt from tokens instead.
            self.count("logs_not_finite", 1)
            self.store.log.release(order.sequence)
            hidden = None
        # The sequence was released after the order, and perhaps admitted again: then steps compute it, and the replay
        # is not needed.
        is_stale = order.sequence in self.released
        if is_stale or held is None or hidden is None or not layers.first < order.boundary <= layers.stop:
            missing = ReplayMissing(
                epoch=order.epoch,
                incarnation=self.incarnation,
                sequence=order.sequence,
                boundary=order.boundary,
                has_from=order.stop,
            )
            return [SendToBroker(missing)]
        step = Step(
            epoch=order.epoch,
            step=REPLAY_STEP,
            rows=(Row(order.sequence, order.start, order.stop - order.start, False),),
            tokens=tuple(held.history[order.start : order.stop]),
            open=(held.open,) if order.start == 0 else (),
            replay=True,
            through=order.through,
            alone=order.alone,
            hops=(self._sender_hop(layers),),
            cause=order.cause,
            lineage=order.lineage,
        )
        if order.boundary == layers.stop:
            self.count("replayed_positions_sent", len(hidden))
            return [SendStep(step, hidden)]
        self.waiting.append(_Chunk(step, hidden))
        return []

    def add(self, step: Step, hidden: NDArray[np.float32] | None) -> str | None:
        """Queue a chunk, or return an error text."""
        if step.rows and step.rows[0].sequence in self.released:  # the release has overtaken the chunk
            self.count("stale_replays", 1)
            return None
        if len(self.waiting) >= MAX_WAITING:
            return "more replays wait than the broker can have ordered"
        self.waiting.append(_Chunk(step, hidden))
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
            self.waiting = deque(chunk for chunk in self.waiting if chunk.step.rows[0].sequence not in released)

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
        step, (row,) = chunk.step, chunk.step.rows
        own = self._own_layers(step, layers)
        if own is None:
            return f"a replay through layers {step.through} came to layers {layers}"
        if row.sequence in self.progress and self.progress[row.sequence].has_run(step):
            self.count("duplicate_replays", 1)
            return None
        if row.sequence not in self.store.sequences:
            for item in step.open:
                self.store.open_empty(item, layers)
        held = self.store.sequences.get(row.sequence)
        if held is None:
            self.count("late_replays", 1)  # the sequence was released while the chunk was on its way
            return None
        if row.start + row.count > held.open.limit:
            return f"a replay of sequence {row.sequence} would outgrow its limit of {held.open.limit}"
        if held.min_position(own) < row.start:
            return f"a replay of sequence {row.sequence} begins at {row.start}, but layers {own} stand at {held.kv}"
        held.history[row.start : row.start + row.count] = step.tokens
        self.progress[row.sequence] = _ReplayProgress(step.through, row.start + row.count)
        held.recede(own, row.start)  # If the plan fails before the chunk is done, the positions behind it do not count.
        self.current = step
        tokens = np.asarray(step.tokens, dtype=np.int64)
        batch = Batch((row,), tokens, chunk.hidden, (), alone=step.alone, through=own)
        return Compute(step.epoch, step.step, batch, step.cause)

    def on_computed(self, forwarded: ForwardResult, layers: LayerRange) -> list[Action]:
        """Record a finished chunk: log the output, and send it on or report to the broker."""
        step, self.current = self.current, None
        assert step is not None
        assert step.through is not None
        (row,) = step.rows
        own, stop = self._own_layers(step, layers), row.start + row.count
        assert own is not None
        held = self.store.sequences.get(row.sequence)
        if held is None:
            return []
        held.advance(own, stop)
        self.count("replayed_positions", row.count)
        self.count("replayed_layer_positions", row.count * len(own))
        if own.stop == layers.stop < self.num_layers:
            assert forwarded.hidden is not None
            self.store.log.append(row.sequence, layers.stop, row.start, forwarded.hidden)
        if step.through.stop > layers.stop:
            hops = (*step.hops, self._sender_hop(own))
            return [SendStep(msgspec.structs.replace(step, hops=hops, tensor=None), forwarded.hidden)]
        done = ReplayDone(
            epoch=step.epoch, incarnation=self.incarnation, sequence=row.sequence, layers=step.through, kv=stop
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

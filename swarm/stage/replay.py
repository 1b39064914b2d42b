"""Rebuilding layers that were just taken over, from the log of what was sent to those who had them.

The broker orders one chunk of one sequence at a time: ``Replay(sequence, boundary, start … stop, through)``. The
holder of the log at that boundary sends its entries as a step of its own, flagged ``replay``, down the pipe; or, if the
layers behind the boundary are its own now, computes them itself. At boundary 0 the log is the tokens, and the broker
sends the step. Every stage runs the chunk through those of its layers that ``through`` names and passes it on if the
range goes on behind them; the last one tells the broker. What leaves a stage is logged, like any output, but goes no
further than ``through``: a survivor behind it hears nothing.

Replays have no number among the steps: the sequence waits for them, so nothing of it can overtake them, and whether all
have arrived is told by ``ReplayDone``. They run when no step is due. A chunk that comes twice must not run again: of
what lies behind it in the same unit of the memory nothing would be left. So a sequence's chunks go forward only, and
none of them runs once a step has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from swarm.stage.actions import Action, Compute, SendStep, Tell
from swarm.stage.executor import Batch
from swarm.stage.sequences import Holdings
from swarm.wire.messages import REPLAY_STEP, Hop, LayerRange, Replay, ReplayDone, ReplayMissing, Row, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.stage.executor import Forwarded

MAX_WAITING = 1024  # chunks; the broker has far fewer under way
MAX_RELEASED = 256  # sequences; replays are ordered at an epoch's beginning, and few at a time


@dataclass(frozen=True, slots=True)
class _Chunk:
    step: Step
    hidden: NDArray[np.float32] | None


@dataclass(slots=True)
class _Taken:
    """How far a sequence's replay has come in this epoch: ``through`` these layers up to ``stop``. ``resumed``: steps
    have computed it since."""

    through: LayerRange | None
    stop: int
    resumed: bool = False

    def has(self, step: Step) -> bool:
        """Has this chunk run before?"""
        return self.resumed or (self.through == step.through and step.rows[0].start < self.stop)


@dataclass(slots=True)
class Replays:
    """Chunks that wait for the device, and the one that is on it."""

    name: str
    incarnation: str
    num_layers: int
    holdings: Holdings
    count: Callable[[str, float], None]
    waiting: deque[_Chunk] = field(default_factory=deque)
    released: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELEASED))  # in this epoch, the latest
    taken: dict[int, _Taken] = field(default_factory=dict)  # in this epoch
    current: Step | None = None

    def clear(self) -> None:
        """The epoch ended: whoever needs a replay will be asked again. What is on the device comes to its end first."""
        self.waiting.clear()
        self.released.clear()
        self.taken.clear()

    def take_order(self, order: Replay, layers: LayerRange) -> list[Action]:
        """Send what the log has, or say that it hasn't."""
        held = self.holdings.sequences.get(order.sequence)
        hidden = self.holdings.log.read(order.sequence, order.boundary, order.start, order.stop)
        if hidden is not None and not np.isfinite(hidden).all():
            # What a replay put out at its end was logged unseen, and if the layers behind it have come here since,
            # nobody would look at it now. The log of this sequence is of no use: the tokens serve.
            self.count("logs_not_finite", 1)
            self.holdings.log.release(order.sequence)
            hidden = None
        # Released since it was ordered, and perhaps let in again: then steps compute it, and nobody waits for this.
        is_stale = order.sequence in self.released
        if is_stale or held is None or hidden is None or not layers.first < order.boundary <= layers.stop:
            missing = ReplayMissing(
                epoch=order.epoch,
                incarnation=self.incarnation,
                sequence=order.sequence,
                boundary=order.boundary,
                has_from=order.stop,
            )
            return [Tell(missing)]
        step = Step(
            epoch=order.epoch,
            step=REPLAY_STEP,
            rows=(Row(order.sequence, order.start, order.stop - order.start, False),),
            tokens=tuple(held.history[order.start : order.stop]),
            open=(held.open,) if order.start == 0 else (),
            replay=True,
            through=order.through,
            alone=order.alone,
            hops=(self._hop(layers),),
            cause=order.cause,
            lineage=order.lineage,
        )
        if order.boundary == layers.stop:
            self.count("replayed_positions_sent", len(hidden))
            return [SendStep(step, hidden)]
        self.waiting.append(_Chunk(step, hidden))
        return []

    def arrived(self, step: Step, hidden: NDArray[np.float32] | None) -> str | None:
        """Queue a chunk; why not, if so."""
        if step.rows and step.rows[0].sequence in self.released:  # the release has overtaken it
            self.count("stale_replays", 1)
            return None
        if len(self.waiting) >= MAX_WAITING:
            return "more replays wait than anybody can have ordered"
        self.waiting.append(_Chunk(step, hidden))
        return None

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget released sequences: a chunk that waits, or comes later, must not open them again. (Who is let in again
        in the same epoch is computed by steps.)"""
        gone = set(sequences)
        self.released.extend(gone)
        for sequence in gone & self.taken.keys():
            del self.taken[sequence]
        if gone and self.waiting:
            self.waiting = deque(chunk for chunk in self.waiting if chunk.step.rows[0].sequence not in gone)

    def resumed(self, rows: Iterable[Row]) -> None:
        """These are computed by a step: none of their chunks is wanted any more."""
        for row in rows if self.taken else ():
            if row.sequence in self.taken:
                self.taken[row.sequence].resumed = True

    def start(self, layers: LayerRange) -> Compute | str | None:
        """Put the next chunk on the device; in words, why it can't be; None if there is none."""
        found: Compute | str | None = None
        while found is None and self.current is None and self.waiting:
            found = self._start_one(self.waiting.popleft(), layers)
        return found

    def _start_one(self, chunk: _Chunk, layers: LayerRange) -> Compute | str | None:
        """Start one replay; None if nobody needs it any more."""
        step, (row,) = chunk.step, chunk.step.rows
        own = self._own(step, layers)
        if own is None:
            return f"a replay through layers {step.through} came to layers {layers}"
        if row.sequence in self.taken and self.taken[row.sequence].has(step):
            self.count("duplicate_replays", 1)
            return None
        if row.sequence not in self.holdings.sequences:
            for item in step.open:
                self.holdings.open_empty(item, layers)
        held = self.holdings.sequences.get(row.sequence)
        if held is None:
            self.count("late_replays", 1)  # it was released while the chunk was on its way
            return None
        if row.start + row.count > held.open.limit:
            return f"a replay of sequence {row.sequence} would outgrow its limit of {held.open.limit}"
        if held.least(own) < row.start:
            return f"a replay of sequence {row.sequence} begins at {row.start}, but layers {own} stand at {held.kv}"
        held.history[row.start : row.start + row.count] = step.tokens
        self.taken[row.sequence] = _Taken(step.through, row.start + row.count)
        held.recede(own, row.start)  # should the plan fall before it is through, nobody counts on what lies behind
        self.current = step
        tokens = np.asarray(step.tokens, dtype=np.int64)
        batch = Batch((row,), tokens, chunk.hidden, (), alone=step.alone, through=own)
        return Compute(step.epoch, step.step, batch, step.cause)

    def computed(self, forwarded: Forwarded, layers: LayerRange) -> list[Action]:
        """The chunk went through: log what left the stage, pass it on, or tell the broker."""
        step, self.current = self.current, None
        assert step is not None
        assert step.through is not None
        (row,) = step.rows
        own, stop = self._own(step, layers), row.start + row.count
        assert own is not None
        held = self.holdings.sequences.get(row.sequence)
        if held is None:
            return []
        held.advance(own, stop)
        self.count("replayed_positions", row.count)
        self.count("replayed_layer_positions", row.count * len(own))
        if own.stop == layers.stop < self.num_layers:
            assert forwarded.hidden is not None
            self.holdings.log.append(row.sequence, layers.stop, row.start, forwarded.hidden)
        if step.through.stop > layers.stop:
            hops = (*step.hops, self._hop(own))
            return [SendStep(msgspec.structs.replace(step, hops=hops, tensor=None), forwarded.hidden)]
        done = ReplayDone(
            epoch=step.epoch, incarnation=self.incarnation, sequence=row.sequence, layers=step.through, kv=stop
        )
        return [Tell(done)]

    def _hop(self, layers: LayerRange) -> Hop:
        """Name who sent a chunk; its times are nobody's business."""
        return Hop(self.name, layers, 0.0, 0.0, 0.0, 0.0, 0)

    @staticmethod
    def _own(step: Step, layers: LayerRange) -> LayerRange | None:
        """The layers of this stage that a chunk goes through."""
        if step.through is None:
            return None
        first, stop = max(step.through.first, layers.first), min(step.through.stop, layers.stop)
        return LayerRange(first, stop) if first < stop else None

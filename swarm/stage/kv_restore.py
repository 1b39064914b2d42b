"""Restoring keys and values from the local disk, for a sequence that the stages have just opened.

The broker orders it (``RestoreKv``) and lets no step with the sequence begin meanwhile. The disk's thread reads chunk
after chunk and verifies each; the core stores them and reports the position that all layers of this stage have reached.
The broker cuts all stages to the least one with the sequence's next step, and that is where computing begins.

The first of these ends the restoration: a truncation, a release, a row, another plan, the end of the order's time.
What the thread reads afterwards is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from swarm.stage.actions import Action, ReadSpilled, SendToBroker, StopReadingSpilled, StoreSpilled
from swarm.stage.events import SpilledRead, SpilledStored
from swarm.stage.kv_spill import KvSpiller, chunk_names
from swarm.stage.membership import LogWriter
from swarm.stage.sequences import SequenceStore, StoredSequence
from swarm.wire.messages import BLOCK, KvRestored, RestoreKv, Step


@dataclass(slots=True)
class _Restoration:
    """Restoration of one sequence."""

    order: RestoreKv
    stop: int  # position up to which chunks are read
    until: float  # when what has been read is reported
    position: int  # reached in all layers
    stored_until: int = 0  # the same when the blocks that were read last are stored
    is_last: bool = False  # nothing follows them


@dataclass(slots=True)
class KvRestorer:
    """Restorations in progress; the rules are in the module's docstring. Appends actions to ``actions``."""

    incarnation: str
    store: SequenceStore
    spiller: KvSpiller
    actions: list[Action]
    write_log: LogWriter
    count: Callable[[str, float], None]
    restoring: dict[int, _Restoration] = field(default_factory=dict)  # by sequence

    @property
    def next_deadline(self) -> float:
        """Return the earliest time at which a restoration ends with what it has reached."""
        return min((current.until for current in self.restoring.values()), default=inf)

    def follow(self, order: RestoreKv, now: float) -> None:
        """Begin to restore a sequence, or report at once that there is nothing to restore."""
        stored, spilling = self.store.sequences.get(order.sequence), self.spiller.order
        chunk = self.spiller.chunk
        self._cancel(order.sequence)
        stop = 0 if stored is None else min(order.stop, len(stored.history)) // chunk * chunk
        is_ready = stored is not None and not stored.is_retired and stored.position() == order.start
        if not is_ready or spilling is None or order.start % BLOCK or stop <= order.start:
            self._report(order, order.start if is_ready else 0)
            return
        assert stored is not None
        params = stored.open.params
        names = chunk_names(stored.history, stop, chunk, params.adapter, params.images)[order.start // chunk :]
        self.restoring[order.sequence] = _Restoration(order, stop, now + order.within_s, order.start)
        self.actions.append(
            ReadSpilled(
                order.ticket, order.sequence, self.spiller.layers, order.start, stop, tuple(names), spilling.bits
            )
        )

    def on_read(self, event: SpilledRead, now: float) -> None:
        """Have stored what was read, if it continues the sequence."""
        if (found := self._find(event)) is None:
            self.count("spill_reads_late", 1)
            return
        current, stored = found
        if self._end_if_overdue(event.sequence, current, now):
            return
        position = current.position
        for data in event.blocks:
            if data.layers != self.spiller.layers or not position == data.start < data.stop <= current.stop:
                self.count("spill_reads_unfit", 1)
                self._end(event.sequence, current)
                return
            position = data.stop
        current.stored_until, current.is_last = position, event.is_last
        if event.blocks:
            self.actions.append(StoreSpilled(event.ticket, event.sequence, stored.open.limit, event.blocks))
        else:
            self._end(event.sequence, current)

    def on_stored(self, event: SpilledStored, now: float) -> None:
        """Record that all layers have the blocks that were read last; or that they have not, and end."""
        if (found := self._find(event)) is None:
            return
        current, stored = found
        if event.problem:
            self.count("spill_reads_not_stored", 1)
            self.write_log("spilled_not_stored", "warning", sequence=event.sequence, reason=event.problem)
            self._end(event.sequence, current)
            return
        current.position = current.stored_until
        stored.set_position(self.spiller.layers, current.position)
        if current.is_last or current.position >= current.stop:
            self._end(event.sequence, current)
        else:
            self._end_if_overdue(event.sequence, current, now)

    def _find(self, event: SpilledRead | SpilledStored) -> tuple[_Restoration, StoredSequence] | None:
        """Return the restoration that an event belongs to, and its sequence; None if it has ended."""
        current, stored = self.restoring.get(event.sequence), self.store.sequences.get(event.sequence)
        if current is None or stored is None or current.order.ticket != event.ticket:
            return None
        return current, stored

    def on_step_started(self, step: Step) -> None:
        """End the restorations of sequences that this step changes."""
        if self.restoring:
            cuts = [cut.sequence for cut in (*step.retire, *step.truncate)]
            for sequence in (*cuts, *step.release, *(row.sequence for row in step.rows)):
                self._cancel(sequence)

    def stop(self) -> None:
        """End all restorations: the plan is not in force any more."""
        for sequence in list(self.restoring):
            self._cancel(sequence)

    def tick(self, now: float) -> None:
        """End the restorations whose time is over. The broker receives the positions that they have reached."""
        for sequence, current in list(self.restoring.items()):
            self._end_if_overdue(sequence, current, now)

    def _end_if_overdue(self, sequence: int, current: _Restoration, now: float) -> bool:
        if now >= current.until:
            self.count("spill_reads_overdue", 1)
            self._end(sequence, current)
            return True
        return False

    def _end(self, sequence: int, current: _Restoration) -> None:
        del self.restoring[sequence]
        num_restored = current.position - current.order.start
        if num_restored:
            self.count("spill_positions_restored", num_restored)
            if current.order.start < self.spiller.chunk:  # otherwise earlier chunks may be missing there
                self.spiller.skip_to(sequence, current.position)
        if current.position < current.stop:
            self.actions.append(StopReadingSpilled(current.order.ticket))
        self._report(current.order, current.position)

    def _cancel(self, sequence: int) -> None:
        current = self.restoring.pop(sequence, None)
        if current is not None:
            self.actions.append(StopReadingSpilled(current.order.ticket))

    def _report(self, order: RestoreKv, position: int) -> None:
        message = KvRestored(
            epoch=order.epoch,
            incarnation=self.incarnation,
            sequence=order.sequence,
            ticket=order.ticket,
            position=position,
        )
        self.actions.append(SendToBroker(message))

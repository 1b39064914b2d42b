"""Accepting copies of other workers' keys and values, and reporting them to the broker.

The broker names the senders and their layers (``ReceiveKv``). A part is stored only if everything about it is right:
lineage and epoch, the sender's incarnation and key, the layers, the sequence's limit, the tokens, and a beginning that
joins the positions held. Anything else is dropped and counted under a name of its own; a sequence with a gap stays as
it is until the broker has the missing positions sent again.

A part's tokens must be those of the sequence, where the stage has opened it. Where only copies are held, they must be
the tokens of the earlier parts; otherwise the copies are dropped, since nothing tells which tokens are right.

*What ends copies.* The release of a sequence that the stage has opened; the next activation, for layers that are not
warm any more and sequences that are not live; the broker's order (``ReceiveKv``: other layers, ``ended`` sequences),
which is how workers without a part in the plan get rid of the sequences whose end they do not see; a shortage of
memory, the longest sequence first; another lineage. After ``Unassign`` copies wait a few seconds for the next order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.stage.actions import Action, AllowKvSenders, SendToBroker, StoreKv
from swarm.stage.events import KvArrived
from swarm.stage.kv_copies import KvCopies, count_equal
from swarm.stage.membership import LogWriter
from swarm.stage.sequences import SequenceStore
from swarm.wire.messages import BLOCK, HeldSequence, KvHeld, KvPart, LayerRange, Lineage, Open, ReceiveKv, layers_of

REPORT_S = 1.0  # between two reports
REPEAT_S = 4.0  # after which a report is repeated although nothing has changed: it may have been lost
MAX_RELEASED = 256  # sequences whose last parts may still be on their way
UNORDERED_S = 8.0  # how long copies wait for an order after ``Unassign``


@dataclass(slots=True)
class KvArrivals:
    """Order in force, and the parts that it admits. Appends its actions to ``actions``."""

    incarnation: str
    store: SequenceStore
    actions: list[Action]
    write_log: LogWriter
    count: Callable[[str, float], None]
    order: ReceiveKv | None = None
    free_bytes: int = 0  # memory that copies may still take, when the shell last measured it
    # sequences released lately, the latest last: their parts may still be on their way
    released: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELEASED))
    blocked: frozenset[str] = frozenset()  # blocked keys
    _published: AllowKvSenders = field(default=AllowKvSenders(frozenset()))
    # what the last report named: copies, and the magnitude of the memory left; None: another report is due
    _reported: tuple[tuple[HeldSequence, ...], int] | None = ((), 0)
    _checked_at: float = 0.0  # when the last report was due
    _reported_at: float = 0.0
    _is_awaited: bool = False  # the order awaits positions that are not complete yet
    _unordered_at: float | None = None  # since when copies wait for an order

    @property
    def copies(self) -> KvCopies:
        return self.store.copies

    # --- orders ------------------------------------------------------------------------------------------------------

    def follow(self, order: ReceiveKv, now: float) -> None:
        """Accept what this order names from now on, and drop all other copies."""
        if self.order is None or self.order.epoch != order.epoch or order.ended:
            self.report_again()
        self.order, self._unordered_at = order, None
        self.copies.drop_others(layers_of(source.layers for source in order.sources))
        for sequence in order.ended:
            self.copies.drop(sequence)
        self._is_awaited = bool(order.awaited)
        self._publish_keys()
        self._report_if_complete(now)

    def stop(self) -> None:
        """Accept nothing more: the order has lost its force."""
        self.order, self._is_awaited = None, False
        self._publish_keys()

    def on_fence(self, epoch: int) -> None:
        """End an order of an older epoch. The copies stay for the plan to come."""
        if self.order is not None and self.order.epoch < epoch:
            self.stop()

    def on_activated(self) -> None:
        """Record that a plan begins. Its ``Activated`` reports the copies that are left."""
        self._unordered_at = None
        self.released.clear()

    def report_again(self) -> None:
        """Report what is held with the next tick, changed or not: perhaps the broker has no earlier report."""
        self._reported = None

    def await_order(self, now: float) -> None:
        """Drop the copies unless an order follows soon: the plan does not use this worker."""
        self._unordered_at = now

    def block_keys(self, blocked: Iterable[str]) -> None:
        self.blocked = frozenset(blocked)
        self._publish_keys()

    def on_released(self, sequences: Iterable[int]) -> None:
        """Record that a step has released these sequences."""
        self.released.extend(sequences)

    def on_opened(self, items: Iterable[Open]) -> None:
        """Record that a step has opened these sequences, perhaps again."""
        for item in items:
            if item.sequence in self.released:
                self.released.remove(item.sequence)

    def _publish_keys(self) -> None:
        """Publish the accepted keys if they have changed. Where no order names a key, listeners check none."""
        sources = () if self.order is None else self.order.sources
        keys = frozenset(source.key for source in sources if source.key is not None) - self.blocked
        update = AllowKvSenders(keys)
        if update != self._published:
            self._published = update
            self.actions.append(update)

    # --- parts -------------------------------------------------------------------------------------------------------

    def on_arrived(self, event: KvArrived, lineage: Lineage, layers: LayerRange | None, now: float) -> None:
        """Store a part, or drop and count it. ``layers``: those in which the stage computes, or has computed what it
        stores."""
        self.free_bytes = event.free_bytes
        problem = self._find_stranger(event, lineage, layers) or self._store(event)
        if problem is not None:
            self.count(problem, 1)
            return
        self.count("kv_parts_stored", 1)
        self.count("kv_bytes_stored", event.data.numbers.nbytes)
        self._report_if_complete(now)

    def _find_stranger(self, event: KvArrived, lineage: Lineage, layers: LayerRange | None) -> str | None:
        """Return the counter for a part that the order does not admit."""
        part, order = event.part, self.order
        if order is None or part.lineage != lineage or part.epoch != order.epoch:
            return "kv_parts_stale"
        sources = [source for source in order.sources if source.incarnation == part.sender]
        if not sources or event.sender in self.blocked:
            return "kv_parts_foreign"
        if event.sender and all(source.key != event.sender for source in sources):
            return "kv_parts_foreign"
        wanted = layers_of(source.layers for source in sources) - layers_of(() if layers is None else (layers,))
        return None if layers_of((part.layers,)) <= wanted and len(part.layers) else "kv_parts_of_other_layers"

    def _store(self, event: KvArrived) -> str | None:
        """Store a part of an expected sender; or return the counter for the reason why it can't be."""
        part, data = event.part, event.data
        if not part.tokens or (data.layers, data.start, data.stop) != (part.layers, *_bounds(part)):
            return "kv_parts_malformed"
        if part.sequence in self.released:
            return "kv_parts_of_released"
        item = self._find_open(part)
        if item is None:
            return "kv_parts_unopened"
        problem = self._find_other_sequence(part, item) or self._find_misfit(event)
        if problem is None:
            self.copies.record(part.sequence, item, part.tokens, data)
            self.actions.append(StoreKv(part.sequence, item.limit, data))
        return problem

    def _find_other_sequence(self, part: KvPart, item: Open) -> str | None:
        """Return the counter for a part that belongs to another sequence of this number."""
        start, stop = _bounds(part)
        if item.limit < stop or (part.open is not None and part.open.limit != item.limit):
            return "kv_parts_of_other_limit"
        return None if self._has_same_tokens(part.sequence, start, part.tokens) else "kv_parts_of_other_tokens"

    def _find_misfit(self, event: KvArrived) -> str | None:
        """Return the counter for a part that does not join the positions held, or has no place."""
        part = event.part
        start, stop = _bounds(part)
        copy = self.copies.sequences.get(part.sequence)
        held = 0 if copy is None else copy.min_position(part.layers)
        if start > held:
            return "kv_gaps"
        if stop <= held:
            return "kv_parts_duplicate"
        return "kv_parts_without_memory" if event.data.numbers.nbytes > event.free_bytes else None

    def _find_open(self, part: KvPart) -> Open | None:
        """Return the record of a part's sequence: the stage's own, that of earlier parts, or the part's."""
        stored, copy = self.store.sequences.get(part.sequence), self.copies.sequences.get(part.sequence)
        if stored is not None:
            return None if stored.is_retired else stored.open
        if copy is not None and part.open is not None and part.block == 0 and part.open.limit != copy.open.limit:
            self.copies.drop(part.sequence)  # the sequence was admitted again with another reservation
            copy = None
        if copy is not None:
            return copy.open
        return part.open if part.block == 0 and part.open is not None and part.open.sequence == part.sequence else None

    def _has_same_tokens(self, sequence: int, start: int, tokens: tuple[int, ...]) -> bool:
        """Return whether a part has the sequence's tokens. Copies from other tokens than the part's are dropped."""
        stored, copy = self.store.sequences.get(sequence), self.copies.sequences.get(sequence)
        if stored is not None and not _agree(stored.history, start, tokens):
            return False
        if copy is not None and not _agree(copy.tokens, start, tokens):
            self.copies.drop(sequence)
            return stored is not None or start == 0
        return True

    def on_store_failed(self, sequence: int, reason: str) -> None:
        """Drop the copies of a sequence of which a part could not be stored."""
        self.count("kv_parts_not_stored", 1)
        self.write_log("kv_part_not_stored", sequence=sequence, reason=reason)
        self.copies.drop(sequence)

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, free_bytes: int, now: float, *, may_report: bool) -> None:
        """Drop copies if memory is short or no order has come for them, and report what has changed."""
        self.free_bytes = free_bytes
        if free_bytes < 0:
            freed = self.copies.free_memory(-free_bytes)
            self.free_bytes += freed
            if freed:
                self.count("kv_bytes_evicted", freed)
                self.write_log("kv_copies_evicted", num_bytes=freed, short_bytes=-free_bytes)
        if self._unordered_at is not None and now - self._unordered_at >= UNORDERED_S:
            self._unordered_at = None
            self.copies.clear()
        if may_report and now - self._checked_at >= REPORT_S:
            self._report(now)

    def _report_if_complete(self, now: float) -> None:
        """Report as soon as everything is held that the order awaits."""
        order = self.order
        if order is None or not self._is_awaited:
            return
        wanted = layers_of(source.layers for source in order.sources if source.is_awaited)
        for item in order.awaited:
            copy = self.copies.sequences.get(item.sequence)
            held = {} if copy is None else copy.positions
            if any(held.get(layer, 0) < item.position for layer in wanted):
                return
        self._is_awaited = False
        self._report(now, is_complete=True)

    def _report(self, now: float, *, is_complete: bool = False) -> None:
        held, self._checked_at = self.copies.inventory(), now
        free_bytes = 0 if self.order is None else max(0, self.free_bytes)
        report = held, free_bytes.bit_length()
        is_repeated = bool(held) and now - self._reported_at >= REPEAT_S
        has_changed = report != self._reported and bool(held or self.order or self._reported)
        if not (has_changed or is_repeated or is_complete):
            return
        self._reported, self._reported_at = report, now
        message = KvHeld(
            epoch=0 if self.order is None else self.order.epoch,
            incarnation=self.incarnation,
            held=held,
            num_bytes=self.copies.num_bytes,
            free_bytes=free_bytes,
            is_complete=is_complete,
        )
        self.actions.append(SendToBroker(message))


def _bounds(part: KvPart) -> tuple[int, int]:
    """Return the first of a part's positions, and the one behind the last."""
    return part.block * BLOCK, part.block * BLOCK + len(part.tokens)


def _agree(known: list[int], start: int, tokens: tuple[int, ...]) -> bool:
    """Return whether tokens from ``start`` on are those that are known, as far as these go."""
    overlap = known[start : start + len(tokens)]
    return count_equal(overlap, list(tokens)) == len(overlap)

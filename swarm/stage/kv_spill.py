"""Writing the stage's keys and values to the local disk: which sequence is next, and when there is time for it.

What a chunk of ``CHUNK`` positions holds in a layer depends on the model, the bits of the kernels, the adapter, and the
tokens and images up to its end, and on nothing else. So a chunk's name is a digest of these, and any later sequence
that begins with them can use it: after a restart of everything, or of another request.

The broker orders it (``SpillKv``) while all stages of a plan have the same bits. The compute thread reads a chunk when
there is no copy to be sent to another worker, and within a budget of its own, which is larger in idle time: other
stages may compute on the same cores. A chunk that the disk's thread does not accept waits; nothing waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from swarm.params import ImageSpan, image_content
from swarm.stage.actions import CHUNK, Action, SpillChunk
from swarm.stage.events import ChunkSpilled, KvTurn
from swarm.stage.kv_sender import IDLE_SHARE, SHARE, TimeBudget
from swarm.stage.sequences import CopyTarget, SentPositions, SequenceStore, StoredSequence
from swarm.wire.messages import LayerRange, Open, Row, SpillKv

_DIGEST_BYTES: Final = 20  # of a chunk's name; prompts are foreign, so collisions must not be found on purpose


def extend_name(before: str, tokens: Sequence[int], images: bytes = b"") -> str:
    """Return the name of the chunk with these tokens behind those named ``before`` (see ``first_name``). ``images``:
    what identifies the images that it has tokens of."""
    digest = hashlib.blake2b(bytes.fromhex(before), digest_size=_DIGEST_BYTES)
    digest.update(np.asarray(tokens, dtype="<u4").tobytes() + images)
    return digest.hexdigest()


def chunk_names(
    tokens: Sequence[int],
    stop: int,
    chunk: int = CHUNK,
    adapter: str = "",
    images: Sequence[ImageSpan] = (),
) -> list[str]:
    """Return the names of all whole chunks before ``stop``."""
    names: list[str] = []
    for start in range(0, stop - chunk + 1, chunk):
        seen = image_content(images, start, start + chunk)
        names.append(extend_name(names[-1] if names else first_name(adapter), tokens[start : start + chunk], seen))
    return names


def first_name(adapter: str) -> str:
    """Return the name before a sequence's first chunk: that of its adapter, if it has one."""
    return adapter.encode().hex()


@dataclass(slots=True)
class KvSpiller:
    """Chooser of the next chunk; the rules are in the module's docstring."""

    store: SequenceStore
    count: Callable[[str, float], None]
    chunk: int = CHUNK  # positions; another number only in the simulation
    order: SpillKv | None = None
    layers: LayerRange = field(default_factory=lambda: LayerRange(0, 0))  # of the stage, while there is an order
    # sequences of which a chunk may remain to be written, as keys; the longest unserved first
    unwritten: dict[int, None] = field(default_factory=dict)
    _excluded: set[int] = field(default_factory=set)  # sequences that are not written
    # Of sequences opened before the plan's order, which may arrive after the first steps: the sequence of an earlier
    # plan that they begin with.
    _origins: dict[int, int] = field(default_factory=dict)
    _names: dict[int, list[str]] = field(default_factory=dict)  # of the chunks written, by sequence
    _under_way: tuple[SentPositions, int, bool] | None = None  # with the position before, and whether no step waited
    _budget: TimeBudget = field(default_factory=lambda: TimeBudget(SHARE))
    _idle_budget: TimeBudget = field(default_factory=lambda: TimeBudget(IDLE_SHARE))

    # --- orders ------------------------------------------------------------------------------------------------------

    def follow(self, order: SpillKv, layers: LayerRange) -> None:
        """Write chunks of these layers, which are the stage's, from now on."""
        self.order, self.layers = order, layers
        self._excluded = set(order.excluded)
        self._excluded.update([number for number, origin in self._origins.items() if origin in self._excluded])
        self._origins.clear()
        self.unwritten = dict.fromkeys(self.store.sequences)

    def stop(self) -> None:
        """Write nothing more: the plan is not in force any more."""
        self.order = None
        self.unwritten.clear()
        self._excluded.clear()
        self._origins.clear()
        self._names.clear()

    # --- what has happened -------------------------------------------------------------------------------------------

    def add_opened(self, items: Iterable[Open]) -> None:
        """Record that these sequences were opened, perhaps with the beginning of another one."""
        if self.order is None:
            for item in items:
                if item.source is not None:
                    self._origins[item.sequence] = self._origins.get(item.source, item.source)
            return
        for item in items:
            self._names.pop(item.sequence, None)
            if item.source in self._excluded:
                self._excluded.add(item.sequence)
            self.unwritten[item.sequence] = None

    def add_released(self, sequences: Iterable[int]) -> None:
        """Record that these sequences are released."""
        for sequence in sequences:
            self._names.pop(sequence, None)
            self._origins.pop(sequence, None)
            self._excluded.discard(sequence)

    def add_positions(self, rows: Iterable[Row]) -> None:
        """Record that these rows were computed."""
        if self.order is not None:
            for row in rows:
                if (row.start + row.count) // self.chunk > row.start // self.chunk:
                    self.unwritten[row.sequence] = None

    def skip_to(self, sequence: int, position: int) -> None:
        """Record that the disk has the sequence's chunks before ``position``."""
        stored = self.store.sequences.get(sequence)
        if self.order is not None and stored is not None:
            sent = stored.sent.setdefault(self._target, SentPositions())
            sent.position = max(sent.position, position // self.chunk * self.chunk)

    # --- turns -------------------------------------------------------------------------------------------------------

    @property
    def _target(self) -> CopyTarget:
        return "", self.layers  # no worker has this name

    def has_chunk(self, turn: KvTurn, now: float) -> bool:
        """Return whether this turn would be used."""
        return self._may_write(turn, now) and self._find_next() is not None

    def take_turn(self, turn: KvTurn, now: float) -> list[Action]:
        """Have the next chunk written, if there is one and time for it."""
        sequence = self._find_next() if self._may_write(turn, now) else None
        if sequence is None or self.order is None:
            return []
        stored = self.store.sequences[sequence]
        sent = stored.sent.setdefault(self._target, SentPositions())
        start = sent.position // self.chunk * self.chunk  # a truncation may have cut it within a chunk
        stop = start + self.chunk
        self._under_way = sent, start, turn.is_idle
        sent.position = stop
        del self.unwritten[sequence]
        self.unwritten[sequence] = None  # the others come first
        name = self._name(sequence, stored, start)
        return [SpillChunk(sequence, self.layers, start, stop, name, self.order.bits)]

    def on_spilled(self, event: ChunkSpilled) -> None:
        """Record what became of the chunk that was chosen last."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        sent, before, was_idle = under_way
        (self._idle_budget if was_idle else self._budget).spend(event.took_s)
        if not event.is_taken:
            sent.position = min(sent.position, before)
            self.unwritten.pop(event.sequence, None)  # tried again when it has grown
            self.count("spill_chunks_not_read", 1)
        elif not event.is_whole:
            sent.position = min(sent.position, before)
            self.unwritten = {event.sequence: None, **self.unwritten}  # until the chunk is whole

    def on_lost(self, sequence: int, start: int) -> None:
        """Write a sequence again from a chunk on that is not on the disk: later ones are of no use without it."""
        stored = self.store.sequences.get(sequence)
        if self.order is not None and stored is not None and (sent := stored.sent.get(self._target)) is not None:
            sent.position = min(sent.position, start)
            self.unwritten[sequence] = None

    def _may_write(self, turn: KvTurn, now: float) -> bool:
        if not self.unwritten or not turn.may_spill or self._under_way is not None:
            return False
        budget = self._idle_budget if turn.is_idle else self._budget
        budget.refill(now)
        return budget.left_s > 0.0

    def _find_next(self) -> int | None:
        """Return the next sequence with a whole chunk that was not written."""
        for sequence in list(self.unwritten):
            stored = self.store.sequences.get(sequence)
            if stored is not None and self._has_chunk(sequence, stored):
                return sequence
            del self.unwritten[sequence]
        return None

    def _has_chunk(self, sequence: int, stored: StoredSequence) -> bool:
        position = stored.position()
        if self.order is None or position is None or sequence in self._excluded:
            return False
        sent = stored.sent.get(self._target)
        next_stop = ((0 if sent is None else sent.position) // self.chunk + 1) * self.chunk
        return stored.verified(position) >= max(self.order.num_positions, next_stop)

    def _name(self, sequence: int, stored: StoredSequence, start: int) -> str:
        """Return the name of the chunk from ``start`` on. Names of chunks before it stay: their tokens were written."""
        names = self._names.setdefault(sequence, [])
        del names[start // self.chunk :]
        for begin in range(len(names) * self.chunk, start + self.chunk, self.chunk):
            stop, params = begin + self.chunk, stored.open.params
            before = names[-1] if names else first_name(params.adapter)
            names.append(extend_name(before, stored.history[begin:stop], image_content(params.images, begin, stop)))
        return names[-1]

"""The sequences stored in a stage: each one's position in every layer, its memory in the executor, and its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from swarm.params import ImageSpan
from swarm.stage.actions import (
    Action,
    ForkSequence,
    OpenSequence,
    ReleaseSequence,
    ShrinkSequence,
    TruncateSequence,
)
from swarm.stage.events import StepArrived
from swarm.stage.executor import Batch, PromptJob, SampleJob, VectorJob
from swarm.stage.kv_copies import KvCopies, KvCopy, count_equal
from swarm.stage.log import ActivationLog
from swarm.stage.proposals import proposed_counts
from swarm.stage.shared_prefixes import SharedPrefixes
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import BLOCK, HeldSequence, LayerRange, Open, RangePosition, Row, SequencePosition, Step

CopyTarget = tuple[str, LayerRange]  # incarnation of a worker that is to hold copies, and their layers


@dataclass(slots=True)
class SentPositions:
    """How much of a sequence was sent to a worker that is to hold a copy."""

    position: int = 0
    turn: int = 0  # number of the sender's turn in which the last part was sent


@dataclass(slots=True)
class StoredSequence:
    """One sequence stored in this stage."""

    open: Open  # the broker's record: limit, sampling parameters, prompt length
    history: list[int]  # tokens of all positions so far
    # position of each range of layers, in layer order; a single range unless a replay is under way
    kv: list[RangePosition]
    is_retired: bool = False  # it has ended, and only its beginning is stored, for others to copy
    is_adopted: bool = False  # it consists of copies of another worker's keys and values, and no step has opened it
    # position from which on its tokens are proposals that the last step computed; None: all tokens are certain
    unverified_from: int | None = None
    # where layers keep states: the positions at which they are kept whatever happens (0: there are no states), and
    # the others at which they are held besides each layer's own position
    stride: int = 0
    held_states: tuple[int, ...] = ()
    # what was sent of it to workers that hold copies, by the receiver's incarnation and layers
    sent: dict[CopyTarget, SentPositions] = field(default_factory=dict)

    def position(self) -> int | None:
        """Return the number of positions in every layer, or None while the layers differ."""
        first = self.kv[0].position
        return first if all(r.position == first for r in self.kv) else None

    def verified(self, position: int) -> int:
        """Return the part of the first ``position`` positions that is not of proposals."""
        return position if self.unverified_from is None else min(position, self.unverified_from)

    def verified_kv(self) -> tuple[RangePosition, ...]:
        """Return the position of each range of layers, without proposals."""
        return tuple(_merge([RangePosition(r.layers, self.verified(r.position)) for r in self.kv]))

    def digests(self) -> tuple[int, ...]:
        """Return digests of the certain tokens from which the keys and values were computed."""
        params = self.open.params
        return prefix_digests(
            self.history, self.verified(max(r.position for r in self.kv)), params.adapter, params.images
        )

    def set_position(self, layers: LayerRange, position: int) -> None:
        """Set the position in all of the stage's layers."""
        self.kv = [RangePosition(layers, position)]
        self.unverified_from = None

    def start_row(self, row: Row) -> None:
        """Note that a row begins in all layers: it overwrites the states of the row before."""
        if self.stride:
            self.held_states = (row.start, *self._kept_block(row))

    def finish_row(self, layers: LayerRange, row: Row, num_proposed: int) -> None:
        """Note that all of the stage's layers have computed a row. Its last ``num_proposed`` tokens are proposals."""
        stop = row.start + row.count
        self.set_position(layers, stop)
        self.unverified_from = stop - num_proposed if num_proposed else None
        if self.stride:
            last = stop // BLOCK * BLOCK
            self.held_states = (*self.held_states, stop - 1, *((last,) if last > row.start else ()))

    def fall_back(self, layers: LayerRange, row: Row) -> None:
        """Note that a row is computed in pieces: if the last one fails, the state at its start is gone."""
        kept = self._kept_block(row)
        self.recede(layers, row.start // self.stride * self.stride)
        self.held_states = kept

    def _kept_block(self, row: Row) -> tuple[int, ...]:
        """Return the last multiple of ``BLOCK`` in a row's end, if it is before the row and its state is held."""
        last = (row.start + row.count) // BLOCK * BLOCK
        return (last,) if last == row.start or (last < row.start and last in self.held_states) else ()

    def can_begin(self, layers: LayerRange, start: int) -> bool:
        """Return whether these layers hold what a row or replay from ``start`` on begins with."""
        positions = [r.position for r in self.kv if r.layers.first < layers.stop and layers.first < r.layers.stop]
        return all(position >= start == self._held_before(position, start) for position in positions)

    def _held_before(self, held: int, position: int) -> int:
        """Return the largest position, at most ``position``, from which a layer that stands at ``held`` can go on."""
        if held <= position or not self.stride:
            return min(held, position)
        return max(position // self.stride * self.stride, *(p for p in (0, *self.held_states) if p <= position))

    def floor(self, layers: LayerRange, position: int) -> int:
        """Return the last position, not behind this one, that these layers hold with their states."""
        held = [r.position for r in self.kv if r.layers.first < layers.stop and layers.first < r.layers.stop]
        while held and (common := min(self._held_before(each, position) for each in held)) < position:
            position = common
        return position

    def min_position(self, layers: LayerRange) -> int:
        """Return the smallest number of positions among these layers."""
        return min(
            (r.position for r in self.kv if r.layers.first < layers.stop and layers.first < r.layers.stop), default=0
        )

    def advance(self, layers: LayerRange, position: int) -> None:
        """Raise the position of these layers to at least ``position``; other layers stay."""
        self._move(layers, lambda held: max(held, position))

    def recede(self, layers: LayerRange, position: int) -> None:
        """Lower the position of these layers to at most ``position``, from which on they are written again.

        A cache is written in units: positions behind the written ones, in the same unit, may be lost. So are states.
        """
        self.held_states = ()
        self._move(layers, lambda held: min(held, position))

    def _move(self, layers: LayerRange, new_position: Callable[[int], int]) -> None:
        moved: list[RangePosition] = []
        for held in self.kv:
            first, stop = max(held.layers.first, layers.first), min(held.layers.stop, layers.stop)
            if first >= stop:
                moved.append(held)
                continue
            if held.layers.first < first:
                moved.append(RangePosition(LayerRange(held.layers.first, first), held.position))
            moved.append(RangePosition(LayerRange(first, stop), new_position(held.position)))
            if stop < held.layers.stop:
                moved.append(RangePosition(LayerRange(stop, held.layers.stop), held.position))
        self.kv = _merge(moved)

    def truncate(self, position: int) -> None:
        """Drop the positions from ``position`` on. The broker cuts at verified positions only.

        A state can't be rolled back. If none is held at the position, the layers fall back to one before it, and are
        rebuilt.
        """
        self.unverified_from = None
        for sent in self.sent.values():
            sent.position = min(sent.position, position)
        cut = [RangePosition(r.layers, self._held_before(r.position, position)) for r in self.kv]
        self.kv = _merge(cut)
        self.held_states = tuple(p for p in self.held_states if p <= position)

    def change_layers(self, layers: LayerRange) -> None:
        """Change the stage's range of layers: layers that stay keep their positions, new ones start at 0."""
        ranges: list[RangePosition] = []
        next_layer = layers.first
        for held in self.kv:
            first, stop = max(held.layers.first, layers.first), min(held.layers.stop, layers.stop)
            if first >= stop:
                continue
            if first > next_layer:
                ranges.append(RangePosition(LayerRange(next_layer, first), 0))
            ranges.append(RangePosition(LayerRange(first, stop), held.position))
            next_layer = stop
        if next_layer < layers.stop:
            ranges.append(RangePosition(LayerRange(next_layer, layers.stop), 0))
        self.kv = _merge(ranges)


def _merge(ranges: list[RangePosition]) -> list[RangePosition]:
    merged: list[RangePosition] = []
    for item in ranges:
        if merged and merged[-1].position == item.position:
            merged[-1] = RangePosition(LayerRange(merged[-1].layers.first, item.layers.stop), item.position)
        else:
            merged.append(item)
    return merged


def pixels_of(step: Step) -> dict[str, bytes]:
    """Return the pixels that came with a step, by the digests of their images."""
    return {image.digest: image.pixels for image in step.pixels or ()}


def row_error(sequences: Mapping[int, StoredSequence], rows: tuple[Row, ...]) -> str | None:
    """Return an error text for the first row that does not begin exactly where its sequence ends in every layer, or
    None."""
    for row in rows:
        held = sequences.get(row.sequence)
        if held is None:
            return f"sequence {row.sequence} is not open here"
        if held.position() != row.start:
            return f"sequence {row.sequence} stands at {held.kv}, the row begins at {row.start}"
        if row.start + row.count > held.open.limit:
            return f"sequence {row.sequence} would outgrow its limit of {held.open.limit}"
    return None


@dataclass(slots=True)
class SequenceStore:
    """All sequences stored in this stage. Appends changes of the executor's memory to ``actions``."""

    log: ActivationLog
    actions: list[Action]
    stride: int = 0  # positions between states that are kept (``Manifest.state_stride``)
    state_bytes: tuple[int, ...] = ()  # size of a state, by layer (``Manifest.state_bytes``)
    sequences: dict[int, StoredSequence] = field(default_factory=dict)
    copies: KvCopies = field(init=False)
    prefixes: SharedPrefixes = field(init=False)

    def __post_init__(self) -> None:
        self.copies = KvCopies(self.actions, self.sequences, self.stride, state_bytes=self.state_bytes)
        self.prefixes = SharedPrefixes(self.actions, self.sequences)

    def inventory(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences, for Activated, without retired ones.

        Only the broker that retired a sequence can use it; a later broker could assume that the sequence has not ended.
        A sequence that was taken over from copies has digests: its tokens are those that another worker sent.
        """
        return tuple(
            self._describe(sequence, stored, has_digests=stored.is_adopted)
            for sequence, stored in self.sequences.items()
            if not stored.is_retired
        )

    def hello_inventory(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences, for Hello, with digests by which a broker recognises its own."""
        return tuple(
            self._describe(sequence, stored, has_digests=True)
            for sequence, stored in self.sequences.items()
            if not stored.is_retired
        )

    @staticmethod
    def _describe(sequence: int, stored: StoredSequence, *, has_digests: bool) -> HeldSequence:
        if not has_digests:
            return HeldSequence(sequence, stored.verified_kv())
        return HeldSequence(sequence, stored.verified_kv(), stored.digests(), stored.open.limit)

    def newly_verified(self, step: Step) -> tuple[Row, ...]:
        """Return the accepted proposals, as rows, that a step verifies: it cuts their sequence behind them, or begins a
        row there."""
        stops = {cut.sequence: cut.position for cut in step.truncate} | {row.sequence: row.start for row in step.rows}
        verified = []
        for sequence, stop in stops.items():
            held = self.sequences.get(sequence)
            if held is not None and held.unverified_from is not None and held.unverified_from < stop:
                verified.append(Row(sequence, held.unverified_from, stop - held.unverified_from, False))
        return tuple(verified)

    def batch(self, arrived: StepArrived, *, is_last: bool) -> Batch:
        """Add the step's tokens to the histories, and return the batch for the executor. On the last stage, rows draw
        tokens."""
        step = arrived.step
        counts = proposed_counts(step)
        samples, proposed, vectors, prompts = [], dict[int, int](), [], []
        taken = 0
        for index, row in enumerate(step.rows):
            held = self.sequences[row.sequence]
            held.history[row.start : row.start + row.count] = step.tokens[taken : taken + row.count]
            held.unverified_from = None  # the row begins where the verified positions end
            held.start_row(row)
            taken += row.count
            num_proposed = counts.get(row.sequence, 0)
            if num_proposed:
                proposed[index] = num_proposed
            item = held.open
            if is_last and item.params.prompt_logprobs is not None and row.start < item.num_prompt - 1:
                following = item.tokens[row.start + 1 : min(row.start + row.count + 1, item.num_prompt)]
                prompts.append(PromptJob(index, following, item.params.prompt_logprobs))
            if is_last and item.params.vector is not None:
                vectors.append(VectorJob(index, item.params.vector, row.sample))
            elif is_last and row.sample and item.params.max_answer:
                job = SampleJob(index, item.params, item.seed, held.history, item.num_prompt, num_proposed)
                samples.append(job)
        tokens = np.asarray(step.tokens, dtype=np.int64)
        return Batch(
            step.rows,
            tokens,
            arrived.hidden,
            tuple(samples),
            step.alone,
            proposed=proposed,
            vectors=tuple(vectors),
            prompts=tuple(prompts),
            adapters=self.adapters(step.rows),
            images=self.images(step.rows),
            pixels=pixels_of(step),
            image_parts=step.image_parts or (),
        )

    def adapters(self, rows: tuple[Row, ...]) -> tuple[str, ...]:
        """Return the adapter of each row, for the batch."""
        names = tuple(self.sequences[row.sequence].open.params.adapter for row in rows)
        return names if any(names) else ()

    def images(self, rows: tuple[Row, ...]) -> tuple[tuple[ImageSpan, ...], ...]:
        """Return the images of each row's sequence, for the batch."""
        images = tuple(self.sequences[row.sequence].open.params.images for row in rows)
        return images if any(images) else ()

    def fall_back(self, batch: Batch, layers: LayerRange) -> None:
        """Note that these rows are computed in pieces."""
        for row in batch.rows if self.stride else ():
            self.sequences[row.sequence].fall_back(batch.through or layers, row)

    def apply_header(self, step: Step, layers: LayerRange) -> str | None:
        """Retire, release, open and truncate sequences, in this order; return an error text if that is impossible.

        A cut of a sequence that the same step opens removes positions, not tokens: they came with the ``Open`` record,
        and by them the stage finds the sequence's chunks on disk.
        """
        opened = {item.sequence for item in step.open}
        for cut in step.retire:
            self._retire(cut)
        for sequence in step.release:
            self.release(sequence)
        self.prefixes.forget(step.release)
        for item in step.open:
            problem = self._open(item, layers, may_share=item.sequence not in (step.unshared or ()))
            if problem is not None:
                return problem
        for cut in step.truncate:
            held = self.sequences.get(cut.sequence)
            if held is None:
                return f"sequence {cut.sequence} is to be cut, but it is not open here"
            self._truncate(cut.sequence, cut.position, keeps_history=cut.sequence in opened)
        return None

    def _open(self, item: Open, layers: LayerRange, *, may_share: bool) -> str | None:
        held = self.find_reserved(item)
        if held is not None:  # opened again in a new epoch: the stored positions stay
            return self._open_again(held, item)
        position = item.shared if item.source is not None else 0
        if item.source is None:
            self._reserve(item)
        else:
            source = self.sequences.get(item.source)
            if source is None or source.floor(layers, position) != position:
                return (
                    f"sequence {item.sequence} is to begin as {item.source}, which does not hold {position} positions"
                )
            verified = source.verified(position)
            if source.history[verified:position] != list(item.tokens[verified:position]):
                return f"sequence {item.sequence} is to begin as {item.source}, with proposals that were refused"
            self.copies.drop(item.sequence)
            self.actions.append(ForkSequence(item.sequence, item.source, position, item.limit, may_share))
            self.log.fork(item.sequence, item.source, position)
        self._add(item, layers, position)
        return None

    def _add(self, item: Open, layers: LayerRange, position: int) -> None:
        kv = [RangePosition(layers, position)]
        self.sequences[item.sequence] = StoredSequence(item, list(item.tokens), kv, stride=self.stride)

    def find_reserved(self, item: Open) -> StoredSequence | None:
        """Return the stored sequence. One that was taken over from copies with another limit is released first: its
        memory has another size, and the broker counts none of its positions."""
        held = self.sequences.get(item.sequence)
        if held is not None and held.is_adopted and held.open.limit != item.limit:
            self.release(item.sequence)
            return None
        return held

    def _open_again(self, held: StoredSequence, item: Open) -> str | None:
        if held.is_adopted:
            computed = max(r.position for r in held.kv)
            if held.history[:computed] != list(item.tokens[:computed]):
                self.release(item.sequence)  # the next plan finds nothing, and has everything computed again
                return f"sequence {item.sequence} was taken over from copies, which were computed from other tokens"
        held.open, held.history, held.is_adopted = item, list(item.tokens), False
        return None

    def open_empty(self, item: Open, layers: LayerRange) -> None:
        """Open a sequence that is about to be rebuilt, with no positions."""
        self._reserve(item)
        self._add(item, layers, 0)
        if self.prefixes.position(item.sequence):
            self.log.expect(item.sequence, layers.stop)

    def _reserve(self, item: Open) -> None:
        """Reserve the sequence's memory, unless copies of other layers have done so."""
        copy = self.copies.sequences.get(item.sequence)
        if copy is not None:
            num_compared = min(len(copy.tokens), len(item.tokens))
            if copy.open.limit == item.limit and count_equal(copy.tokens, item.tokens) == num_compared:
                return
            self.copies.drop(item.sequence)
        self.actions.append(OpenSequence(item.sequence, item.limit))

    def _retire(self, cut: SequencePosition) -> None:
        """Cut a sequence that has ended to its beginning, which stays for other sequences to copy."""
        if cut.sequence in self.sequences:
            self._truncate(cut.sequence, cut.position)
            self.sequences[cut.sequence].is_retired = True
            self.copies.drop(cut.sequence)
            self.actions.append(ShrinkSequence(cut.sequence, cut.position))

    def _truncate(self, sequence: int, position: int, *, keeps_history: bool = False) -> None:
        held = self.sequences[sequence]
        held.truncate(position)
        if not keeps_history:
            del held.history[position:]
        self.log.truncate(sequence, position)
        self.copies.truncate(sequence, position)
        self.actions.append(TruncateSequence(sequence, position))

    def drop_unverified(self) -> None:
        """Cut all sequences to their verified positions: the next broker does not know which proposals were refused."""
        for sequence, stored in self.sequences.items():
            if stored.unverified_from is not None:
                self._truncate(sequence, stored.unverified_from)

    def release(self, sequence: int) -> None:
        """Drop a sequence with its copies; an unknown one is no error."""
        is_stored = self.sequences.pop(sequence, None) is not None
        if self.copies.forget(sequence) or is_stored:
            self.actions.append(ReleaseSequence(sequence))
        self.log.release(sequence)

    def keep_only(self, live: tuple[SequencePosition, ...]) -> None:
        """Drop all other sequences. Retired ones are dropped even if a broker that did not retire them lists them: they
        have no memory to grow."""
        are_live = {item.sequence for item in live}
        for sequence in [*self.sequences, *self.copies.sequences]:
            held = self.sequences.get(sequence)
            if sequence not in are_live or (held is not None and held.is_retired):
                self.release(sequence)

    def adopt_layers(self, live: tuple[SequencePosition, ...], layers: LayerRange, kept: frozenset[int]) -> None:
        """Adopt this range of layers, and cut the sequences, which are live, to their acknowledged positions.

        A layer that is new here begins with its copied positions. Copies of the layers in ``kept`` stay copies; those
        of all other layers are dropped.
        """
        positions = {item.sequence: item.position for item in live}
        for stored in self.sequences.values():
            stored.change_layers(layers)
        taken_over = set()
        for sequence, copy in list(self.copies.sequences.items()):
            if any(layers.first <= layer < layers.stop for layer in copy.positions):
                positions[sequence] = self._take_over(sequence, copy, layers, positions[sequence])
                taken_over.add(sequence)
        self.copies.drop_others(kept)
        for sequence, stored in self.sequences.items():
            self._truncate(sequence, positions[sequence])
            if sequence in taken_over:
                stored.held_states = ()  # they were those of other layers
            self.log.expect(sequence, layers.stop)
        for sequence in [copied for copied in self.copies.sequences if copied not in self.sequences]:
            self.copies.truncate(sequence, positions[sequence])
            if sequence in self.copies.sequences:
                self.actions.append(TruncateSequence(sequence, positions[sequence]))

    def _take_over(self, sequence: int, copy: KvCopy, layers: LayerRange, position: int) -> int:
        """Take over the copies of these layers, which are the stage's own from now on. Return ``position``, or the
        position before it up to which they were computed from the sequence's tokens."""
        held = self.sequences.get(sequence)
        if held is None:
            kv = [RangePosition(layers, 0)]
            held = StoredSequence(copy.open, list(copy.tokens), kv, is_adopted=True, stride=self.stride)
            self.sequences[sequence] = held
        num_equal = count_equal(held.history, copy.tokens)
        if num_equal == len(held.history):
            held.history.extend(copy.tokens[num_equal:])
            num_equal = len(held.history)
        elif num_equal == len(copy.tokens):
            num_equal = len(held.history)
        position = min(position, num_equal)
        for layer, usable in self.copies.take_over(sequence, layers, position).items():
            held.advance(LayerRange(layer, layer + 1), usable)
        return position

    def clear(self, *, keeps_unopened: bool = False) -> None:
        """Drop all sequences with their copies, and unless they are to be kept, those that consist of copies only."""
        for sequence in list(self.sequences):
            self.release(sequence)
        if not keeps_unopened:
            self.copies.clear()
        self.log.clear()

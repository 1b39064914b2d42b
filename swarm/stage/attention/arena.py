"""Storage of keys and values, by sequence and layer.

On a CPU, sequences of similar length share a *rack*: one range of address space per layer with a slot for each
sequence, large enough for the longest such sequence. Neighbouring sequences can then be multiplied in one product, and
nothing is gathered, copied or moved as they grow. The operating system commits pages when they are first written and
takes them back at release, so only written positions count, in blocks of 32.

A sequence that starts from another one's long prefix shares its pages (``sharing``, ``shared_slots``).

On other devices, memory is committed when it is allocated. There a sequence has pages of 128 positions from a pool
(``pages``); the positions of whole pages count.

A sequence may also hold *copies*: another worker's keys and values, in layers that are not in use here. They lie in the
sequence's own memory, so that taking over a layer moves nothing. They are counted apart, by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from swarm.errors import IllegalMove, KvFull
from swarm.stage.attention.grid import round_up
from swarm.stage.attention.memory import KvMemory, KvPlace, KvRegion
from swarm.stage.attention.pages import PagedPlace, PagePool, PoolLayer
from swarm.stage.attention.rack_memory import RackMemory, RackPlace
from swarm.stage.attention.racks import KvShape, LayerBuffer, Rack
from swarm.stage.attention.shared_slots import SharedSlots
from swarm.stage.attention.states import StateStore
from swarm.stage.attention.transfer import count_numbers
from swarm.wire.messages import STATE_STRIDE, LayerRange, Row


@dataclass(slots=True)
class _StoredSequence:
    place: KvPlace
    limit: int  # reserved positions
    used: int  # positions that count as used
    layers: set[int] = field(default_factory=set)  # layers in which something was written
    copies: dict[int, int] = field(default_factory=dict)  # layers of them that hold a copy, with the counted positions

    @property
    def num_counted(self) -> int:
        """Positions that count in some layer."""
        return max([self.used, *self.copies.values()])


class KvArena:
    """Keys and values of all sequences of one stage. Used by one thread only."""

    def __init__(self, device: torch.device, state_stride: int = STATE_STRIDE) -> None:
        self._sequences: dict[int, _StoredSequence] = {}  # by sequence
        self._used = 0  # positions that count as used, of all sequences, as if they shared nothing
        self._shared = SharedSlots()
        self._memory: KvMemory = RackMemory(self._shared) if device.type == "cpu" else PagePool()
        self.states = StateStore(device, state_stride)
        self.copied: Counter[int] = Counter()  # positions of copies, of all sequences, by layer

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def open(self, sequence: int, limit: int) -> None:
        self.release(sequence)
        self._sequences[sequence] = _StoredSequence(self._memory.open(limit), round_up(limit), 0)

    @property
    def used(self) -> int:
        """Positions that count as used, of all sequences. Shared ones count once."""
        return self._used - self._shared.positions.saved

    @property
    def wasted(self) -> int:
        """Largest number of positions that are counted as used for a sequence in addition to its whole blocks."""
        return self._memory.count(1) - round_up(1)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that were allocated; on a CPU, bytes of address space."""
        return self._memory.allocated_bytes

    @property
    def pool(self) -> PagePool | None:
        """The pages of all sequences; None on a CPU."""
        return self._memory if isinstance(self._memory, PagePool) else None

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        """Open a sequence with the first ``position`` positions of another one: copied, or shared if they are many.

        Raises ``KvFull`` if the broker counts positions as shared that can't be, or a CPU's memory ends; on other
        devices, their own error. Then the sequence is not open.
        """
        if source not in self._sequences or position > self._sequences[source].limit:
            raise IllegalMove(f"sequence {sequence} can't begin as {source}: that is not held up to {position}")
        self.open(sequence, limit)
        held, old = self._sequences[sequence], self._sequences[source]
        counted = self._shared.counted_stop(source, position) if may_share else 0
        layers = sorted(old.layers - old.copies.keys())
        try:
            self._mark_used(held, position)
            self._ensure_layers(sequence, source, layers)
        except (MemoryError, RuntimeError) as error:  # the second is torch's
            self.release(sequence)
            if self.pool is not None:
                raise  # the device may have more when it is tried again, or be lost
            raise KvFull(f"no memory for a copy of the first {position} positions of {source}: {error}") from error
        start = 0
        if may_share and self.can_share:
            start = self._shared.fork(
                sequence, source, position, mine=held.place.mappings, other=old.place.mappings, layers=held.layers
            )
        if start < counted:
            self.release(sequence)
            self.refuse_sharing()
            raise KvFull(
                f"sequence {sequence} can't share the first {counted} positions of {source}, as the plan counts"
            )
        held.place.copy_from(old.place, layers, position, start=start)
        self.states.fork(sequence, source, position)

    # --- shared prefixes ---------------------------------------------------------------------------------------------

    def share(self, sequence: int, source: int, position: int, *, is_mapped: bool) -> None:
        """Count a sequence's first ``position`` positions as shared with another one, once under a plan.

        ``is_mapped``: the source has them in all layers in use. Its pages are mapped over the sequence's, which has the
        same positions or none in each of these layers. Raises ``KvFull`` if they can't be shared.
        """
        held, old = self._sequences[sequence], self._sequences[source]
        layers = old.layers - old.copies.keys()
        self._ensure_layers(sequence, source, sorted(layers) if is_mapped else ())
        self._mark_used(held, position if is_mapped else 0)
        shared = self._shared.link(
            *(sequence, source, position),
            mine=held.place.mappings,
            other=old.place.mappings,
            layers=layers if is_mapped else set(),
        )
        if shared < position:
            self.refuse_sharing()
            raise KvFull(
                f"sequence {sequence} can't share the first {position} positions with {source}, as the plan counts"
            )

    @property
    def num_pages_kept(self) -> int:
        """How often a sequence kept shared pages, because the system refused to map other ones."""
        return self._shared.num_kept

    @property
    def can_share(self) -> bool:
        """Whether sequences can share pages."""
        return self._memory.can_share and not self._shared.is_refused

    def refuse_sharing(self) -> None:
        """Share nothing more. The next plan counts every sequence in full."""
        self._shared.is_refused = True

    def start_sharing(self, unit: int) -> None:
        """Count all sequences in full, and share by this unit from now on; 0: as suits the layers."""
        self._shared.start(unit, (held.place.mappings for held in self._sequences.values()))

    def shared_stop(self, sequence: int) -> int:
        """Return how many of the sequence's first positions count as shared."""
        return self._shared.positions.stop(sequence)

    def shrink(self, sequence: int, limit: int) -> None:
        """Reduce the sequence's reservation to ``limit`` and give back the memory beyond it."""
        held = self._sequences.get(sequence)
        if held is None:
            return
        held.limit = round_up(limit)
        self.states.shrink(sequence, limit)
        if held.limit < held.place.mappings.stop:
            self._shared.stop(sequence, held.place.mappings)
        taken = self._memory.count(limit)
        if held.num_counted > taken:
            self._used -= max(0, held.used - taken)
            held.used = min(held.used, taken)
            for layer, positions in list(held.copies.items()):
                self._count_copy(held, layer, min(positions, taken))
            held.place.free_from(held.layers, held.limit)

    # --- keys and values in motion -----------------------------------------------------------------------------------

    def read_positions(self, sequence: int, layers: LayerRange, start: int, stop: int) -> torch.Tensor:
        """Return a flat copy of these positions in these layers (``transfer``)."""
        held = self._sequences.get(sequence)
        if held is None or not held.layers.issuperset(range(layers.first, layers.stop)):
            raise IllegalMove(f"{layers.label}: nothing of sequence {sequence} is stored")
        if not 0 <= start < stop <= min(held.limit, held.place.num_readable(layers)):
            raise IllegalMove(f"sequence {sequence}: positions {start} to {stop} are not stored")
        return held.place.read(layers, start, stop)

    def write_positions(
        self,
        sequence: int,
        layers: LayerRange,
        span: tuple[int, int],
        flat: torch.Tensor,
        *,
        shapes: list[KvShape],
        active: LayerRange | None,
    ) -> None:
        """Write positions ``span`` as ``read_positions`` returned them, here or on another machine.

        In layers outside of ``active``, they count as a copy. ``shapes``: of each layer.
        """
        held, (start, stop) = self._sequences[sequence], span
        if not 0 <= start < stop <= held.limit:
            raise IllegalMove(f"sequence {sequence} reserved {held.limit} positions; {start} to {stop} don't fit")
        if len(flat) != count_numbers(shapes, stop - start):
            raise IllegalMove(f"{len(flat)} numbers don't fill {stop - start} positions of {layers.label}")
        counted = self._memory.count(stop)
        if held.place.mappings.covers(start, range(layers.first, layers.stop)):
            self._shared.stop(sequence, held.place.mappings)
        in_use = range(0) if active is None else range(active.first, active.stop)
        copies = {
            layer: max(counted, held.copies.get(layer, 0))
            for layer in range(layers.first, layers.stop)
            if layer not in in_use
        }
        is_used = len(copies) < len(layers)
        held.place.grow(max(held.used, counted if is_used else 0), held.copies | copies)
        self._mark_used(held, stop if is_used else 0)
        for layer, positions in copies.items():
            self._count_copy(held, layer, positions)
        for layer, shape in zip(range(layers.first, layers.stop), shapes, strict=True):
            if layer not in held.layers:
                self.ensure_region(sequence, layer, *shape.empty(flat))
        if held.place.shapes(layers) != shapes:
            raise IllegalMove(f"{layers.label}: keys and values of other heads are stored")
        held.place.write(layers, start, flat)

    def drop_copies(self, sequence: int, layers: LayerRange) -> None:
        """Drop the sequence's copies in these layers. An unknown sequence is no error."""
        self.states.drop_copies(sequence, range(layers.first, layers.stop))
        held = self._sequences.get(sequence)
        for layer in range(layers.first, layers.stop):
            if held is not None and layer in held.copies:
                self._drop_layer(held, layer)

    def _count_copy(self, held: _StoredSequence, layer: int, positions: int) -> None:
        """Set how many positions count as a copy of this layer; 0: it is none."""
        self.copied[layer] += positions - held.copies.get(layer, 0)
        held.copies[layer] = positions
        if not positions:
            del held.copies[layer]

    # --- end of sequences and layers ---------------------------------------------------------------------------------

    def release(self, sequence: int) -> None:
        held = self._sequences.pop(sequence, None)
        if held is None:
            return
        self._used -= held.used
        self._clear(sequence, held)
        held.place.release()

    def _clear(self, sequence: int, held: _StoredSequence) -> None:
        """Drop the sequence's data."""
        self.states.release(sequence)
        self._shared.positions.release(sequence)
        held.place.clear({*held.layers, *held.copies})
        held.layers.clear()
        for layer in list(held.copies):
            self._count_copy(held, layer, 0)

    def _drop_layer(self, held: _StoredSequence, layer: int) -> None:
        held.place.drop_layer(layer)
        held.layers.discard(layer)
        self._count_copy(held, layer, 0)

    def reset(self) -> None:
        self._sequences.clear()
        self._memory.clear()
        self.states.clear()
        self._used = 0
        self._shared.positions.clear(self._shared.positions.unit)
        self.copied.clear()

    def truncate(self, sequence: int, position: int) -> None:
        """Cut the sequence: positions from ``position`` on will be written again before they are read.

        Only a cut to 0 frees memory.
        """
        held = self._sequences.get(sequence)
        if held is not None and 0 < position < held.place.mappings.stop:
            self._shared.stop(sequence, held.place.mappings)
        self.states.truncate(sequence, position)
        if position == 0 and held is not None:
            self._clear(sequence, held)
            self._used -= held.used
            held.used = 0

    def keep_layers(self, layers: LayerRange, kept: Collection[int] = ()) -> None:
        """Drop the data of all other layers, except copies in ``kept`` ones. Copies in ``layers`` are in use from now
        on. If the device's memory ends, this can be done again."""
        own = range(layers.first, layers.stop)
        self.states.keep_layers(own, kept)
        self._memory.keep_layers(own, kept)
        for pages in {pages for held in self._sequences.values() for pages, _ in held.place.mappings.runs}:
            pages.keep_layers(own)
        self.start_sharing(self._shared.positions.unit)
        for held in self._sequences.values():
            for layer in {*held.layers, *held.copies}:
                positions = held.copies.get(layer, 0)
                if layer in own:
                    self._mark_used(held, positions)  # first: where memory ends, the layers can be kept again
                    self._count_copy(held, layer, 0)
                elif layer not in kept:  # its memory is gone
                    held.layers.discard(layer)
                    self._count_copy(held, layer, 0)
                elif not positions:
                    self._drop_layer(held, layer)
            held.place.grow(held.used, held.copies)  # in layers of which it had shorter copies

    def check_reserved(self, row: Row) -> None:
        """Raise ``IllegalMove`` unless the row's positions are reserved."""
        held = self._sequences.get(row.sequence)
        if held is None:
            raise IllegalMove(f"sequence {row.sequence} was never opened here, or released")
        if row.start + row.count > held.limit:
            raise IllegalMove(
                f"sequence {row.sequence} reserved {held.limit} positions; "
                f"positions {row.start} to {row.start + row.count} don't fit"
            )

    def mark_used(self, row: Row, *, is_replay: bool = False) -> None:
        """Count the row's positions as used; they are about to be written. A replay writes what is there, if anything:
        shared positions stay the same in every sequence."""
        self.check_reserved(row)
        held = self._sequences[row.sequence]
        if row.start < held.place.mappings.stop and not is_replay:
            self._shared.stop(row.sequence, held.place.mappings)
        self._mark_used(held, row.start + row.count)

    def end_replay(self, row: Row) -> None:
        """Free the pages that a replay has written over shared ones, which hold the same."""
        held = self._sequences[row.sequence]
        try:
            held.place.mappings.map_again(row.start, row.start + row.count)
        except OSError as error:
            self._shared.keep_pages(held.place.mappings, error)

    def _mark_used(self, held: _StoredSequence, position: int) -> None:
        more = self._memory.count(position) - held.used
        if more > 0:
            held.place.grow(held.used + more, held.copies)
            held.used += more
            self._used += more

    def slot(self, sequence: int) -> tuple[Rack, int]:
        """Return the sequence's rack and slot on a CPU, which are the same in every layer."""
        place = self._sequences[sequence].place
        assert isinstance(place, RackPlace), "racks are on a CPU"
        return place.rack, place.slot

    def pages(self, sequence: int) -> list[int]:
        """Return the numbers of the sequence's pages in the pool, which are the same in every layer."""
        place = self._sequences[sequence].place
        assert isinstance(place, PagedPlace), "a CPU has no pool"
        return place.pages

    def shapes(self, sequence: int) -> dict[int, KvShape]:
        """Return the shapes of the layers in which something of the sequence was written."""
        held = self._sequences[sequence]
        return {layer: held.place.region(layer).shape for layer in held.layers}

    def region(self, sequence: int, layer: int) -> KvRegion | None:
        """Return the sequence's region in this layer; None if it was never written."""
        held = self._sequences.get(sequence)
        return held.place.region(layer) if held is not None and layer in held.layers else None

    def ensure_region(self, sequence: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KvRegion:
        """Return the sequence's region in this layer, created for keys and values like these (``[heads, *, size]``) if
        needed."""
        held = self._sequences[sequence]
        region = held.place.ensure_region(layer, keys, values, num_copied=held.copies.get(layer))
        held.layers.add(layer)
        return region

    def ensure_buffer(self, rack: Rack, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffer:
        """Return a layer of a rack, created at first use."""
        assert isinstance(self._memory, RackMemory), "racks are on a CPU"
        return self._memory.ensure_buffer(rack, layer, keys, values)

    def ensure_pages(
        self, sequences: tuple[int, ...], layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> PoolLayer:
        """Return a layer of the pool, in which these sequences have memory from now on."""
        assert isinstance(self._memory, PagePool), "a CPU has no pool"
        for sequence in sequences:
            if layer not in self._sequences[sequence].layers:
                self.ensure_region(sequence, layer, keys, values)
        return self._memory.ensure_layer(layer, keys, values, is_copy=False)

    def mark_written(self, sequences: tuple[int, ...], layer: int) -> None:
        """Record that these sequences have data in this layer."""
        for sequence in sequences:
            self._sequences[sequence].layers.add(layer)

    def _ensure_layers(self, sequence: int, source: int, layers: Collection[int]) -> None:
        """Create layers of a sequence like those of another one, which exist."""
        for layer in layers:
            self.ensure_region(sequence, layer, *self._existing_region(source, layer).read(0, 0))

    def _existing_region(self, sequence: int, layer: int) -> KvRegion:
        region = self.region(sequence, layer)
        if region is None:
            raise IllegalMove(f"layer {layer} holds nothing of sequence {sequence}")
        return region

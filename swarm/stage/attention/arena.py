"""Storage of keys and values, by sequence and layer.

On a CPU, sequences of similar length share a *rack*: one range of address space per layer with a slot for each
sequence, large enough for the longest such sequence. Neighbouring sequences can then be multiplied in one product, and
nothing is gathered, copied or moved as they grow. The operating system commits pages when they are first written and
takes them back at release, so only written positions count, in blocks of 32.

A sequence that starts from another one's long prefix shares its pages (``sharing``, ``shared_slots``).

On other devices, memory is committed when it is requested. There each sequence has a rack of its own, which is
enlarged, and copied, whenever the sequence has grown by 128 positions; allocated positions count.

A sequence may also hold *copies*: another worker's keys and values, in layers that are not in use here. They lie in the
sequence's own slot, so that taking over a layer moves nothing. They are counted apart, by layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from swarm.errors import IllegalMove, KvFull
from swarm.stage.attention.grid import CELL, round_up
from swarm.stage.attention.layouts import choose_layouts
from swarm.stage.attention.racks import KvShape, LayerBuffer, Rack, Region, new_buffer
from swarm.stage.attention.shared_slots import SharedSlots, SlotMappings
from swarm.stage.attention.sharing import can_share
from swarm.stage.attention.states import StateStore
from swarm.stage.attention.transfer import Slabs, count_numbers
from swarm.wire.messages import STATE_STRIDE, LayerRange, Row

# Sequences that share a rack, on systems where giving back a part of a mapping zeroes it.
_RACK_SLOTS = 32


@dataclass(slots=True)
class _StoredSequence:
    rack: Rack
    slot: int  # slot in the rack
    limit: int  # reserved positions
    used: int  # positions that count as used
    layers: set[int] = field(default_factory=set)  # layers in which something was written
    copies: dict[int, int] = field(default_factory=dict)  # layers of them that hold a copy, with the counted positions
    mappings: SlotMappings = field(init=False)

    def __post_init__(self) -> None:
        self.mappings = SlotMappings(self.rack, self.slot)

    @property
    def allocated(self) -> int:
        """Positions for which the rack needs room where memory has no pages."""
        return max(self.used, *self.copies.values()) if self.copies else self.used


class KvArena:
    """Keys and values of all sequences of one stage. Used by one thread only."""

    def __init__(self, device: torch.device, state_stride: int = STATE_STRIDE) -> None:
        self._device = device
        self._has_pages = device.type == "cpu"  # whether memory is committed by writing
        self._num_slots = _RACK_SLOTS if device.type == "cpu" and sys.platform == "linux" else 1
        self._sequences: dict[int, _StoredSequence] = {}  # by sequence
        self._racks: list[Rack] = []
        self._used = 0  # positions that count as used, of all sequences, as if they shared nothing
        self._shared = SharedSlots()
        self.states = StateStore(device, state_stride)
        self.copied: Counter[int] = Counter()  # positions of copies, of all sequences, by layer

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def open(self, sequence: int, limit: int) -> None:
        self.release(sequence)
        rack = self._rack_for(limit)
        self._sequences[sequence] = _StoredSequence(rack, rack.free.pop(), round_up(limit), 0)

    @property
    def used(self) -> int:
        """Positions that count as used, of all sequences. Shared ones count once."""
        return self._used - self._shared.positions.saved

    @property
    def wasted(self) -> int:
        """Largest number of positions that are counted as used for a sequence in addition to its whole blocks."""
        return self._count_used(1) - round_up(1)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that were allocated; on a CPU, bytes of address space."""
        slabs = (slab for rack in self._racks for slab in rack.buffers.values())
        return sum(slab.keys.nbytes + slab.values.nbytes for slab in slabs)

    def _rack_for(self, limit: int) -> Rack:
        """Return a rack with a free slot for this many positions, rounded up to a power of two; where memory has no
        pages, a new empty rack that grows."""
        positions = CELL if self._has_pages else 0
        while 0 < positions < limit:
            positions *= 2
        for rack in self._racks if self._has_pages else ():
            if rack.free and rack.positions == positions:
                return rack
        self._racks.append(Rack(positions, list(range(self._num_slots))[::-1]))
        return self._racks[-1]

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        """Open a sequence with the first ``position`` positions of another one: copied, or shared if they are many.

        Raises ``KvFull`` if the broker counts positions as shared that can't be. Then the sequence is not open.
        """
        if source not in self._sequences or position > self._sequences[source].limit:
            raise IllegalMove(f"sequence {sequence} can't begin as {source}: that is not held up to {position}")
        self.open(sequence, limit)
        held, old = self._sequences[sequence], self._sequences[source]
        self._mark_used(held, position)
        counted = self._shared.counted_stop(source, position) if may_share else 0
        layers = old.layers - old.copies.keys()
        regions = {layer: self._existing_region(source, layer) for layer in sorted(layers)}
        mine = {layer: self.ensure_region(sequence, layer, *region.read(0, 0)) for layer, region in regions.items()}
        start = 0
        if may_share and self.can_share:
            start = self._shared.fork(
                sequence, source, position, mine=held.mappings, other=old.mappings, layers=held.layers
            )
        if start < counted:
            self.release(sequence)
            self.refuse_sharing()
            raise KvFull(
                f"sequence {sequence} can't share the first {counted} positions of {source}, as the plan counts"
            )
        for layer, region in regions.items():
            mine[layer].copy_from(region, position, start=start)
        self.states.fork(sequence, source, position)

    # --- shared prefixes ---------------------------------------------------------------------------------------------

    def share(self, sequence: int, source: int, position: int, *, is_mapped: bool) -> None:
        """Count a sequence's first ``position`` positions as shared with another one, once under a plan.

        ``is_mapped``: the source has them in all layers in use. Its pages are mapped over the sequence's, which has the
        same positions or none in each of these layers. Raises ``KvFull`` if they can't be shared.
        """
        held, old = self._sequences[sequence], self._sequences[source]
        layers = old.layers - old.copies.keys()
        for layer in sorted(layers) if is_mapped else ():
            self.ensure_region(sequence, layer, *self._existing_region(source, layer).read(0, 0))
        self._mark_used(held, position if is_mapped else 0)
        shared = self._shared.link(
            *(sequence, source, position), mine=held.mappings, other=old.mappings, layers=layers if is_mapped else set()
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
        return self._num_slots > 1 and not self._shared.is_refused and can_share()

    def refuse_sharing(self) -> None:
        """Share nothing more. The next plan counts every sequence in full."""
        self._shared.is_refused = True

    def start_sharing(self, unit: int) -> None:
        """Count all sequences in full, and share by this unit from now on; 0: as suits the layers."""
        self._shared.start(unit, (held.mappings for held in self._sequences.values()))

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
        if held.limit < held.mappings.stop:
            self._shared.stop(sequence, held.mappings)
        taken = self._count_used(limit)
        if held.allocated > taken:
            self._used -= max(0, held.used - taken)
            held.used = min(held.used, taken)
            for layer, positions in list(held.copies.items()):
                self._count_copy(held, layer, min(positions, taken))
            if not self._has_pages:
                held.rack.resize(taken)
            for layer in held.layers if self._num_slots > 1 else ():
                try:
                    held.rack.buffers[layer].free_from(held.slot, held.limit, is_mapped=held.mappings.is_mapped)
                except OSError as error:
                    self._shared.keep_pages(held.mappings, error)

    # --- keys and values in motion -----------------------------------------------------------------------------------

    def read_positions(self, sequence: int, layers: LayerRange, start: int, stop: int) -> torch.Tensor:
        """Return a flat copy of these positions in these layers (``transfer``)."""
        held = self._sequences.get(sequence)
        if held is None or not held.layers.issuperset(range(layers.first, layers.stop)):
            raise IllegalMove(f"{layers.label}: nothing of sequence {sequence} is stored")
        if not 0 <= start < stop <= min(held.limit, held.rack.positions):
            raise IllegalMove(f"sequence {sequence}: positions {start} to {stop} are not stored")
        return Slabs.of(held.rack, layers).read(held.slot, start, stop)

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
        counted = self._count_used(stop)
        if held.mappings.covers(start, range(layers.first, layers.stop)):
            self._shared.stop(sequence, held.mappings)
        self._allocate(held, counted)
        for layer in range(layers.first, layers.stop):
            if active is not None and active.first <= layer < active.stop:
                self._mark_used(held, stop)
            elif held.copies.get(layer, 0) < counted:
                self._count_copy(held, layer, counted)
        for layer, shape in zip(range(layers.first, layers.stop), shapes, strict=True):
            if layer not in held.layers:
                self.ensure_region(sequence, layer, *shape.empty(flat))
        slabs = Slabs.of(held.rack, layers)
        if slabs.shapes != shapes:
            raise IllegalMove(f"{layers.label}: keys and values of other heads are stored")
        slabs.write(held.slot, start, flat)

    def drop_copies(self, sequence: int, layers: LayerRange) -> None:
        """Drop the sequence's copies in these layers. An unknown sequence is no error."""
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
        if held.mappings.is_stuck:
            return  # it would not read as zeros
        held.rack.free.append(held.slot)
        held.rack.free.sort(reverse=True)
        if len(held.rack.free) == self._num_slots:
            self._racks.remove(held.rack)

    def _clear(self, sequence: int, held: _StoredSequence) -> None:
        """Drop the sequence's data. A reused slot must read as zeros, since the old data may contain NaNs."""
        self.states.release(sequence)
        self._shared.positions.release(sequence)
        for layer in [*held.layers, *held.copies]:
            self._drop_layer(held, layer)
        held.mappings.forget()

    def _drop_layer(self, held: _StoredSequence, layer: int) -> None:
        buffer = held.rack.buffers.get(layer)  # none if a copy of it was counted but got no memory
        if self._num_slots == 1:
            held.rack.buffers.pop(layer, None)
            held.rack.forget_addresses()
        elif buffer is not None:
            try:
                buffer.clear(held.slot, is_mapped=held.mappings.is_mapped)
            except OSError as error:
                self._shared.keep_pages(held.mappings, error)
        held.layers.discard(layer)
        self._count_copy(held, layer, 0)

    def reset(self) -> None:
        self._sequences.clear()
        self._racks.clear()
        self.states.clear()
        self._used = 0
        self._shared.positions.clear(self._shared.positions.unit)
        self.copied.clear()

    def truncate(self, sequence: int, position: int) -> None:
        """Cut the sequence: positions from ``position`` on will be written again before they are read.

        Only a cut to 0 frees memory.
        """
        held = self._sequences.get(sequence)
        if held is not None and 0 < position < held.mappings.stop:
            self._shared.stop(sequence, held.mappings)
        self.states.truncate(sequence, position)
        if position == 0 and held is not None:
            self._clear(sequence, held)
            self._used -= held.used
            held.used = 0

    def keep_layers(self, layers: LayerRange, kept: Collection[int] = ()) -> None:
        """Drop the data of all other layers, except copies in ``kept`` ones. Copies in ``layers`` are in use from now
        on."""
        own = range(layers.first, layers.stop)
        self.states.keep_layers(own)
        for rack in self._racks:
            for layer in [layer for layer in rack.buffers if layer not in own and layer not in kept]:
                del rack.buffers[layer]
            rack.forget_addresses()
        for pages in {pages for held in self._sequences.values() for pages, _ in held.mappings.runs}:
            pages.keep_layers(own)
        self.start_sharing(self._shared.positions.unit)
        for held in self._sequences.values():
            for layer in {*held.layers, *held.copies}:
                positions = held.copies.get(layer, 0)
                if layer in own:
                    self._count_copy(held, layer, 0)
                    self._mark_used(held, positions)
                elif layer not in kept:  # its buffer is gone
                    held.layers.discard(layer)
                    self._count_copy(held, layer, 0)
                elif not positions:
                    self._drop_layer(held, layer)

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
        if row.start < held.mappings.stop and not is_replay:
            self._shared.stop(row.sequence, held.mappings)
        self._mark_used(held, row.start + row.count)

    def end_replay(self, row: Row) -> None:
        """Free the pages that a replay has written over shared ones, which hold the same."""
        held = self._sequences[row.sequence]
        try:
            held.mappings.map_again(row.start, row.start + row.count)
        except OSError as error:
            self._shared.keep_pages(held.mappings, error)

    def _mark_used(self, held: _StoredSequence, position: int) -> None:
        more = self._count_used(position) - held.used
        if more > 0:
            self._allocate(held, held.used + more)
            held.used += more
            self._used += more

    def _allocate(self, held: _StoredSequence, positions: int) -> None:
        """Fit the rack of a sequence to what it holds and to this many positions, before they are counted: memory may
        end. Where it has pages, it is allocated by writing."""
        needed = max(positions, held.allocated)
        if not self._has_pages and held.rack.positions != needed:
            held.rack.resize(needed)

    def _count_used(self, positions: int) -> int:
        """Return how many positions count as used when this many are written. Attention reads whole cells, so where
        memory has no pages a whole cell is allocated."""
        return round_up(positions) if self._has_pages else -(-positions // CELL) * CELL

    def slot(self, sequence: int) -> tuple[Rack, int]:
        """Return the sequence's rack and slot, which are the same in every layer."""
        held = self._sequences[sequence]
        return held.rack, held.slot

    def shapes(self, sequence: int) -> dict[int, KvShape]:
        """Return the shapes of the layers in which something of the sequence was written."""
        held = self._sequences[sequence]
        return {layer: held.rack.buffers[layer].shape for layer in held.layers}

    def region(self, sequence: int, layer: int) -> Region | None:
        """Return the sequence's region in this layer; None if it was never written."""
        held = self._sequences.get(sequence)
        return held.rack.buffers[layer].region(held.slot) if held is not None and layer in held.layers else None

    def ensure_region(self, sequence: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Region:
        """Return the sequence's region in this layer, created for keys and values like these (``[heads, *, size]``) if
        needed."""
        held = self._sequences[sequence]
        slab = self.ensure_buffer(held.rack, layer, keys, values)
        held.layers.add(layer)
        return slab.region(held.slot)

    def ensure_buffer(self, rack: Rack, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffer:
        """Return a layer of a rack, created at first use."""
        shape = KvShape(keys.shape[0], keys.shape[2], values.shape[2])
        if layer not in rack.buffers:
            rack.buffers[layer] = new_buffer(self._num_slots, rack.positions, shape, keys)
            rack.forget_addresses()
        buffer = rack.buffers[layer]
        if buffer.layouts is not choose_layouts(keys, shape.value_size):
            raise IllegalMove(f"layer {layer} holds keys and values as other kernels want them; release them first")
        if buffer.shape != shape:
            raise IllegalMove(f"layer {layer} holds keys and values of other heads; release them first")
        return buffer

    def mark_written(self, sequences: tuple[int, ...], layer: int) -> None:
        """Record that these sequences have data in this layer."""
        for sequence in sequences:
            self._sequences[sequence].layers.add(layer)

    def _existing_region(self, sequence: int, layer: int) -> Region:
        region = self.region(sequence, layer)
        if region is None:
            raise IllegalMove(f"layer {layer} holds nothing of sequence {sequence}")
        return region

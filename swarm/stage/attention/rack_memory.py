"""Memory of an arena on a CPU: each sequence has a slot of a rack (``racks``)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.errors import IllegalMove
from swarm.stage.attention.grid import CELL, round_up
from swarm.stage.attention.layouts import choose_layouts
from swarm.stage.attention.racks import KvShape, LayerBuffer, Rack, Region, new_buffer
from swarm.stage.attention.shared_slots import SharedSlots, SlotMappings
from swarm.stage.attention.sharing import can_share
from swarm.stage.attention.transfer import Slabs

if TYPE_CHECKING:
    import torch

    from swarm.wire.messages import LayerRange

# Sequences that share a rack, on systems where giving back a part of a mapping zeroes it.
_RACK_SLOTS = 32


@dataclass(slots=True, eq=False)
class RackPlace:
    """Slot of a rack. The operating system allocates its memory when it is written."""

    memory: RackMemory
    rack: Rack
    slot: int
    mappings: SlotMappings = field(init=False)

    def __post_init__(self) -> None:
        self.mappings = SlotMappings(self.rack, self.slot)

    def num_readable(self, layers: LayerRange) -> int:
        return self.rack.positions

    def grow(self, used: int, copies: Mapping[int, int]) -> None:
        pass

    def ensure_region(self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, num_copied: int | None) -> Region:
        return self.memory.ensure_buffer(self.rack, layer, keys, values).region(self.slot)

    def region(self, layer: int) -> Region:
        return self.rack.buffers[layer].region(self.slot)

    def copy_from(self, source: RackPlace, layers: Iterable[int], position: int, *, start: int) -> None:
        for layer in layers:
            self.region(layer).copy_from(source.region(layer), position, start=start)

    def shapes(self, layers: LayerRange) -> list[KvShape]:
        return Slabs.of(self.rack, layers).shapes

    def read(self, layers: LayerRange, start: int, stop: int) -> torch.Tensor:
        return Slabs.of(self.rack, layers).read(self.slot, start, stop)

    def write(self, layers: LayerRange, start: int, flat: torch.Tensor) -> None:
        Slabs.of(self.rack, layers).write(self.slot, start, flat)

    def free_from(self, layers: Collection[int], position: int) -> None:
        for layer in layers if self.memory.num_slots > 1 else ():
            try:
                self.rack.buffers[layer].free_from(self.slot, position, is_mapped=self.mappings.is_mapped)
            except OSError as error:
                self.memory.shared.keep_pages(self.mappings, error)

    def drop_layer(self, layer: int) -> None:
        """Drop a layer's data. A reused slot must read as zeros, since the old data may contain NaNs."""
        buffer = self.rack.buffers.get(layer)  # none if a copy of it was counted but got no memory
        if self.memory.num_slots == 1:
            self.rack.buffers.pop(layer, None)
            self.rack.forget_addresses()
        elif buffer is not None:
            try:
                buffer.clear(self.slot, is_mapped=self.mappings.is_mapped)
            except OSError as error:
                self.memory.shared.keep_pages(self.mappings, error)

    def clear(self, layers: Collection[int]) -> None:
        for layer in layers:
            self.drop_layer(layer)
        self.mappings.forget()

    def release(self) -> None:
        if not self.mappings.is_stuck:  # else it would not read as zeros
            self.memory.release(self.rack, self.slot)


class RackMemory:
    """Racks of all sequences. ``shared``: the account of what their slots share."""

    def __init__(self, shared: SharedSlots) -> None:
        self.shared = shared
        self.num_slots = _RACK_SLOTS if sys.platform == "linux" else 1
        self.racks: list[Rack] = []

    @property
    def allocated_bytes(self) -> int:
        slabs = (slab for rack in self.racks for slab in rack.buffers.values())
        return sum(slab.keys.nbytes + slab.values.nbytes for slab in slabs)

    @property
    def can_share(self) -> bool:
        return self.num_slots > 1 and can_share()

    def count(self, positions: int) -> int:
        return round_up(positions)

    def open(self, limit: int) -> RackPlace:
        rack = self._rack_for(limit)
        return RackPlace(self, rack, rack.free.pop())

    def _rack_for(self, limit: int) -> Rack:
        """Return a rack with a free slot for this many positions, rounded up to a power of two."""
        positions = CELL
        while positions < limit:
            positions *= 2
        for rack in self.racks:
            if rack.free and rack.positions == positions:
                return rack
        self.racks.append(Rack(positions, list(range(self.num_slots))[::-1]))
        return self.racks[-1]

    def release(self, rack: Rack, slot: int) -> None:
        """Take back a slot, and drop its rack if it was the last one in use."""
        rack.free.append(slot)
        rack.free.sort(reverse=True)
        if len(rack.free) == self.num_slots:
            self.racks.remove(rack)

    def ensure_buffer(self, rack: Rack, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffer:
        """Return a layer of a rack, created at first use."""
        shape = KvShape(keys.shape[0], keys.shape[2], values.shape[2])
        if layer not in rack.buffers:
            rack.buffers[layer] = new_buffer(self.num_slots, rack.positions, shape, keys)
            rack.forget_addresses()
        buffer = rack.buffers[layer]
        if buffer.layouts is not choose_layouts(keys, shape.value_size):
            raise IllegalMove(f"layer {layer} holds keys and values as other kernels want them; release them first")
        if buffer.shape != shape:
            raise IllegalMove(f"layer {layer} holds keys and values of other heads; release them first")
        return buffer

    def keep_layers(self, own: Collection[int], kept: Collection[int]) -> None:
        for rack in self.racks:
            for layer in [layer for layer in rack.buffers if layer not in own and layer not in kept]:
                del rack.buffers[layer]
            rack.forget_addresses()

    def clear(self) -> None:
        self.racks.clear()

"""Pages that several sequences of an arena share (on a CPU, under Linux).

The account (``wire.shared_positions``) decides which positions a fork shares. Their chunks move once to a file in
memory and are mapped over the slots of the source and of each fork. The mappings are private: a sequence that writes
there gets pages of its own, so a write never shows in another sequence, or in another process. Addresses stay the same,
so attention needs no change. A chunk's pages are freed with its last mapping, in whatever order the sequences end.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from swarm.stage.attention.layouts import Layout
from swarm.stage.attention.mapping import free_pages, map_pages
from swarm.stage.attention.racks import KvShape, LayerBuffer, SlotPart

# Least positions of a chunk: copying fewer takes as long as mapping them.
MIN_SHARED = 256
_USUAL_MAX_MAPPINGS = 65_530  # Linux's default of vm.max_map_count


class PageFile:
    """File in memory. It ends with the last pages that refer to it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("swarm-kv", os.MFD_CLOEXEC)
        self._size = 0

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of a new range, which takes memory only where it is written."""
        offset, self._size = self._size, self._size + num_bytes
        return offset

    def write(self, address: int, num_bytes: int, offset: int) -> None:
        view = memoryview((ctypes.c_char * num_bytes).from_address(address))
        done = 0
        while done < num_bytes:
            done += os.pwrite(self._file, view[done:], offset + done)

    def map(self, address: int, num_bytes: int, offset: int) -> None:
        """Map a range over the pages at an address."""
        map_pages(address, num_bytes, self._file, offset)

    def free(self, offset: int, num_bytes: int) -> None:
        """Free the memory of a range, over which nothing is mapped any more."""
        free_pages(self._file, offset, num_bytes)


@dataclass(frozen=True, slots=True)
class _FilePart:
    """Place of the keys, or of the values, of a layer in a file."""

    offset: int  # of the first head
    stride: int  # bytes from head to head
    heads: int
    position_bytes: int  # of one position in one head


@dataclass(slots=True, eq=False)
class SharedPages:
    """Pages of a run of chunks, from position ``start`` on."""

    file: PageFile
    start: int
    unit: int  # positions of a chunk
    layers: dict[int, tuple[_FilePart, ...]] = field(default_factory=dict)  # keys, and values if any, by layer
    num_slots: list[int] = field(default_factory=list)  # slots over which each chunk is mapped

    @classmethod
    def reserve(cls, file: PageFile, start: int, unit: int, buffers: Mapping[int, LayerBuffer]) -> SharedPages:
        """Return a new run, with room for as many positions as the slots of these buffers have."""
        pages = cls(file, start, unit)
        for layer, buffer in buffers.items():
            pages.layers[layer] = tuple(pages._reserve(part) for part in buffer.parts(0, start, start + unit))
        return pages

    def _reserve(self, chunk: SlotPart) -> _FilePart:
        stride = chunk.stride  # the whole slot's: in the file it takes no memory
        position_bytes = chunk.num_bytes // self.unit
        return _FilePart(self.file.reserve(stride * chunk.heads), stride, chunk.heads, position_bytes)

    @property
    def stop(self) -> int:
        return self.start + self.unit * len(self.num_slots)

    @property
    def num_ranges(self) -> int:
        """Ranges of a slot over which it is mapped."""
        return sum(part.heads for parts in self.layers.values() for part in parts)

    def extend(self, buffers: Mapping[int, LayerBuffer], slot: int, stop: int) -> None:
        """Move a slot's positions from the run's end to ``stop`` into the file, and map them over the slot. No more
        than a layer's keys or values are in memory twice. After an OSError, the positions are where they were."""
        moved: list[tuple[int, int, int]] = []
        try:
            for place in self._ranges(buffers, slot, self.stop, stop):
                moved.append(place)
                self.file.write(*place)
                self.file.map(*place)
        except OSError:
            for address, num_bytes, offset in moved:
                _copy_out(address, num_bytes)
                self.file.free(offset, num_bytes)
            raise
        self.num_slots.extend([1] * ((stop - self.stop) // self.unit))

    def map(self, buffers: Mapping[int, LayerBuffer], slot: int, stop: int) -> None:
        """Map the positions before ``stop`` over those of another slot."""
        for address, num_bytes, offset in self._ranges(buffers, slot, self.start, stop):
            self.file.map(address, num_bytes, offset)
        for chunk in range((stop - self.start) // self.unit):
            self.num_slots[chunk] += 1

    def map_again(self, buffers: Mapping[int, LayerBuffer], slot: int, start: int, stop: int) -> None:
        """Map the chunks between these positions over a slot that holds them already, instead of what was written
        there."""
        first, last = (start - self.start) // self.unit, -(-(stop - self.start) // self.unit)
        if first < last:
            span = (self.start + first * self.unit, self.start + last * self.unit)
            for address, num_bytes, offset in self._ranges(buffers, slot, *span):
                self.file.map(address, num_bytes, offset)

    def copy_out(self, buffers: Mapping[int, LayerBuffer], slot: int, stop: int) -> None:
        """Give a slot pages of its own for the positions before ``stop``."""
        for address, num_bytes, _ in self._ranges(buffers, slot, self.start, stop):
            _copy_out(address, num_bytes)
        self.leave(stop)

    def leave(self, stop: int) -> None:
        """Note that the positions before ``stop`` are no longer mapped over a slot, and free chunks without one."""
        for chunk in range((stop - self.start) // self.unit):
            self.num_slots[chunk] -= 1
            if not self.num_slots[chunk]:
                for parts in self.layers.values():
                    self._free(parts, chunk * self.unit, self.unit)

    def keep_layers(self, layers: Collection[int]) -> None:
        """Free all other layers, whose buffers are gone."""
        for layer in self.layers.keys() - set(layers):
            self._free(self.layers.pop(layer), 0, len(self.num_slots) * self.unit)

    def _free(self, parts: Iterable[_FilePart], first: int, count: int) -> None:
        for part in parts:
            for head in range(part.heads):
                offset = part.offset + head * part.stride + first * part.position_bytes
                self.file.free(offset, count * part.position_bytes)

    def _ranges(
        self, buffers: Mapping[int, LayerBuffer], slot: int, start: int, stop: int
    ) -> Iterable[tuple[int, int, int]]:
        """Yield address, length and offset in the file of these positions, in every layer and head."""
        for layer, places in self.layers.items():
            for part, place in zip(buffers[layer].parts(slot, start, stop), places, strict=True):
                for head, address in enumerate(part.addresses):
                    offset = place.offset + head * place.stride + (start - self.start) * place.position_bytes
                    yield address, part.num_bytes, offset


def _copy_out(address: int, num_bytes: int) -> None:
    """Replace the pages at an address by new ones with the same content."""
    content = ctypes.string_at(address, num_bytes)
    map_pages(address, num_bytes)
    ctypes.memmove(address, content, num_bytes)


@cache
def can_share() -> bool:
    """Whether this system can map the pages of one file in memory at several addresses, and free them."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    content = b"\x01" * mmap.PAGESIZE
    try:
        file, pages = PageFile(), mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = (ctypes.c_char * len(pages)).from_buffer(pages)
        address = ctypes.addressof(view)
        pages[: len(content)] = content
        file.write(address, len(content), 0)
        file.map(address + len(content), len(content), 0)
        is_mapped = bool(pages[len(content) :] == content)
        file.free(0, len(content))
        return is_mapped and pages[len(content) :] == bytes(len(content))
    except OSError:
        return False


def max_ranges() -> int:
    """Return how many mapped ranges sharing may take: less than half of what the kernel allows a process, because the
    sequences of the plan before may keep theirs."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        allowed = _USUAL_MAX_MAPPINGS
    return allowed * 3 // 8


def chunk_positions(shapes: Iterable[KvShape], layouts: tuple[Layout, Layout], itemsize: int) -> int:
    """Return the positions of a chunk, whose keys and values fill whole pages in every head of these layers."""
    unit = 1
    for shape in shapes:
        for size, layout in zip((shape.key_size, shape.value_size), layouts, strict=True):
            num_bytes = layout.numbers(size) * itemsize
            unit = math.lcm(unit, layout.unit * mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, num_bytes))
    return -(-MIN_SHARED // unit) * unit


def is_on_pages(buffers: Iterable[LayerBuffer]) -> bool:
    """Whether every head of these layers begins on a page."""
    tensors = (tensor for buffer in buffers for tensor in buffer.tensors)
    return all(tensor.stride(1) * tensor.itemsize % mmap.PAGESIZE == 0 for tensor in tensors)

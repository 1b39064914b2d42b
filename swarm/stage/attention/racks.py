"""Racks: ranges of memory for the keys and values of several sequences, layer by layer."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swarm.stage.attention.layouts import Layout, choose_layouts
from swarm.stage.attention.mapping import MAP_NORESERVE, map_pages
from swarm.wire.messages import LayerRange


@dataclass(frozen=True, slots=True)
class KvShape:
    """Key heads of a layer, and the sizes of one key and one value. Values of size 0 are the first numbers of the
    keys, which are then latents."""

    heads: int
    key_size: int
    value_size: int

    @property
    def numbers(self) -> int:
        """Numbers of one position."""
        return self.heads * (self.key_size + self.value_size)

    def split(self, flat: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's flat numbers as keys and values."""
        num_keys = self.heads * positions * self.key_size
        keys = flat[:num_keys].view(self.heads, positions, self.key_size)
        return keys, flat[num_keys:].view(self.heads, positions, self.value_size)

    def empty(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of no positions, with the dtype and device of ``like``."""
        return self.split(like[:0], 0)


@dataclass(frozen=True, slots=True)
class Region:
    """Keys and values of one sequence in one layer, zero where never written: ``[key heads, units, numbers]`` each."""

    keys: torch.Tensor
    values: torch.Tensor
    sizes: tuple[int, int]  # of one key, and of one value
    layouts: tuple[Layout, Layout]  # of the keys, and of the values

    @property
    def shape(self) -> KvShape:
        return KvShape(self.keys.shape[0], *self.sizes)

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of some positions' keys and values ``[key heads, positions, size]``."""
        count = stop - start
        keys, values = self.shape.split(self.keys.new_empty(self.shape.numbers * count), count)
        self.read_to(start, keys, values)
        return keys, values

    def read_to(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the positions from ``start`` on to keys and values ``[key heads, positions, size]``."""
        self.layouts[0].read(self.keys, start, keys)
        self.layouts[1].read(self.values, start, values)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values ``[key heads, positions, size]``, beginning at position ``start``."""
        self.layouts[0].write(self.keys, start, keys)
        self.layouts[1].write(self.values, start, values)

    def copy_from(self, source: Region, position: int, *, start: int = 0) -> None:
        """Copy the positions from ``start``, where a unit begins, to ``position`` from another region, together with
        the rest of the last unit."""
        for mine, other, layout in zip(
            (self.keys, self.values), (source.keys, source.values), self.layouts, strict=True
        ):
            units = slice(start // layout.unit, -(-position // layout.unit))
            mine[:, units] = other[:, units]


@dataclass(frozen=True, slots=True)
class SlotPart:
    """Memory of the same positions in each head of a slot: of its keys, or of its values."""

    address: int  # in the first head
    stride: int  # bytes from head to head
    heads: int
    num_bytes: int  # in one head

    @property
    def addresses(self) -> range:
        """The address in each head."""
        return range(self.address, self.address + self.heads * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class LayerBuffer:
    """One layer of a rack: keys and values ``[slots, key heads, units, numbers of a unit]`` on these pages.

    The ``layouts`` of the two decide how many positions a unit holds and how its numbers are ordered. In the plain
    layout, a unit is a position.
    """

    keys: torch.Tensor
    values: torch.Tensor
    sizes: tuple[int, int]  # of one key, and of one value
    layouts: tuple[Layout, Layout]  # of the keys, and of the values
    pages: tuple[mmap.mmap, ...]  # the mappings under the ``tensors``

    @property
    def shape(self) -> KvShape:
        return KvShape(self.keys.shape[1], *self.sizes)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values; only the keys of latents."""
        return (self.keys, self.values) if self.sizes[1] else (self.keys,)

    def only_head(self, head: int) -> LayerBuffer:
        """Return the same memory as a layer with one of its key heads."""
        heads = slice(head, head + 1)
        return replace(self, keys=self.keys[:, heads], values=self.values[:, heads])

    def region(self, slot: int) -> Region:
        return Region(self.keys[slot], self.values[slot], self.sizes, self.layouts)

    def parts(self, slot: int, start: int, stop: int) -> tuple[SlotPart, ...]:
        """Return the memory of each of the ``tensors`` from ``start`` to ``stop``, where units begin."""
        return tuple(
            SlotPart(
                tensor.data_ptr()
                + (slot * tensor.stride(0) + start // layout.unit * tensor.stride(2)) * tensor.itemsize,
                tensor.stride(1) * tensor.itemsize,
                tensor.shape[1],
                (stop - start) // layout.unit * tensor.stride(2) * tensor.itemsize,
            )
            for tensor, layout in zip(self.tensors, self.layouts, strict=False)
        )

    def clear(self, slot: int, *, is_mapped: bool = False) -> None:
        """Give a slot's pages back to the operating system; they read as zeros afterwards.

        ``is_mapped``: whether a file's pages may be mapped over some of them. Raises ``OSError`` if they stay mapped.
        """
        for tensor, pages in zip(self.tensors, self.pages, strict=True):
            size = tensor.stride(0) * tensor.itemsize
            _give_back(tensor, pages, slot * size, size, is_mapped=is_mapped)

    def free_from(self, slot: int, position: int, *, is_mapped: bool = False) -> None:
        """Give back the slot's pages that hold only positions from ``position`` on. Raises ``OSError`` as ``clear``."""
        for tensor, layout, pages in zip(self.tensors, self.layouts, self.pages, strict=False):
            units = -(-position // layout.unit)
            for head in range(tensor.shape[1]):
                begin = (slot * tensor.stride(0) + head * tensor.stride(1)) * tensor.itemsize
                first = -(-(begin + units * tensor.stride(2) * tensor.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (begin + tensor.shape[2] * tensor.stride(2) * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < stop:
                    _give_back(tensor, pages, first, stop - first, is_mapped=is_mapped)


@dataclass(slots=True, eq=False)
class Rack:
    """Slots for sequences of up to ``positions`` positions."""

    positions: int
    free: list[int]  # descending, so that the lowest slot is taken first and sequences are adjacent
    buffers: dict[int, LayerBuffer] = field(default_factory=dict)  # by layer
    # Addresses of the slabs of a range of layers, for a kernel that works on all of them; emptied by any change of a
    # slab.
    tables: dict[LayerRange, Any] = field(default_factory=dict)
    moves: dict[LayerRange, Any] = field(default_factory=dict)  # the same for moves between machines (``transfer``)

    def forget_addresses(self) -> None:
        """Empty the tables: a slab has changed."""
        self.tables.clear()
        self.moves.clear()


def _give_back(tensor: torch.Tensor, pages: mmap.mmap, start: int, size: int, *, is_mapped: bool) -> None:
    if is_mapped:  # the advice would bring back the file's bytes instead of zeros
        try:
            map_pages(tensor.data_ptr() + start, size)
        except OSError:
            pages.madvise(mmap.MADV_DONTNEED, start, size)
            raise
    else:
        pages.madvise(mmap.MADV_DONTNEED, start, size)


def new_buffer(num_slots: int, positions: int, shape: KvShape, like: torch.Tensor) -> LayerBuffer:
    """Return a layer of a rack: slots that read as zeros, for keys and values of the dtype of ``like``."""
    sizes, layouts = (shape.key_size, shape.value_size), choose_layouts(like, shape.value_size)
    shapes = [
        (num_slots, shape.heads, positions // layout.unit, layout.numbers(size))
        for layout, size in zip(layouts, sizes, strict=True)
    ]
    with torch.inference_mode(False):  # forks and copies write outside of a pass
        (key_part, key_pages), (value_part, value_pages) = (_allocate(each, like.dtype) for each in shapes)
    pages = tuple(each for each in (key_pages, value_pages) if each is not None)
    return LayerBuffer(key_part, value_part, sizes, layouts, pages)


def _allocate(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap | None]:
    num_elements = shape[0] * shape[1] * shape[2] * shape[3]
    if not num_elements:
        return torch.zeros(shape, dtype=dtype), None
    # Each slot begins on a page, so that it can be given back separately. Cells and sizes ensure that without padding
    # for all but tiny heads.
    place_bytes = num_elements // shape[0] * dtype.itemsize
    stride = -(-place_bytes // mmap.PAGESIZE) * mmap.PAGESIZE // dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        pages = mmap.mmap(-1, max(1, stride * shape[0] * dtype.itemsize), flags=flags)
    except OSError as error:
        raise MemoryError(f"no address space for keys and values: {error}") from error
    flat = torch.frombuffer(pages, dtype=dtype, count=stride * shape[0])
    strides = (stride, shape[2] * shape[3], shape[3], 1)
    return flat.as_strided(shape, strides), pages

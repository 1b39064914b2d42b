"""Memory of an arena on other devices than CPUs, where memory is committed when it is allocated: pages.

A page holds the keys and values of 128 positions of one sequence. It has a number, and in each layer a tensor of its
own: all keys, then all values. All pages of a layer have the same size, so torch's allocator gives a freed one to the
next sequence, and nothing is copied or moved when a sequence grows. What a sequence holds is what is allocated, layer
by layer.

The block table of a sequence is the list of its pages' numbers, the same in every layer. A kernel finds a page by the
table of a layer's addresses (``PagePool.addresses``). It must run in the stream in which pages are freed: torch does
not see that a kernel reads them. Pages are zeros when they are allocated: what another sequence
left there may be NaN, which a weight of 0 would not hide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.grid import CELL
from swarm.stage.attention.racks import KvShape, Rack
from swarm.stage.attention.shared_slots import SlotMappings
from swarm.stage.attention.transfer import count_numbers, split_layers
from swarm.wire.messages import LayerRange

PAGE: Final = CELL  # positions


@dataclass(slots=True, eq=False)
class PoolLayer:
    """Pages of one layer, by number: keys, then values, ``[key heads, positions, size]`` each, in a flat tensor."""

    row: int  # in the table of addresses
    shape: KvShape
    like: torch.Tensor  # empty, with the pages' dtype and device
    pages: dict[int, torch.Tensor] = field(default_factory=dict)

    def parts(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a page's keys and values ``[key heads, positions, size]``."""
        return self.shape.split(self.pages[page], PAGE)


class PagePool:
    """Pages of all sequences of one stage."""

    def __init__(self) -> None:
        self.layers: dict[int, PoolLayer] = {}
        self._in_use = set[int]()  # layers to which every sequence writes
        self._places = set[PagedPlace]()
        self._free: list[int] = []  # numbers, descending, so that the lowest one is taken first
        self._num_pages = 0
        # Address of each page, by row of the layer and number. Entries of freed pages are stale: no sequence has them.
        self._table = np.zeros((0, 1), np.int64)
        self._addresses: torch.Tensor | None = None  # the table on the device; None after a change

    @property
    def allocated_bytes(self) -> int:
        return sum(page.nbytes for layer in self.layers.values() for page in layer.pages.values())

    @property
    def can_share(self) -> bool:
        return False

    @property
    def num_used(self) -> int:
        """Pages that sequences have."""
        return self._num_pages - len(self._free)

    @property
    def layers_in_use(self) -> frozenset[int]:
        """Layers to which every sequence writes, as far as their shapes are known."""
        return frozenset(self._in_use & self.layers.keys())

    def count(self, positions: int) -> int:
        return _num_pages(positions) * PAGE

    def open(self, limit: int) -> PagedPlace:
        place = PagedPlace(self)
        self._places.add(place)
        return place

    def close(self, place: PagedPlace) -> None:
        """Forget a sequence that ended."""
        self._places.discard(place)

    def ensure_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, is_copy: bool) -> PoolLayer:
        """Return a layer for keys and values like these (``[heads, *, size]``), created at first use."""
        shape = KvShape(keys.shape[0], keys.shape[2], values.shape[2])
        held = self.layers.get(layer)
        if held is None or (held.shape != shape and not held.pages):
            row = len(self.layers) if held is None else held.row
            held = self.layers[layer] = PoolLayer(row, shape, keys.new_empty(0))
        elif held.shape != shape:
            raise IllegalMove(f"layer {layer} holds keys and values of other heads; release them first")
        if not is_copy:
            self._in_use.add(layer)
        return held

    def keep_layers(self, own: Collection[int], kept: Collection[int]) -> None:
        """Free all other layers, whose shapes stay known."""
        self._in_use = set(own)
        for place in self._places:
            for layer in place.num_allocated.keys() - {*own, *kept}:
                place.drop_layer(layer)

    def clear(self) -> None:
        self.layers.clear()
        self._in_use.clear()
        self._places.clear()
        self._num_pages, self._free = 0, []
        self._table, self._addresses = np.zeros((0, 1), np.int64), None

    # --- pages -------------------------------------------------------------------------------------------------------

    def take(self, num: int) -> list[int]:
        """Return numbers of pages, which have no memory yet."""
        missing = num - len(self._free)
        if missing > 0:
            self._free = [*range(self._num_pages + missing - 1, self._num_pages - 1, -1), *self._free]
            self._num_pages += missing
        return [self._free.pop() for _ in range(num)]

    def give(self, pages: Collection[int]) -> None:
        """Take back numbers of pages, which have no memory any more."""
        self._free = sorted([*self._free, *pages], reverse=True)

    def allocate(self, pages: Iterable[tuple[int, int]]) -> None:
        """Give memory to pages, each a layer and a number. All of them get it, or none."""
        tensors = list[torch.Tensor]()
        added = list[tuple[int, int]]()
        try:
            with torch.inference_mode(False):  # forks and copies write outside of a pass
                for layer, number in pages:
                    held = self.layers[layer]
                    page = held.like.new_empty(held.shape.numbers * PAGE)
                    held.pages[number] = page
                    tensors.append(page)
                    added.append((layer, number))
                if tensors:
                    torch._foreach_zero_(tensors)
        except (MemoryError, RuntimeError):  # the second is torch's
            self.free(added)
            raise
        if tensors:
            self._fit_table()
            for (layer, number), page in zip(added, tensors, strict=True):
                self._table[self.layers[layer].row, number] = page.data_ptr()
            self._addresses = None

    def free(self, pages: Iterable[tuple[int, int]]) -> None:
        """Free the memory of pages, each a layer and a number."""
        for layer, number in pages:
            self.layers[layer].pages.pop(number, None)

    def addresses(self, device: torch.device) -> torch.Tensor:
        """Return the addresses of all pages, by row of the layer and number: int64, on the device."""
        self._fit_table()
        if self._addresses is None:
            self._addresses = torch.from_numpy(self._table).to(device)
        return self._addresses

    def _fit_table(self) -> None:
        """Let the table have all layers and pages. Its width at least doubles, so that few steps copy it."""
        rows, width = self._table.shape
        if rows < len(self.layers) or width < self._num_pages:
            more = 0 if width >= self._num_pages else max(width, self._num_pages - width)
            self._table = np.pad(self._table, ((0, len(self.layers) - rows), (0, more)))
            self._addresses = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedRegion:
    """Keys and values of one sequence in one layer of a pool."""

    layer: PoolLayer
    pages: list[int]  # of the sequence
    heads: range | None = None  # of the key heads, if not all

    @property
    def shape(self) -> KvShape:
        return self.layer.shape if self.heads is None else replace(self.layer.shape, heads=len(self.heads))

    def _parts(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layer.parts(page)
        if self.heads is None:
            return keys, values
        heads = slice(self.heads.start, self.heads.stop)
        return keys[heads], values[heads]

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = stop - start
        keys, values = self.shape.split(self.layer.like.new_empty(self.shape.numbers * count), count)
        self.read_to(start, keys, values)
        return keys, values

    def read_to(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the positions from ``start`` on to keys and values ``[key heads, positions, size]``."""
        for page, places, here in self._pieces(start, keys.shape[1]):
            for part, stored in zip((keys, values), self._parts(page), strict=True):
                part[:, here] = stored[:, places]

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for page, places, here in self._pieces(start, keys.shape[1]):
            for part, stored in zip((keys, values), self._parts(page), strict=True):
                stored[:, places] = part[:, here]

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield a page, positions in it, and the same positions in the request."""
        done = 0
        while done < count:
            number, place = divmod(start + done, PAGE)
            num = min(PAGE - place, count - done)
            yield self.pages[number], slice(place, place + num), slice(done, done + num)
            done += num


@dataclass(slots=True, eq=False)
class PagedPlace:
    """Pages of one sequence."""

    pool: PagePool
    pages: list[int] = field(default_factory=list)  # numbers: the sequence's block table
    num_used: int = 0  # pages of positions in use
    # Of each layer that exists, how many pages have memory: the first ones.
    num_allocated: dict[int, int] = field(default_factory=dict)
    mappings: SlotMappings = field(default_factory=lambda: SlotMappings(Rack(0, []), 0))  # always empty

    def num_readable(self, layers: LayerRange) -> int:
        return min(self.num_allocated[layer] for layer in range(layers.first, layers.stop)) * PAGE

    def grow(self, used: int, copies: Mapping[int, int]) -> None:
        num_used = max(self.num_used, _num_pages(used))
        wanted = dict.fromkeys(self.pool.layers_in_use | self.num_allocated.keys(), num_used)
        wanted |= {layer: _num_pages(positions) for layer, positions in copies.items()}
        self._allocate({layer: num for layer, num in wanted.items() if layer in self.pool.layers}, num_used)
        self.num_used = num_used

    def _allocate(self, wanted: Mapping[int, int], least: int) -> None:
        """Give memory to this many pages of each layer. If memory ends, nothing has changed."""
        new = self.pool.take(max(0, max([least, *wanted.values()]) - len(self.pages)))
        pages = [*self.pages, *new]
        missing = (
            (layer, page) for layer, num in wanted.items() for page in pages[self.num_allocated.get(layer, 0) : num]
        )
        try:
            self.pool.allocate(missing)
        except (MemoryError, RuntimeError):
            self.pool.give(new)
            raise
        self.pages += new
        for layer, num in wanted.items():
            self.num_allocated[layer] = max(num, self.num_allocated.get(layer, 0))

    def ensure_region(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, num_copied: int | None
    ) -> PagedRegion:
        held = self.pool.ensure_layer(layer, keys, values, is_copy=num_copied is not None)
        num = self.num_used if num_copied is None else _num_pages(num_copied)
        if self.num_allocated.get(layer, -1) < num:
            self._allocate({layer: num}, 0)
        return PagedRegion(held, self.pages)

    def region(self, layer: int) -> PagedRegion:
        return PagedRegion(self.pool.layers[layer], self.pages)

    def copy_from(self, source: PagedPlace, layers: Iterable[int], position: int, *, start: int) -> None:
        numbers = range(start // PAGE, _num_pages(position))
        for layer in layers:
            pages = self.pool.layers[layer].pages
            for number in numbers:
                pages[self.pages[number]].copy_(pages[source.pages[number]])

    def shapes(self, layers: LayerRange) -> list[KvShape]:
        return [self.pool.layers[layer].shape for layer in range(layers.first, layers.stop)]

    def read(self, layers: LayerRange, start: int, stop: int) -> torch.Tensor:
        shapes, count = self.shapes(layers), stop - start
        flat = self.pool.layers[layers.first].like.new_empty(count_numbers(shapes, count))
        for layer, (keys, values) in enumerate(split_layers(flat, shapes, count), layers.first):
            self.region(layer).read_to(start, keys, values)
        return flat

    def write(self, layers: LayerRange, start: int, flat: torch.Tensor) -> None:
        shapes = self.shapes(layers)
        parts = split_layers(flat, shapes, len(flat) // count_numbers(shapes, 1))
        for layer, (keys, values) in enumerate(parts, layers.first):
            self.region(layer).write(start, keys, values)

    def free_from(self, layers: Collection[int], position: int) -> None:
        num = _num_pages(position)
        for layer in self.num_allocated:
            self._keep(layer, num)
        self.num_used = min(self.num_used, num)
        self._trim()

    def drop_layer(self, layer: int) -> None:
        self._keep(layer, 0)
        self.num_allocated.pop(layer, None)
        self._trim()

    def _keep(self, layer: int, num: int) -> None:
        """Free a layer's pages from this number on."""
        allocated = self.num_allocated.get(layer, 0)
        self.pool.free((layer, page) for page in self.pages[num:allocated])
        if num < allocated:
            self.num_allocated[layer] = num

    def _trim(self) -> None:
        """Give back pages at the end that have memory in no layer."""
        num = max([self.num_used, *self.num_allocated.values()])
        self.pool.give(self.pages[num:])
        del self.pages[num:]

    def clear(self, layers: Collection[int]) -> None:
        self.free_from(layers, 0)
        self.num_allocated.clear()

    def release(self) -> None:
        self.pool.close(self)


def _num_pages(positions: int) -> int:
    return -(-positions // PAGE)

"""Keys and values of every sequence, by sequence and layer, in blocks of 32 positions.

One contiguous piece of address space per sequence and layer, as long as the sequence may ever become; the system
commits its pages when they are first written and takes them back at release. So nothing is gathered, copied or moved as
sequences grow, and room is counted in blocks all the same.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from swarm.errors import IllegalMove
from swarm.stage.passes import GRID, round_up
from swarm.wire.messages import LayerRange, Row

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; the name came to Python later


@dataclass(frozen=True, slots=True)
class Region:
    """Keys and values of one sequence in one layer: ``[key heads, positions, size]`` each. Zero where never written."""

    keys: torch.Tensor
    values: torch.Tensor


class KvArena:
    """The sequences of one stage. One thread's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._limits: dict[int, int] = {}
        self._regions: dict[int, dict[int, Region]] = {}
        self.used = 0

    def __len__(self) -> int:
        return len(self._limits)

    def open(self, sequence: int, limit: int) -> None:
        self.release(sequence)
        self._limits[sequence] = round_up(limit)
        self._regions[sequence] = {}
        self.used += round_up(limit)

    def fork(self, sequence: int, source: int, position: int, limit: int) -> None:
        """Open a sequence with a copy of the first ``position`` positions of another one."""
        if source not in self._limits or position > self._limits[source]:
            raise IllegalMove(f"sequence {sequence} can't begin as {source}: that is not held up to {position}")
        self.open(sequence, limit)
        for layer, held in self._regions[source].items():
            region = self._new_region(sequence, layer, held.keys, held.values)
            region.keys[:, :position] = held.keys[:, :position]
            region.values[:, :position] = held.values[:, :position]

    def shrink(self, sequence: int, limit: int) -> None:
        """Reserve no more than this. Pages beyond it were hardly ever written: nothing else is to give back."""
        if sequence in self._limits:
            self.used -= self._limits[sequence] - round_up(limit)
            self._limits[sequence] = round_up(limit)

    def copy_out(self, sequence: int, layer: int, block: int) -> torch.Tensor:
        """One block's keys and values ``[2, key heads, 32, size]``; for layers whose two are of one size."""
        region, where = self._regions[sequence][layer], slice(block * GRID, (block + 1) * GRID)
        return torch.stack((region.keys[:, where], region.values[:, where]))

    def copy_in(self, sequence: int, layer: int, block: int, data: torch.Tensor) -> None:
        """Take a block that ``copy_out`` gave, here or on another machine."""
        region = self.region(sequence, layer)
        if region is None:
            region = self._new_region(sequence, layer, data[0], data[1])
        where = slice(block * GRID, (block + 1) * GRID)
        region.keys[:, where], region.values[:, where] = data[0], data[1]

    def release(self, sequence: int) -> None:
        if sequence in self._limits:
            self.used -= self._limits.pop(sequence)
            del self._regions[sequence]

    def reset(self) -> None:
        self._limits.clear()
        self._regions.clear()
        self.used = 0

    def truncate(self, sequence: int, position: int) -> None:
        """Positions from ``position`` on will be written again before they are read; only a cut to nothing frees."""
        if position == 0 and sequence in self._regions:
            self._regions[sequence].clear()

    def keep(self, layers: LayerRange) -> None:
        """Drop what other layers hold."""
        for regions in self._regions.values():
            for layer in [layer for layer in regions if not layers.first <= layer < layers.stop]:
                del regions[layer]

    def check(self, row: Row) -> None:
        """Raise IllegalMove unless the row's positions were reserved."""
        limit = self._limits.get(row.sequence)
        if limit is None:
            raise IllegalMove(f"sequence {row.sequence} was never opened here, or released")
        if row.start + row.count > limit:
            raise IllegalMove(
                f"sequence {row.sequence} reserved {limit} positions; "
                f"positions {row.start} to {row.start + row.count} don't fit"
            )

    def region(self, sequence: int, layer: int) -> Region | None:
        """What this layer holds of the sequence, if it was ever written."""
        return self._regions.get(sequence, {}).get(layer)

    def make(self, sequence: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> Region:
        """The region that takes keys and values of these sizes ``[1, heads, tokens, size]``."""
        return self._new_region(sequence, layer, key[0], value[0])

    def _new_region(self, sequence: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Region:
        """Room for ``[heads, *, size]`` like these."""
        limit = self._limits[sequence]
        shapes = [(part.shape[0], limit, part.shape[2]) for part in (keys, values)]
        region = Region(*(_zeros(shape, keys.dtype, self._device) for shape in shapes))
        self._regions[sequence][layer] = region
        return region


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_elements = shape[0] * shape[1] * shape[2]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, max(1, num_elements * dtype.itemsize), flags=flags)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements).view(shape)  # keeps the pages alive

"""Keys and values in one form that all layouts share, in which they move between machines.

The form is dense: layer after layer, first all keys, then all values, ``[key heads, positions, size]`` each, with the
bit patterns of the stored dtype. A flat tensor or array holds it, because layers may have unlike heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from swarm.stage import native
from swarm.stage.attention.kernel_args import cache_table
from swarm.stage.attention.layouts import PACKED
from swarm.stage.attention.racks import KvShape, Rack
from swarm.wire.messages import LayerRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The numpy types that hold the bit patterns of each dtype.
_PATTERNS: Final = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.float16),
}


class Slabs:
    """Some layers of a rack, through which positions move. Made once: the blocks of small models take microseconds."""

    def __init__(self, rack: Rack, layers: LayerRange) -> None:
        self._buffers = [rack.buffers[layer] for layer in range(layers.first, layers.stop)]
        self.shapes = [buffer.shape for buffer in self._buffers]
        self._numbers = count_numbers(self.shapes, 1)
        like = self._buffers[0].keys
        self._dtype, self._device = like.dtype, like.device
        # our kernels, if all layers have their layout: then one call moves all of them
        self._library = native.library() if all(buffer.layouts is PACKED for buffer in self._buffers) else None
        self._table = None if self._library is None else cache_table(rack, layers)
        self._table_at = 0 if self._table is None else ctypes.addressof(self._table)

    @classmethod
    def of(cls, rack: Rack, layers: LayerRange) -> Slabs:
        """Return these layers of a rack, which exist."""
        found: Slabs | None = rack.moves.get(layers)
        if found is None:
            found = rack.moves[layers] = cls(rack, layers)
        return found

    def read(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Return a flat copy of these positions' keys and values in a slot."""
        count = stop - start
        flat = torch.empty(self._numbers * count, dtype=self._dtype, device=self._device)
        if self._library is not None:
            self._library.swarm_read_kv(self._table_at, len(self._buffers), slot, start, count, flat.data_ptr())
            return flat
        for buffer, (keys, values) in zip(self._buffers, split_layers(flat, self.shapes, count), strict=True):
            buffer.region(slot).read_to(start, keys, values)
        return flat

    def write(self, slot: int, start: int, flat: torch.Tensor) -> None:
        """Write what ``read`` returned, for layers of the same shapes."""
        count = len(flat) // self._numbers
        if self._library is not None:
            self._library.swarm_write_kv(self._table_at, len(self._buffers), slot, start, count, flat.data_ptr())
            return
        for buffer, (keys, values) in zip(self._buffers, split_layers(flat, self.shapes, count), strict=True):
            buffer.region(slot).write(start, keys, values)


def split_layers(
    flat: torch.Tensor, shapes: Iterable[KvShape], positions: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """View flat numbers as the keys and values of layers with these shapes."""
    begin = 0
    for shape in shapes:
        end = begin + shape.numbers * positions
        yield shape.split(flat[begin:end], positions)
        begin = end


def count_numbers(shapes: Iterable[KvShape], positions: int) -> int:
    """Return how many numbers these layers have for this many positions."""
    return sum(shape.numbers for shape in shapes) * positions


def to_patterns(flat: torch.Tensor) -> NDArray[np.generic]:
    """Return the bit patterns of the numbers; on a CPU, the array shares the tensor's memory."""
    patterns = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
    return cast("NDArray[np.generic]", patterns.cpu().numpy().view(_PATTERNS[flat.dtype]))


def from_patterns(numbers: NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers with these bit patterns. Raises ``TypeError`` for patterns of another dtype."""
    if numbers.dtype != _PATTERNS[dtype]:
        raise TypeError(f"keys and values of {numbers.dtype} for {dtype}")
    # torch does not accept read-only memory, such as a message's: this copies it then
    flat = np.require(numbers.reshape(-1), requirements=["C", "W"])
    return torch.from_numpy(flat.view(np.int16) if dtype == torch.bfloat16 else flat).view(dtype).to(device)

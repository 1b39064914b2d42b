"""Keys and values in one form that all layouts share, in which they move between machines.

The form is dense: layer after layer, first all keys, then all values, ``[key heads, positions, size]`` each, with the
bit patterns of the stored dtype. A flat tensor or array holds it, because layers may have unlike heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from swarm.stage import native
from swarm.stage.attention.kernel_args import cache_table
from swarm.stage.attention.layouts import PACKED
from swarm.stage.attention.racks import KvShape, LayerBuffer, Rack
from swarm.wire.messages import LayerRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The numpy types that hold the bit patterns of each dtype.
_PATTERNS: Final = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.float16),
}


@dataclass(frozen=True, slots=True)
class Slabs:
    """Some layers of one slot of a rack."""

    rack: Rack
    slot: int
    layers: LayerRange

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a flat copy of these positions' keys and values."""
        like, shapes = self._buffers[0].keys, self.shapes
        flat = torch.empty(count_numbers(shapes, stop - start), dtype=like.dtype, device=like.device)
        if (library := self._native_library()) is not None:
            library.swarm_read_kv(*self._native_args(start, stop), flat.data_ptr())
            return flat
        for buffer, (keys, values) in zip(self._buffers, _split_layers(flat, shapes, stop - start), strict=True):
            buffer.region(self.slot).read_to(start, keys, values)
        return flat

    def write(self, start: int, stop: int, flat: torch.Tensor) -> None:
        """Write what ``read`` returned, for layers of the same shapes."""
        shapes = self.shapes
        assert len(flat) == count_numbers(shapes, stop - start), "the caller has checked it"
        if (library := self._native_library()) is not None:
            library.swarm_write_kv(*self._native_args(start, stop), flat.data_ptr())
            return
        for buffer, (keys, values) in zip(self._buffers, _split_layers(flat, shapes, stop - start), strict=True):
            buffer.region(self.slot).write(start, keys, values)

    @property
    def shapes(self) -> list[KvShape]:
        return [buffer.shape for buffer in self._buffers]

    @property
    def _buffers(self) -> list[LayerBuffer]:
        return [self.rack.buffers[layer] for layer in range(self.layers.first, self.layers.stop)]

    def _native_library(self) -> ctypes.CDLL | None:
        """Return our kernels if all these layers have their layout: then one call moves all of them."""
        return native.library() if all(buffer.layouts is PACKED for buffer in self._buffers) else None

    def _native_args(self, start: int, stop: int) -> tuple[int, ...]:
        table = cache_table(self.rack, self.layers)
        return ctypes.addressof(table), len(table), self.slot, start, stop - start


def count_numbers(shapes: Iterable[KvShape], positions: int) -> int:
    """Return how many numbers these layers have for this many positions."""
    return sum(shape.numbers for shape in shapes) * positions


def _split_layers(
    flat: torch.Tensor, shapes: Sequence[KvShape], positions: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    begin = 0
    for shape in shapes:
        end = begin + shape.numbers * positions
        yield shape.split(flat[begin:end], positions)
        begin = end


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

"""How keys and values lie in an arena: plainly, for torch's kernels, or packed as our own kernels multiply them.

A layout keeps a sequence's keys (or values) of one layer as ``[heads, units, numbers of a unit]``. A unit is as many
positions as lie together and apart from all others: one of them, or a block of 64.
"""

from __future__ import annotations

from typing import Protocol

import torch

from swarm.stage import native

_BLOCK = 64  # positions that are packed together
_LANES = 16  # of a vector: a packed value has a whole number of them


class Layout(Protocol):
    """Where the numbers of a position are. ``stored`` is ``[heads, units, *]``, dense numbers ``[heads, *, size]``."""

    unit: int

    def numbers(self, size: int) -> int:
        """How many numbers a unit has of keys, or values, of this size."""
        ...

    def read(self, stored: torch.Tensor, positions: slice, size: int) -> torch.Tensor:
        """A dense copy of some positions."""
        ...

    def write(self, stored: torch.Tensor, positions: slice, dense: torch.Tensor) -> None: ...


class _Plain:
    unit = 1

    def numbers(self, size: int) -> int:
        return size

    def read(self, stored: torch.Tensor, positions: slice, size: int) -> torch.Tensor:
        return stored[:, positions].clone()

    def write(self, stored: torch.Tensor, positions: slice, dense: torch.Tensor) -> None:
        stored[:, positions] = dense


class _PackedKeys:
    """Blocks of 64 positions by pairs of elements, as ``SwarmMatrix`` has outputs and inputs."""

    unit = _BLOCK

    def numbers(self, size: int) -> int:
        return -(-size // 2) * 2 * _BLOCK

    def read(self, stored: torch.Tensor, positions: slice, size: int) -> torch.Tensor:
        blocks, places = _in_blocks(positions)
        return self._view(stored)[:, blocks, places].flatten(-2)[..., :size]

    def write(self, stored: torch.Tensor, positions: slice, dense: torch.Tensor) -> None:
        blocks, places = _in_blocks(positions)
        padded = torch.nn.functional.pad(dense, (0, dense.shape[-1] % 2))
        self._view(stored)[:, blocks, places] = padded.reshape(*padded.shape[:2], -1, 2)

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        """``[heads, block, position in it, pair of elements, which of the two]``."""
        heads, blocks, pairs = stored.shape[0], stored.shape[1], stored.shape[2] // (2 * _BLOCK)
        if stored.dtype == torch.bfloat16:
            return stored.view(heads, blocks, pairs, _BLOCK, 2).transpose(2, 3)
        return stored.view(heads, blocks, pairs, 2, _BLOCK).permute(0, 1, 4, 2, 3)


class _PackedValues:
    """Position by position, in bfloat16 by pairs of them, so that the numbers of a pair lie side by side."""

    unit = _BLOCK

    def numbers(self, size: int) -> int:
        return -(-size // _LANES) * _LANES * _BLOCK

    def read(self, stored: torch.Tensor, positions: slice, size: int) -> torch.Tensor:
        pairs, which = _in_pairs(positions)
        return self._view(stored)[:, pairs, which][..., :size]

    def write(self, stored: torch.Tensor, positions: slice, dense: torch.Tensor) -> None:
        pairs, which = _in_pairs(positions)
        missing = stored.shape[2] // _BLOCK - dense.shape[-1]
        self._view(stored)[:, pairs, which] = torch.nn.functional.pad(dense, (0, missing))

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        """``[heads, pair of positions, which of the two, element]``."""
        heads, size = stored.shape[0], stored.shape[2] // _BLOCK
        if stored.dtype == torch.bfloat16:
            return stored.view(heads, -1, size, 2).transpose(2, 3)
        return stored.view(heads, -1, 2, size)


def _in_blocks(positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(positions.start, positions.stop)
    return numbers // _BLOCK, numbers % _BLOCK


def _in_pairs(positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(positions.start, positions.stop)
    return numbers // 2, numbers % 2


_PLAIN: Layout = _Plain()
PLAIN = _PLAIN, _PLAIN
_PACKED_KEYS: Layout = _PackedKeys()
_PACKED_VALUES: Layout = _PackedValues()
PACKED = _PACKED_KEYS, _PACKED_VALUES  # as ``SwarmCache`` of kernels.h


def layouts_of(like: torch.Tensor) -> tuple[Layout, Layout]:
    """How keys, and values, of this kind and on this device lie: packed where our own kernels attend to them."""
    return PACKED if attends(like.device, like.dtype) else PLAIN


def attends(device: torch.device, dtype: torch.dtype) -> bool:
    """Do our own kernels attend to keys of this kind?"""
    return device.type == "cpu" and dtype in native.KINDS and native.library() is not None

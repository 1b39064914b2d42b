"""Memory layouts of keys and values: plain for torch's kernels, or packed for our own.

A layout stores a sequence's keys (or values) of one layer as ``[heads, units, numbers of a unit]``. A unit is the
smallest range of positions stored separately from all others: one position, or a block of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from swarm.stage import native

_BLOCK = 64  # positions that are packed together
_LANES = 16  # elements of a vector; a packed value is padded to a multiple of it


class Layout(Protocol):
    """Order of the numbers of keys or values. ``stored`` is ``[heads, units, *]``, dense numbers are ``[heads, *,
    size]``."""

    unit: int  # positions of a unit

    def numbers(self, size: int) -> int:
        """Return how many numbers a unit of keys, or values, of this size has."""
        ...

    def read(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        """Copy positions from ``start`` on to ``dense``."""
        ...

    def write(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        """Copy ``dense`` to the positions from ``start`` on."""
        ...


class _Plain:
    unit = 1

    def numbers(self, size: int) -> int:
        return size

    def read(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        dense.copy_(stored[:, start : start + dense.shape[1]])

    def write(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        stored[:, start : start + dense.shape[1]] = dense


class _Rows:
    """Rows of whole vectors, one position after the other."""

    unit = 1

    def numbers(self, size: int) -> int:
        return -(-size // _LANES) * _LANES

    def read(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        dense.copy_(stored[:, start : start + dense.shape[1], : dense.shape[2]])

    def write(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        stored[:, start : start + dense.shape[1], : dense.shape[2]] = dense


class _PackedKeys:
    """Blocks of 64 positions, ordered by pairs of elements, as ``SwarmMatrix`` orders outputs and inputs."""

    unit = _BLOCK

    def numbers(self, size: int) -> int:
        return -(-size // 2) * 2 * _BLOCK

    def read(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        for packed, part in _parts(self._view(stored), start, dense):
            part.copy_(packed.flatten(-2)[..., : dense.shape[-1]])

    def write(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        for packed, part in _parts(self._view(stored), start, dense):
            packed.copy_(torch.nn.functional.pad(part, (0, part.shape[-1] % 2)).view(packed.shape))

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        """View as ``[heads, block, position in request, pair of elements, which of the two]``."""
        heads, blocks, pairs = stored.shape[0], stored.shape[1], stored.shape[2] // (2 * _BLOCK)
        if stored.dtype == torch.bfloat16:
            return stored.view(heads, blocks, pairs, _BLOCK, 2).transpose(2, 3)
        return stored.view(heads, blocks, pairs, 2, _BLOCK).permute(0, 1, 4, 2, 3)


class _PackedValues:
    """Position after position; in bfloat16, pairs of positions are interleaved."""

    unit = _BLOCK

    def numbers(self, size: int) -> int:
        return -(-size // _LANES) * _LANES * _BLOCK

    def read(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        for packed, part in _parts(self._view(stored), start, dense):
            part.copy_(packed[..., : dense.shape[-1]])

    def write(self, stored: torch.Tensor, start: int, dense: torch.Tensor) -> None:
        for packed, part in _parts(self._view(stored), start, dense):
            packed[..., : dense.shape[-1]] = part  # the padding has been 0 since the memory was new

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        """View as ``[heads, pair of positions, which of the two, element]``."""
        heads, size = stored.shape[0], stored.shape[2] // _BLOCK
        if stored.dtype == torch.bfloat16:
            return stored.view(heads, -1, size, 2).transpose(2, 3)
        return stored.view(heads, -1, 2, size)


def _parts(packed: torch.Tensor, start: int, dense: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield matching views of ``[heads, unit, position in unit, *]`` and of dense positions, which begin at ``start``.

    They are at most three: the end of a unit, whole units, the beginning of a unit.
    """
    unit, done, position = packed.shape[2], 0, start
    while done < dense.shape[1]:
        number, place = divmod(position, unit)
        left = dense.shape[1] - done
        units = left // unit if place == 0 and left >= unit else 1
        places = unit if place == 0 and left >= unit else min(unit - place, left)
        yield (
            packed[:, number : number + units, place : place + places],
            dense[:, done : done + units * places].view(dense.shape[0], units, places, -1),
        )
        done, position = done + units * places, position + units * places


_PLAIN: Layout = _Plain()
PLAIN = _PLAIN, _PLAIN
_PACKED_KEYS: Layout = _PackedKeys()
_PACKED_VALUES: Layout = _PackedValues()
PACKED = _PACKED_KEYS, _PACKED_VALUES  # as ``SwarmCache`` of kernels.h
_ROWS: Layout = _Rows()
LATENT = _ROWS, _PLAIN


def choose_layouts(like: torch.Tensor, value_size: int) -> tuple[Layout, Layout]:
    """Return the layouts of keys and values with this dtype and device: packed where our kernels compute attention.

    Latents are keys with values of size 0.
    """
    if not uses_native(like.device, like.dtype):
        return PLAIN
    return PACKED if value_size else LATENT


def uses_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our own kernels support attention with keys of this dtype on this device."""
    return device.type == "cpu" and dtype in native.KINDS and native.library() is not None

"""Adapters of low rank (LoRA) in our kernels: what each adds to a product, and which rows of a step have which.

Each product lists its ``sites``: which of its outputs belong to which module of the model, since one product may stand
for several modules. A loaded layer's products hold the parts of all adapters, so that a layer moves with them. The rows
of a step name their adapters (``using_adapters``). If none does, nothing is computed; a row without an adapter has the
bits that it has alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from swarm.stage import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GROUP = 16  # outputs that the kernel adds to at a time

_pointer = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Site:
    """Outputs ``first`` … ``first + count`` of a module of the model, in the place where a product writes them."""

    module: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a module: ``scale * up(down(x))``."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]
    scale: float


class AdapterPart:
    """What one adapter adds to a product. ``runs``: the product's sites, each run stored from a group of its own on."""

    def __init__(
        self, runs: Sequence[Sequence[Site]], weights: Mapping[str, LowRank], inputs: int, dtype: torch.dtype
    ) -> None:
        modules = list(dict.fromkeys(site.module for run in runs for site in run if site.module in weights))
        first_ranks, rank = dict[str, int](), 0
        for module in modules:
            first_ranks[module] = rank
            rank += len(weights[module].down)
        self._down = torch.cat([weights[module].down for module in modules]).to(dtype).contiguous()
        assert self._down.shape == (rank, inputs), "the shapes were compared with the model's"
        self._scales = torch.cat([torch.full((len(weights[each].down),), weights[each].scale) for each in modules])
        vectors: list[torch.Tensor] = []
        groups: list[tuple[int, int, int]] = []
        for run in runs:
            _add_run(run, weights, first_ranks, vectors, groups)
        self._up = torch.cat(vectors).to(dtype).contiguous()
        self._groups = torch.tensor(groups, dtype=torch.int64)
        addresses = (each.data_ptr() for each in (self._down, self._scales, self._up, self._groups))
        self.native = native.NativeAdapter(*addresses, rank)


def _add_run(
    run: Sequence[Site],
    weights: Mapping[str, LowRank],
    first_ranks: Mapping[str, int],
    vectors: list[torch.Tensor],
    groups: list[tuple[int, int, int]],
) -> None:
    """Append the vectors and groups of adjacent outputs; a group has the ranks of all modules with outputs in it."""
    num_outputs = sum(site.count for site in run)
    num_groups, total = -(-num_outputs // _GROUP), sum(len(weights[module].down) for module in first_ranks)
    up, spans, column = torch.zeros(num_groups * _GROUP, total), [(total, 0)] * num_groups, 0
    for site in run:
        if site.module in weights:
            matrix, first = weights[site.module], first_ranks[site.module]
            stop = first + len(matrix.down)
            up[column : column + site.count, first:stop] = matrix.up[site.first : site.first + site.count].float()
            for group in range(column // _GROUP, -(-(column + site.count) // _GROUP)):
                spans[group] = min(spans[group][0], first), max(spans[group][1], stop)
        column += site.count
    at = sum(len(each) for each in vectors)
    for group, (first, stop) in enumerate(spans):
        count = max(0, stop - first)
        groups.append((first if count else 0, count, at))
        vectors.append(up[group * _GROUP : (group + 1) * _GROUP, first : first + count].T)
        at += count


_NO_PART = native.NativeAdapter()


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Adapters of a step's rows. ``which``: by row, an index into ``names``, or -1."""

    names: tuple[str, ...]
    which: NDArray[np.int32]
    order: NDArray[np.int32] = field(init=False)  # rows, sorted by ``which``
    # ``order``, copied
    _on_devices: dict[torch.device, torch.Tensor] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", np.argsort(self.which, kind="stable").astype(np.int32))

    @classmethod
    def of(cls, adapters: Sequence[str], counts: Sequence[int]) -> RowAdapters | None:
        """Return the adapters of sequences with these numbers of rows, "" for none; None if no sequence has any."""
        names = tuple(dict.fromkeys(name for name in adapters if name))
        if not names:
            return None
        indices = [names.index(name) if name else -1 for name in adapters]
        return cls(names, np.repeat(np.asarray(indices, np.int32), counts))

    def rows(self, index: int, device: torch.device) -> torch.Tensor:
        """Return the rows of an adapter, on a device. They are copied there once for all products of a step."""
        if device not in self._on_devices:
            self._on_devices[device] = torch.from_numpy(self.order).to(device, torch.int64)
        first, stop = np.searchsorted(self.which[self.order], (index, index + 1))
        return self._on_devices[device][first:stop]

    def table(self, tables: Iterable[AdapterTable]) -> AdaptedRows:
        """Return the kernels' description, with the parts of each adapter in the order of ``names``."""
        return AdaptedRows(self, tuple(tables))


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """An adapter's parts, by the numbers of their products; None: it leaves a product alone. It keeps them alive while
    a step uses their addresses."""

    parts: tuple[AdapterPart | None, ...]
    native: ctypes.Array[native.NativeAdapter]

    @classmethod
    def of(cls, parts: Sequence[AdapterPart | None]) -> AdapterTable:
        listed = [_NO_PART if part is None else part.native for part in parts]
        return cls(tuple(parts), (native.NativeAdapter * len(listed))(*listed))


class AdaptedRows:
    """Description of a step's adapters for our kernels: ``native`` is ``SwarmAdapted`` of kernels.h."""

    def __init__(self, rows: RowAdapters, tables: tuple[AdapterTable, ...]) -> None:
        self._rows, self._tables = rows, tables
        self._addresses = (_pointer * len(tables))(*(ctypes.addressof(table.native) for table in tables))
        self.native = native.NativeAdapted(
            *(rows.which.ctypes.data, rows.order.ctypes.data),
            *(ctypes.addressof(self._addresses), len(tables), 0, None, 0),
        )


_current = threading.local()


def current_adapters() -> RowAdapters | None:
    """Return the adapters of the rows that this thread computes; None if there are none."""
    adapters: RowAdapters | None = getattr(_current, "value", None)
    return adapters


class using_adapters:
    """Context manager within which this thread's products add what the rows' adapters add to them."""

    def __init__(self, adapters: RowAdapters | None) -> None:
        self._adapters = adapters

    def __enter__(self) -> None:
        _current.value = self._adapters

    def __exit__(self, *_: object) -> None:
        _current.value = None

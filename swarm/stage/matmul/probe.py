"""Trials that show with which numbers of rows and threads a library's kernel gives a row the same bits.

In a library, a row's bits depend on the number of rows in a call: that number decides which kernel sums, and in which
order. Such a kernel is therefore always called with one of a few fixed numbers of rows, a tile. Missing rows are filled
with zeros; more rows are split. A probe shows whether a row has the same bits at any place of a tile and next to any
other rows, and for which tile sizes and numbers of threads these bits agree. A kernel for which this cannot be shown is
called inexact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

# Rows of a tile. Four rows take as long as one, because reading the matrix dominates; sixteen cost little more; the
# large tiles are for prompts.
SIZES = (4, 16, 64, 256)
# Up to this many rows, a tile takes about as long as one row, because reading the matrix dominates.
FEW_ROWS = 16
# multiplications in one call: larger tiles are neither tried nor used, because the trial would delay loading
_MAX_WORK = 1 << 30
# Values compared for each size. Where 16 bits of a sum are kept, one value in 5,000 reveals another order of summation.
_NUM_COMPARED = 1 << 17
_CPU = torch.device("cpu")
_MAX_ROWS = 256  # upper bound of compared rows if a row has few values: each row costs a call in the smallest tiles
# Factor of the outlier row's numbers: a scale computed over the whole tile would change the other rows' bits.
_OUTLIER_FACTOR = 1000.0

# Rows of a tile of our own kernels for GPUs. A tensor core multiplies up to 64 rows while the matrix is being read.
HEIGHTS = (16, 64, 128)
FEW_HEIGHTS = 64

_ALIGNMENT = 64  # bytes; alignment of torch's own tensors

Product = Callable[..., torch.Tensor]
"""A function that computes one row of results per row of its arguments: one or several tensors ``[rows, …]``."""

Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a probe: a row has the same bits in tiles of these ``sizes``, computed by one of these numbers of
    ``threads``.

    Without sizes, the product is not proven exact.
    """

    sizes: tuple[int, ...] = ()  # rows of a tile, ascending
    threads: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        return bool(self.sizes)


def prove(
    product: Product,
    widths: tuple[int, ...],
    outputs: int,
    *,
    dtype: torch.dtype,
    work: int,
    numbers: tuple[int, ...],
    device: torch.device = _CPU,
    sizes: tuple[int, ...] = SIZES,
    few_rows: int = FEW_ROWS,
) -> Proof:
    """Compare a product's results for different tile sizes and numbers of threads, and return the settings with equal
    bits.

    ``widths``: width of each tensor that the product takes. ``outputs``: values in a row of the result. ``work``:
    number of multiplications for one row. ``numbers``: numbers of threads to try, ascending. ``few_rows``: size up to
    which a tile takes about as long as one row. The same kernel on the same machine always gets the same proof.
    """
    if device.type == "cpu":
        sizes = tuple(size for size in sizes if size <= few_rows or size * work <= _MAX_WORK)
    common = min(_MAX_ROWS, max(few_rows, -(-_NUM_COMPARED // outputs)))
    rows = tuple(tensor.to(device) for tensor in _sample_rows(widths, _round_up(common, sizes[-1]) + 1, dtype))
    bits_by_setting: dict[tuple[int, int], torch.Tensor] = {}
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for number in numbers:
                torch.set_num_threads(number)
                for size in sizes:
                    bits = _stable_bits(product, rows, size, common)
                    if bits is not None:
                        bits_by_setting[size, number] = bits
    finally:
        torch.set_num_threads(before)  # The probe changes torch's global number of threads: restore it.
    return _choose_sizes(bits_by_setting, numbers, sizes, few_rows)


def _sample_rows(widths: tuple[int, ...], count: int, dtype: torch.dtype) -> Rows:
    chance = torch.Generator().manual_seed(11)
    rows = tuple(torch.randn(count, width, generator=chance).to(dtype) for width in widths)
    for tensor in rows:
        tensor[-1] *= _OUTLIER_FACTOR  # the outlier row
    return rows


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _stable_bits(product: Product, rows: Rows, size: int, common: int) -> torch.Tensor | None:
    """Return the first ``common`` rows' results in tiles of this size; None if a row's bits depend on its place or on
    other rows."""
    starts = range(0, _round_up(common, size), size)
    straight = torch.cat([product(*_tile(rows, start, size, size)) for start in starts])
    for start in starts:
        # Shift each row by one place, so that every place is compared with the next one, after an outlier row.
        shifted = tuple(torch.cat((tensor[-1:], tensor[start : start + size - 1])) for tensor in rows)
        if not torch.equal(product(*shifted)[1:], straight[start : start + size - 1]):
            return None
    for count in (1, 3) if size <= FEW_ROWS else (1,):
        if not torch.equal(product(*_tile(rows, 0, count, size))[:count], straight[:count]):
            return None
    return straight[:common]


def _choose_sizes(
    bits_by_setting: dict[tuple[int, int], torch.Tensor],
    numbers: tuple[int, ...],
    all_sizes: tuple[int, ...] = SIZES,
    few_rows: int = FEW_ROWS,
) -> Proof:
    """Return the tile sizes for which a row has the same bits, with all numbers of threads if possible, else with the
    largest number only.

    Several groups of sizes may qualify, each with its own bits. Prefer a group with a tile for few rows, then the group
    with the largest tile.
    """
    classes: list[tuple[torch.Tensor, set[tuple[int, int]]]] = []
    for setting, bits in bits_by_setting.items():
        for class_bits, settings in classes:
            if torch.equal(class_bits, bits):
                settings.add(setting)
                break
        else:
            classes.append((bits, {setting}))
    for wanted in (numbers, numbers[-1:]):
        sets = [tuple(size for size in all_sizes if all((size, n) in ways for n in wanted)) for _, ways in classes]
        if any(sets):
            return Proof(
                max(filter(None, sets), key=lambda sizes: (sizes[0] <= few_rows, sizes[-1], len(sizes))), wanted
            )
    return Proof()


# --- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowTile:
    """``count`` rows, beginning with row ``first``, that are computed in a tile of ``size`` rows."""

    first: int
    count: int
    size: int


@lru_cache(maxsize=4096)
def split_rows(num_rows: int, sizes: tuple[int, ...]) -> tuple[RowTile, ...]:
    """Return the tiles into which this number of rows is split."""
    return tuple(_split_rows(num_rows, sizes))


def _split_rows(num_rows: int, sizes: tuple[int, ...]) -> Iterator[RowTile]:
    first = 0
    while first < num_rows:
        rest = num_rows - first
        # Take the smallest tile that holds the remaining rows, if little of it stays empty or if it is small anyhow;
        # else the largest tile that they fill.
        around = next((size for size in sizes if size >= rest and (size <= FEW_ROWS or 4 * rest > 3 * size)), 0)
        size = around or max((size for size in sizes if size <= rest), default=sizes[0])
        yield RowTile(first, min(size, rest), size)
        first += size


def multiply_in_tiles(product: Product, rows: Rows, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the product of any number of rows, computed tile by tile."""
    num_rows = len(rows[0])
    pieces = split_rows(num_rows, sizes)
    if len(pieces) == 1:
        return product(*_tile(rows, 0, num_rows, pieces[0].size))[:num_rows]
    if not pieces:
        return product(*_tile(rows, 0, 0, sizes[0]))[:0]
    result: torch.Tensor | None = None
    for cut in pieces:
        answer = product(*_tile(rows, cut.first, cut.count, cut.size))
        if result is None:
            result = answer.new_empty(num_rows, *answer.shape[1:])
        result[cut.first : cut.first + cut.count] = answer[: cut.count]
    assert result is not None
    return result


def _tile(rows: Rows, first: int, count: int, size: int) -> Rows:
    return tuple(pad_rows(tensor[first : first + count], size) for tensor in rows)


def pad_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows padded to a whole tile, aligned in memory as torch's tensors are: some kernels depend on the
    alignment."""
    if len(rows) < size:
        return torch.nn.functional.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, size - len(rows)))
    lies_well = rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0
    return rows if lies_well else rows.clone(memory_format=torch.contiguous_format)

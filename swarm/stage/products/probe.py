"""Shows by trying with how many rows, and by how many threads, a library's kernel has the same bits for a row.

What changes a row's bits in a library is the number of rows in a call: it decides which kernel sums, in which order. So
such a kernel is always called with one of a few fixed numbers of rows, a tile; rows that are missing are zeros, more
rows are cut. A probe shows whether a row then has the same bits at any place of a tile, among any others, and in which
sizes of tiles and for which numbers of threads these are the same ones. What can't be shown is called inexact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

# Rows of a tile. Four read a matrix as quickly as one; sixteen cost little more; the large ones are for prompts.
SIZES = (4, 16, 64, 256)
# A tile of up to so many rows takes about as long as one row: what counts there is reading the matrix.
FEW = 16
_MOST_WORK = 1 << 30  # multiplications of one call; larger tiles are neither tried nor used: loading would wait for it
# Values that are compared for each size. Where 16 bits are kept of a sum, one value in 5,000 shows another order.
_VALUES = 1 << 17
_MOST_ROWS = 256  # that are compared, where a row has few values: each costs a call in the smallest tiles
_LOUD = 1000.0  # how much larger a stranger's numbers are: a scale that is made of the whole tile would show

_ALIGNED = 64  # bytes; where torch lets a tensor of its own begin

Product = Callable[..., torch.Tensor]
"""Some rows, one or several tensors ``[rows, …]``, to as many rows of results."""

Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """In tiles of these ``sizes``, computed by one of these numbers of ``threads``, a row always has the same bits.

    No sizes: nothing was shown.
    """

    sizes: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        return bool(self.sizes)


def prove(
    product: Product, widths: tuple[int, ...], outputs: int, *, dtype: torch.dtype, work: int, numbers: tuple[int, ...]
) -> Proof:
    """Try the product on rows of these ``widths`` (one for each tensor that it takes) with these numbers of threads.

    ``work``: multiplications for a row. The same kernel on the same machine gets the same proof every time.
    """
    sizes = [size for size in SIZES if size <= FEW or size * work <= _MOST_WORK]
    common = min(_MOST_ROWS, max(FEW, -(-_VALUES // outputs)))
    rows = _rows(widths, _rounded(common, sizes[-1]) + 1, dtype)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for number in numbers:
                torch.set_num_threads(number)
                for size in sizes:
                    bits = _bits(product, rows, size, common)
                    if bits is not None:
                        seen[size, number] = bits
    finally:
        torch.set_num_threads(before)
    return _best(seen, numbers)


def _rows(widths: tuple[int, ...], count: int, dtype: torch.dtype) -> Rows:
    chance = torch.Generator().manual_seed(11)
    rows = tuple(torch.randn(count, width, generator=chance).to(dtype) for width in widths)
    for each in rows:
        each[-1] *= _LOUD  # the stranger
    return rows


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _bits(product: Product, rows: Rows, size: int, common: int) -> torch.Tensor | None:
    """The first ``common`` rows' results, in tiles of this size; None if a row's depend on its place or company."""
    starts = range(0, _rounded(common, size), size)
    straight = torch.cat([product(*_tile(rows, start, size, size)) for start in starts])
    for start in starts:
        # Each row one place further, so that every place is compared with the next one, behind a loud stranger.
        shifted = tuple(torch.cat((each[-1:], each[start : start + size - 1])) for each in rows)
        if not torch.equal(product(*shifted)[1:], straight[start : start + size - 1]):
            return None
    for count in (1, 3) if size <= FEW else (1,):
        if not torch.equal(product(*_tile(rows, 0, count, size))[:count], straight[:count]):
            return None
    return straight[:common]


def _best(seen: dict[tuple[int, int], torch.Tensor], numbers: tuple[int, ...]) -> Proof:
    """Sizes that give the same bits: for all numbers of threads if there are any, else for the largest.

    Of several such sets, one with a tile for a few rows, and of these the one that reaches furthest.
    """
    alike: list[tuple[torch.Tensor, set[tuple[int, int]]]] = []
    for way, bits in seen.items():
        for known, ways in alike:
            if torch.equal(known, bits):
                ways.add(way)
                break
        else:
            alike.append((bits, {way}))
    for wanted in (numbers, numbers[-1:]):
        sets = [tuple(size for size in SIZES if all((size, n) in ways for n in wanted)) for _, ways in alike]
        if any(sets):
            return Proof(max(filter(None, sets), key=lambda sizes: (sizes[0] <= FEW, sizes[-1], len(sizes))), wanted)
    return Proof()


# --- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """``count`` rows from ``first`` on, in a tile of ``size``."""

    first: int
    count: int
    size: int


@lru_cache(maxsize=4096)
def cuts(num_rows: int, sizes: tuple[int, ...]) -> tuple[Cut, ...]:
    """Into which tiles so many rows go."""
    return tuple(_cuts(num_rows, sizes))


def _cuts(num_rows: int, sizes: tuple[int, ...]) -> Iterator[Cut]:
    first = 0
    while first < num_rows:
        rest = num_rows - first
        # The least that holds the rest, if little of it stays empty or it is quick anyhow; else the largest to be full.
        around = next((size for size in sizes if size >= rest and (size <= FEW or 4 * rest > 3 * size)), 0)
        size = around or max((size for size in sizes if size <= rest), default=sizes[0])
        yield Cut(first, min(size, rest), size)
        first += size


def in_tiles(product: Product, rows: Rows, sizes: tuple[int, ...]) -> torch.Tensor:
    """The product of any number of rows."""
    num_rows = len(rows[0])
    pieces = cuts(num_rows, sizes)
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
    return tuple(padded(each[first : first + count], size) for each in rows)


def padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """A whole tile. In memory it begins where every tensor does: some kernels look at that, too."""
    if len(rows) < size:
        return torch.nn.functional.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, size - len(rows)))
    lies_well = rows.is_contiguous() and rows.data_ptr() % _ALIGNED == 0
    return rows if lies_well else rows.clone(memory_format=torch.contiguous_format)

"""Grid of positions: units of memory and of attention, and the rows of a step split into tiles along them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarm.wire.messages import BLOCK, Row

# Unit of memory for keys and values, in positions. Windows begin on a multiple of it.
GRID = BLOCK
# A query attends to everything up to the next multiple of this. Many lengths then have the same number of keys, so that
# sequences can share a product. Costs at most that many masked keys.
CELL = 128
# Queries of one sequence that share a product. Divides CELL.
TILE = 64


def round_up(positions: int) -> int:
    """Round up to a whole number of blocks."""
    return -(-positions // GRID) * GRID


@dataclass(frozen=True, slots=True)
class Tile:
    """``count`` queries of one sequence and one cell, which share a product."""

    offset: int  # of the first query, in the batch
    count: int
    start: int  # position of the first query in its sequence

    @property
    def cell(self) -> int:
        """First position of the tile's cell."""
        return self.start // CELL * CELL


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: its offset in the batch, and its queries split into tiles."""

    sequence: int
    offset: int  # of the first token, in the batch
    start: int  # position of the first token in its sequence
    count: int
    tiles: tuple[Tile, ...]
    num_proposed: int = 0  # tokens at its end that are proposals


def layout_spans(rows: Iterable[Row], proposed: Mapping[int, int] | None = None) -> Iterator[Span]:
    """Yield the rows as consecutive spans of a batch. ``proposed``: by index, how many proposals a row ends in."""
    offset = 0
    for index, row in enumerate(rows):
        tiles = tuple(_tiles(offset, row.start, row.count))
        yield Span(row.sequence, offset, row.start, row.count, tiles, proposed.get(index, 0) if proposed else 0)
        offset += row.count


def _tiles(offset: int, start: int, count: int) -> Iterator[Tile]:
    position, stop = start, start + count
    while position < stop:
        end = min(stop, position // TILE * TILE + TILE)
        yield Tile(offset + position - start, end - position, position)
        position = end

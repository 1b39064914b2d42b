"""The grid of positions: units of memory and of attention, and a step's rows cut into tiles along it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.wire.messages import BLOCK, Row

# The unit of memory for keys and values, in positions; windows begin on a line of it.
GRID = BLOCK
# Queries attend to everything up to the next multiple of this after them: one number of keys for many lengths, so that
# sequences can share a product. Costs at most that many masked keys.
CELL = 128
# Queries of one sequence that share a product. Divides CELL.
TILE = 64


def round_up(positions: int) -> int:
    """The next line of the grid."""
    return -(-positions // GRID) * GRID


@dataclass(frozen=True, slots=True)
class Tile:
    """``count`` queries from ``offset`` of the batch on, at ``start`` …, all in one cell."""

    offset: int
    count: int
    start: int

    @property
    def cell(self) -> int:
        """Where its cell begins."""
        return self.start // CELL * CELL


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: its place in the batch, and its queries cut into tiles."""

    sequence: int
    offset: int
    start: int
    count: int
    tiles: tuple[Tile, ...]


def spans_of(rows: Iterable[Row]) -> Iterator[Span]:
    offset = 0
    for row in rows:
        yield Span(row.sequence, offset, row.start, row.count, tuple(_tiles(offset, row.start, row.count)))
        offset += row.count


def _tiles(offset: int, start: int, count: int) -> Iterator[Tile]:
    position, stop = start, start + count
    while position < stop:
        end = min(stop, position // TILE * TILE + TILE)
        yield Tile(offset + position - start, end - position, position)
        position = end

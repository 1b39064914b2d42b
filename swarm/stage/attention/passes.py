"""One run of a ragged batch through some layers: what the layers' hooks and the attention function must know about it.

Layer modules are shared by consecutive stages of one worker, and one thread may warm a stage up while another computes
with the one before. So nothing about a run is kept in a module; it stands in the calling thread's current pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarm.errors import IllegalMove

if TYPE_CHECKING:
    from swarm.stage.attention.arena import KvArena
    from swarm.stage.attention.own import Together
    from swarm.stage.attention.tiles import Plan
    from swarm.wire.messages import LayerRange, Row

# The unit of memory for keys and values, in positions; windows begin on a line of it.
GRID = 32
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


@dataclass(slots=True)
class Tally:
    """What was made anew and what was there already."""

    mask_hits: int = 0
    mask_misses: int = 0
    rope_hits: int = 0
    rope_misses: int = 0


@dataclass(slots=True)
class Pass:
    """One run through some layers by one thread: what the modules' hooks and the attention function need to know."""

    arena: KvArena
    layers: LayerRange
    spans: tuple[Span, ...]
    hidden: torch.Tensor | None = None  # replaces the first layer's input, unless the stage embeds
    keep_rows: torch.Tensor | None = None  # narrows the last layer's output to what the head needs
    fenced: Callable[[], bool] = lambda: False
    progressed: Callable[[], None] = lambda: None
    left_layers: Callable[[], None] = lambda: None  # called after the last layer, before norm and head
    plans: dict[int | None, Plan] = field(default_factory=dict)  # who attends together, by window
    racks: tuple[Together, ...] = ()  # the same for our own kernel, once it was asked for
    tally: Tally = field(default_factory=Tally)
    length: int = 0  # positions up to the furthest of the batch
    output: torch.Tensor | None = None  # the last layer's output


_current = threading.local()


def current_pass() -> Pass:
    """The pass that this thread is in."""
    found = getattr(_current, "value", None)
    if not isinstance(found, Pass):
        raise IllegalMove("a layer ran outside of a pass")
    return found


class running:
    """``with running(a_pass):`` makes it this thread's current one."""

    def __init__(self, this: Pass) -> None:
        self._this = this

    def __enter__(self) -> None:
        _current.value = self._this

    def __exit__(self, *_: object) -> None:
        _current.value = None

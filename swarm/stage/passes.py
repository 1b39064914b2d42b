"""One run of a ragged batch through some layers: what the layers' hooks and the attention function must know about it.

Layer modules are shared by consecutive stages of one worker, and one thread may warm a stage up while another computes
with the one before. So nothing about a run is kept in a module; it stands in the calling thread's current pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarm.errors import IllegalMove

if TYPE_CHECKING:
    from swarm.stage.arena import KvArena
    from swarm.wire.messages import LayerRange, Row

# The unit of attention tiles and of memory for keys and values, in positions.
GRID = 32


def round_up(positions: int) -> int:
    """The next line of the grid."""
    return -(-positions // GRID) * GRID


@dataclass(frozen=True, slots=True)
class Tile:
    """``count`` queries from ``offset`` of the batch on, at ``start`` …, all between two lines of the grid."""

    offset: int
    count: int
    start: int

    @property
    def line(self) -> int:
        return self.start // GRID * GRID


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: its place in the batch, and its queries cut at the lines of the grid."""

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
        end = min(stop, position // GRID * GRID + GRID)
        yield Tile(offset + position - start, end - position, position)
        position = end


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

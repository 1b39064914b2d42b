"""Grouping of a pass's rows into shared products: computed once and used by every layer.

Tiles share one product if their keys begin and end at the same positions and their sequences are adjacent in a rack. A
row's bits do not depend on which rows share its product, so grouping affects speed only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import CELL, GRID, Span, Tile
from swarm.stage.attention.guesses import Guesses, mark_guesses
from swarm.stage.attention.options import Reach
from swarm.stage.attention.racks import Rack

# Keys that one product takes, of all its sequences together, so that the kernel's packed operand stays in the caches.
_MAX_KEYS = 4096


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles that share one product: ``num_tiles`` tiles of ``num_queries`` queries each, with keys ``low`` up to
    ``high``.

    Their sequences are in adjacent slots of a rack, beginning with ``first_slot``. ``tokens`` holds the queries'
    offsets in the batch, as a slice for a single tile. ``later`` marks which of the last 128 keys come after a query,
    ``before_reach`` which of the first keys precede its window or chunk: ``[num_tiles, 1, 1, num_queries, keys]``, or
    None if there are none. ``positions``: the queries', ``[num_tiles, 1, 1, num_queries, 1]``.
    """

    rack: Rack
    first_slot: int
    num_tiles: int
    num_queries: int
    low: int
    high: int
    tokens: torch.Tensor | slice
    later: torch.Tensor | None
    before_reach: torch.Tensor | None
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenWrites:
    """Slots ``[sequences]`` and positions at which single new tokens of a rack's sequences are written."""

    rack: Rack
    slots: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class SpanWrite:
    """Several consecutive new positions of one sequence, which are written together."""

    rack: Rack
    slot: int
    span: Span


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention does in one forward pass: the cache positions that it writes, and the tile groups that it
    computes. It is the same for all layers with the same reach."""

    sequences: tuple[int, ...]  # every sequence of the pass
    token_writes: tuple[TokenWrites, ...]  # sequences with one new position
    span_writes: tuple[SpanWrite, ...]  # sequences with several
    groups: tuple[TileGroup, ...]
    guesses: Guesses | None  # the tokens that are proposals; None without any

    @property
    def single_groups(self) -> Iterator[TileGroup]:
        """Groups split so that each has a single tile."""
        return (single for group in self.groups for single in _split_group(group))


def plan_attention(arena: KvArena, spans: Iterable[Span], reach: Reach, device: torch.device) -> AttentionPlan:
    """Group the spans' tiles. The result holds for all layers with this reach."""
    spans = tuple(spans)
    places = {span.sequence: arena.slot(span.sequence) for span in spans}
    return AttentionPlan(
        tuple(places),
        tuple(_writes(spans, places, device)),
        tuple(SpanWrite(*places[span.sequence], span) for span in spans if span.count > 1),
        tuple(_groups(spans, places, reach, device)),
        mark_guesses(spans, device),
    )


Places = dict[int, tuple[Rack, int]]


def _writes(spans: tuple[Span, ...], places: Places, device: torch.device) -> Iterator[TokenWrites]:
    by_rack: dict[int, list[Span]] = {}
    for span in (span for span in spans if span.count == 1):
        by_rack.setdefault(id(places[span.sequence][0]), []).append(span)
    for rack_spans in by_rack.values():
        yield TokenWrites(
            places[rack_spans[0].sequence][0],
            torch.tensor([places[span.sequence][1] for span in rack_spans], device=device),
            torch.tensor([span.start for span in rack_spans], device=device),
            torch.tensor([span.offset for span in rack_spans], device=device),
        )


def _groups(spans: tuple[Span, ...], places: Places, reach: Reach, device: torch.device) -> Iterator[TileGroup]:
    alike: dict[tuple[int, int, int], list[tuple[int, Tile]]] = {}
    for span in spans:
        rack, place = places[span.sequence]
        for tile in span.tiles:
            if span.count > 1:
                yield _group(rack, place, [tile], reach, device)
            else:
                alike.setdefault((id(rack), first_key(tile.cell, reach), keys_end(tile)), []).append((place, tile))
    racks = {id(rack): rack for rack, _ in places.values()}
    for (rack_id, low, high), tiles in alike.items():
        tiles.sort(key=lambda each: each[0])
        most = max(1, _MAX_KEYS // (high - low))
        for place, run in _adjacent_runs(tiles, most):
            yield _group(racks[rack_id], place, run, reach, device)


def _adjacent_runs(tiles: list[tuple[int, Tile]], max_tiles: int) -> Iterator[tuple[int, list[Tile]]]:
    """Split the tiles where a slot is missing, and after ``max_tiles`` of them."""
    first, run = tiles[0][0], [tiles[0][1]]
    for place, tile in tiles[1:]:
        if place != first + len(run) or len(run) == max_tiles:
            yield first, run
            first, run = place, []
        run.append(tile)
    yield first, run


def first_key(cell: int, reach: Reach) -> int:
    """Return the first key that a cell's queries see: a multiple of the grid, the same for all queries of the cell."""
    return int(max(0, reach.first(cell)) // GRID * GRID)


def keys_end(tile: Tile) -> int:
    """Return the end of a tile's keys: the end of its cell, whichever of the cell's queries the tile has."""
    return tile.cell + CELL


def _group(rack: Rack, place: int, tiles: list[Tile], reach: Reach, device: torch.device) -> TileGroup:
    count, low, high = tiles[0].count, first_key(tiles[0].cell, reach), keys_end(tiles[0])
    positions = torch.tensor([tile.start for tile in tiles])[:, None] + torch.arange(count)
    positions = positions.view(len(tiles), 1, 1, count, 1)
    return TileGroup(
        rack,
        place,
        len(tiles),
        count,
        low,
        high,
        slice(tiles[0].offset, tiles[0].offset + count)
        if len(tiles) == 1
        else torch.tensor([tile.offset for tile in tiles], device=device),
        _mask_or_none(torch.arange(max(low, high - CELL), high) > positions, device),
        _too_old(positions, low, reach, device),
        positions,
    )


def _too_old(positions: torch.Tensor, low: int, reach: Reach, device: torch.device) -> torch.Tensor | None:
    first = reach.first(positions)
    return _mask_or_none(torch.arange(low, max(low, int(first.max()))) < first, device)


def _split_group(group: TileGroup) -> Iterator[TileGroup]:
    for number in range(group.num_tiles):
        later, before = (
            None if mask is None else mask[number : number + 1] for mask in (group.later, group.before_reach)
        )
        tokens = group.tokens if isinstance(group.tokens, slice) else group.tokens[number : number + 1]
        single = replace(group, first_slot=group.first_slot + number, num_tiles=1, tokens=tokens)
        yield replace(single, later=later, before_reach=before, positions=group.positions[number : number + 1])


def _mask_or_none(hidden: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    return hidden.to(device) if bool(hidden.any()) else None

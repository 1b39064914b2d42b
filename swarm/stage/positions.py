"""How far a sequence has come in each layer of a stage.

A sequence's positions are kept per range of layers: layers just taken over have none until they are rebuilt, and the
sequence waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.wire.digests import digests_of
from swarm.wire.messages import LayerRange, Open, RangePosition, Row


@dataclass(slots=True)
class HeldTokens:
    """One sequence in this stage."""

    open: Open
    history: list[int]
    kv: list[RangePosition]  # in layer order; one entry when all layers are level
    is_retired: bool = False  # it has ended, and has room for its beginning only

    def position(self) -> int | None:
        """How many positions every layer holds; None while they differ."""
        first = self.kv[0].position
        return first if all(r.position == first for r in self.kv) else None

    def digests(self) -> tuple[int, ...]:
        """Of the tokens that the keys and values were computed from."""
        return digests_of(self.history, max(r.position for r in self.kv))

    def set_position(self, layers: LayerRange, position: int) -> None:
        self.kv = [RangePosition(layers, position)]

    def least(self, layers: LayerRange) -> int:
        """How many positions each of these layers holds at least."""
        return min(
            (r.position for r in self.kv if r.layers.first < layers.stop and layers.first < r.layers.stop), default=0
        )

    def advance(self, layers: LayerRange, position: int) -> None:
        """These layers hold at least so many positions now; the others what they held."""
        moved: list[RangePosition] = []
        for held in self.kv:
            first, stop = max(held.layers.first, layers.first), min(held.layers.stop, layers.stop)
            if first >= stop:
                moved.append(held)
                continue
            if held.layers.first < first:
                moved.append(RangePosition(LayerRange(held.layers.first, first), held.position))
            moved.append(RangePosition(LayerRange(first, stop), max(held.position, position)))
            if stop < held.layers.stop:
                moved.append(RangePosition(LayerRange(stop, held.layers.stop), held.position))
        self.kv = _merge(moved)

    def truncate(self, position: int) -> None:
        cut = [RangePosition(r.layers, min(r.position, position)) for r in self.kv]
        self.kv = _merge(cut)

    def take_over(self, layers: LayerRange) -> None:
        """The stage's range changes: layers that stay keep their positions, new ones have none."""
        kept: list[RangePosition] = []
        at = layers.first
        for held in self.kv:
            first, stop = max(held.layers.first, layers.first), min(held.layers.stop, layers.stop)
            if first >= stop:
                continue
            if first > at:
                kept.append(RangePosition(LayerRange(at, first), 0))
            kept.append(RangePosition(LayerRange(first, stop), held.position))
            at = stop
        if at < layers.stop:
            kept.append(RangePosition(LayerRange(at, layers.stop), 0))
        self.kv = _merge(kept)


def _merge(ranges: list[RangePosition]) -> list[RangePosition]:
    merged: list[RangePosition] = []
    for item in ranges:
        if merged and merged[-1].position == item.position:
            merged[-1] = RangePosition(LayerRange(merged[-1].layers.first, item.layers.stop), item.position)
        else:
            merged.append(item)
    return merged


def wrong_row(sequences: Mapping[int, HeldTokens], rows: tuple[Row, ...]) -> str | None:
    """A row must begin exactly where its sequence ends in every layer held; the first that doesn't, in words."""
    for row in rows:
        held = sequences.get(row.sequence)
        if held is None:
            return f"sequence {row.sequence} is not open here"
        if held.position() != row.start:
            return f"sequence {row.sequence} stands at {held.kv}, the row begins at {row.start}"
        if row.start + row.count > held.open.limit:
            return f"sequence {row.sequence} would outgrow its limit of {held.open.limit}"
    return None

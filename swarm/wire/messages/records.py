"""Small values that messages of several doors carry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from swarm.wire.messages.common import (
    ASSET_PART_BYTES,
    MAX_TENSOR_BYTES,
    Endpoint,
    LayerIndex,
    Name,
    Position,
    Record,
    Seconds,
    SequenceId,
    Text,
    TokenId,
    Whole,
)


class LayerRange(Record, frozen=True):
    """Layers ``first`` up to, not including, ``stop``."""

    first: LayerIndex
    stop: LayerIndex

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        """Show people the first and the last layer. One that is empty, which is a mistake, shows its bounds."""
        if self.stop == self.first + 1:
            return str(self.first)
        return f"{self.first}–{self.stop - 1}" if self.first < self.stop else f"[{self.first}, {self.stop})"

    @property
    def in_words(self) -> str:
        """``layer 5``, ``layers 3–5``."""
        return f"layer {self}" if self.stop == self.first + 1 else f"layers {self}"


def layers_of(ranges: Iterable[LayerRange]) -> frozenset[int]:
    """Return all layers of the ranges."""
    return frozenset(layer for each in ranges for layer in range(each.first, each.stop))


def loaded_layers(own: LayerRange | None, kept: Iterable[LayerRange]) -> frozenset[int]:
    """Join what a worker has loaded: layers of its own part, and those that it keeps for others."""
    return layers_of(kept if own is None else (own, *kept))


def ranges_of(layers: Iterable[int]) -> tuple[LayerRange, ...]:
    """Return these layers as ranges, in order."""
    found: list[LayerRange] = []
    for layer in sorted(layers):
        if found and found[-1].stop == layer:
            found[-1] = LayerRange(found[-1].first, layer + 1)
        else:
            found.append(LayerRange(layer, layer + 1))
    return tuple(found)


LayerRanges = Annotated[tuple[LayerRange, ...], msgspec.Meta(max_length=64)]


class TensorSpec(Record, frozen=True):
    """The frame that follows: raw little-endian elements in C order. ``checksum``: the low 63 bits of the
    bytes' xxh3-64, 0 if checksums are off."""

    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**40)], ...], msgspec.Meta(max_length=4)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSOR_BYTES)]
    checksum: Whole


class PayloadSpec(Record, frozen=True):
    """The frame that follows: raw bytes of an asset."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=ASSET_PART_BYTES)]
    checksum: Whole


class Setting(Record, frozen=True):
    """A setting of a process, as it is told to people: no password is in it. ``value``: as JSON. ``origin``: where the
    value comes from, in words."""

    name: Name
    value: Text
    origin: Text


class SequencePosition(Record, frozen=True):
    sequence: SequenceId
    position: Position


class TokenLogprob(Record, frozen=True):
    token: TokenId
    logprob: float


class Hop(Record, frozen=True):
    """One stage's share of one step. ``wait_s``: from arrival to the start of the work; ``idle_s``: how long the stage
    had nothing to do before; ``wire_bytes``: what it received; ``held_s``: from arrival to handing on, all of it, so
    that a step's time outside of the stages can be told."""

    worker: Name
    layers: LayerRange
    wait_s: Seconds
    compute_s: Seconds
    sample_s: Seconds
    idle_s: Seconds
    wire_bytes: Whole
    held_s: Seconds = 0.0

    @property
    def whole_s(self) -> float:
        """How long the stage had the step; never less than what it says to have spent on it."""
        return max(self.held_s, self.wait_s + self.compute_s + self.sample_s)


class Edge(Record, frozen=True):
    """Where a stage sends its output: the next stage's data endpoint, or the broker's after the last."""

    to: Name
    endpoint: Endpoint

"""Small values that messages of several channels contain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from swarm.wire.messages.common import (
    ASSET_PART_BYTES,
    MAX_SEQUENCES,
    MAX_TENSOR_BYTES,
    Endpoint,
    LayerIndex,
    Name,
    Position,
    PublicKey,
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
        """Return the first and the last layer for people. An empty range, which is a bug, shows its bounds."""
        if self.stop == self.first + 1:
            return str(self.first)
        return f"{self.first}–{self.stop - 1}" if self.first < self.stop else f"[{self.first}, {self.stop})"

    @property
    def label(self) -> str:
        """``layer 5``, ``layers 3–5``."""
        return f"layer {self}" if self.stop == self.first + 1 else f"layers {self}"


def layers_of(ranges: Iterable[LayerRange]) -> frozenset[int]:
    """Return the set of all layers in the ranges."""
    return frozenset(layer for layer_range in ranges for layer in range(layer_range.first, layer_range.stop))


def loaded_layers(own: LayerRange | None, kept: Iterable[LayerRange]) -> frozenset[int]:
    """Return the layers that a worker has loaded: its own stage's, and those that it keeps warm as a standby."""
    return layers_of(kept if own is None else (own, *kept))


def to_ranges(layers: Iterable[int]) -> tuple[LayerRange, ...]:
    """Return these layers as contiguous ranges, in order."""
    ranges: list[LayerRange] = []
    for layer in sorted(layers):
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].first, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return tuple(ranges)


LayerRanges = Annotated[tuple[LayerRange, ...], msgspec.Meta(max_length=64)]


class TensorSpec(Record, frozen=True):
    """Description of the next frame: raw little-endian elements in C order. ``checksum``: the low 63 bits of the bytes'
    xxh3-64, 0 if checksums are off."""

    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**40)], ...], msgspec.Meta(max_length=4)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSOR_BYTES)]
    checksum: Whole


class PayloadSpec(Record, frozen=True):
    """Description of the next frame: raw bytes of an asset."""

    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=ASSET_PART_BYTES)]
    checksum: Whole


class Setting(Record, frozen=True):
    """A setting of a process, as shown to people; passwords are removed. ``value``: as JSON. ``origin``: source of the
    value, for people."""

    name: Name
    value: Text
    origin: Text


class SharedPrefix(Record, frozen=True):
    """First positions of a sequence that it shares with another one."""

    sequence: SequenceId
    source: SequenceId
    position: Position


class SequencePosition(Record, frozen=True):
    sequence: SequenceId
    position: Position


class TokenLogprob(Record, frozen=True):
    token: TokenId
    logprob: float


class Hop(Record, frozen=True):
    """One stage's share of one step.

    ``wait_s``: from arrival to the start of the computation; ``idle_s``: how long the stage was idle before;
    ``wire_bytes``: bytes received; ``held_s``: from arrival to handing on, in total, from which a step's time outside
    of the stages follows.
    """

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
        """Return how long the stage held the step; at least the sum of the reported parts."""
        return max(self.held_s, self.wait_s + self.compute_s + self.sample_s)


class SequenceRange(Record, frozen=True):
    """Positions of a sequence from ``start`` up to, not including, ``stop``."""

    sequence: SequenceId
    start: Position
    stop: Position


class Edge(Record, frozen=True):
    """Destination of a stage's output: the next stage's data endpoint, or the broker's after the last stage."""

    to: Name
    endpoint: Endpoint


class KvTarget(Record, frozen=True):
    """A worker that is to hold copies of keys and values, at the address of its listener for them.

    ``held``: positions that it holds already, where there are any. ``until``: for a migration's last part, the exact
    positions to send, including the unfinished block; empty: every finished block, as it is finished. ``is_urgent``: a
    change of plan waits for the copies, so they are not held back in favour of steps.
    """

    to: Edge
    layers: LayerRange
    held: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    until: Annotated[tuple[SequencePosition, ...], msgspec.Meta(max_length=MAX_SEQUENCES)] = ()
    is_urgent: bool = False


class KvSource(Record, frozen=True):
    """A worker from which copies of keys and values of these layers are accepted. ``key``: its public key, where keys
    are used. ``is_awaited``: the positions that ``ReceiveKv`` awaits are awaited in these layers."""

    incarnation: Name
    layers: LayerRange
    key: PublicKey | None = None
    is_awaited: bool = True

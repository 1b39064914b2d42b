"""States between positions: what a recurrent layer keeps of a sequence instead of keys and values.

A state is a flat float32 tensor, whose parts only the layer knows. It is never written again once it is complete, so
sequences that begin alike share it.

A state can't be rolled back, so states are held at several positions:

* every multiple of the stride: a sequence can be cut there, or another one begin there (``Manifest.state_stride``);
* the begin of the last row, because a step may be repeated: a fence can stop it when some layers have gone on;
* one position before its end, because a draw may be repeated;
* its end.

The next row drops all but those at multiples of the stride, and its own begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.grid import Span
from swarm.wire.messages import STATE_STRIDE


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence, and the layer's state before and after them.

    ``before`` must not be written; it is zero at position 0. ``after`` has undefined numbers, and must be written.
    """

    offset: int  # of the first row, in the batch
    count: int
    before: torch.Tensor
    after: torch.Tensor


class StateStore:
    """States of all sequences of one stage."""

    def __init__(self, device: torch.device, stride: int = STATE_STRIDE) -> None:
        self.is_measuring = False  # sequences begin anywhere, with zeros
        self._device = device
        self._stride = stride
        self._held: dict[int, dict[int, dict[int, torch.Tensor]]] = {}  # by sequence, layer and position

    def segments(self, spans: Sequence[Span], layer: int, numbers: int) -> list[Segment]:
        """Return the segments of these spans in a layer whose state has this many numbers.

        A sequence's segments come in the order of its rows, and each begins with the state that the one before it
        wrote.
        """
        return [segment for span in spans for segment in self._split(span, layer, numbers)]

    def _split(self, span: Span, layer: int, numbers: int) -> Iterator[Segment]:
        held = self._held.setdefault(span.sequence, {}).setdefault(layer, {})
        before = held.get(span.start)
        if before is None and (not span.start or self.is_measuring):
            before = torch.zeros(numbers, device=self._device)
        if before is None:
            raise IllegalMove(f"layer {layer} has no state of sequence {span.sequence} at {span.start}")
        kept = {p: state for p, state in held.items() if p == span.start or (p < span.start and p % self._stride == 0)}
        held.clear()
        held.update(kept)
        start, stop = span.start, span.start + span.count
        grid = range(start // self._stride * self._stride + self._stride, stop, self._stride)
        for end in sorted({*grid, stop} | ({stop - 1} if span.count > 1 else set())):
            after = held[end] = torch.empty(numbers, device=self._device)
            yield Segment(span.offset + start - span.start, end - start, before, after)
            start, before = end, after

    def fork(self, sequence: int, source: int, position: int) -> None:
        """Begin a sequence with another one's states up to ``position``. Raises ``IllegalMove`` if a layer has none
        there."""
        own = self._held.get(source, {})
        for layer, held in own.items():
            if position and position not in held and not self.is_measuring:
                raise IllegalMove(f"layer {layer} has no state of sequence {source} at {position}")
        self._held[sequence] = {
            layer: {p: state for p, state in held.items() if p == position or (p < position and p % self._stride == 0)}
            for layer, held in own.items()
        }

    def truncate(self, sequence: int, position: int) -> None:
        """Drop the states behind ``position``."""
        for held in self._held.get(sequence, {}).values():
            for later in [p for p in held if p > position]:
                del held[later]

    def shrink(self, sequence: int, position: int) -> None:
        """Keep only the states from which another sequence can begin, up to ``position``."""
        for held in self._held.get(sequence, {}).values():
            for other in [p for p in held if p > position or p % self._stride]:
                del held[other]

    def keep_layers(self, layers: Collection[int]) -> None:
        """Drop the states of all other layers."""
        for states in self._held.values():
            for layer in states.keys() - set(layers):
                del states[layer]

    def positions(self, sequence: int, layer: int) -> list[int]:
        """Return the positions at which the layer holds a state of the sequence."""
        return sorted(self._held.get(sequence, {}).get(layer, {}))

    @property
    def num_bytes(self) -> int:
        """Bytes of all states; those that sequences share count once."""
        states = {id(s): s.nbytes for layers in self._held.values() for held in layers.values() for s in held.values()}
        return sum(states.values())

    def release(self, sequence: int) -> None:
        self._held.pop(sequence, None)

    def clear(self) -> None:
        self._held.clear()

"""States between positions: what a recurrent layer keeps of a sequence instead of keys and values.

A state is a flat float32 tensor, whose parts only the layer knows. It is never written again once it is complete, so
sequences that begin alike share it.

A state can't be rolled back, so states are held at several positions:

* every multiple of the stride: a sequence can be cut there, or another one begin there (``Manifest.state_stride``);
* the last multiple of ``BLOCK``: if the sequence ends now, another one can begin there;
* the begin of the last row, because a step may be repeated: a fence can stop it when some layers have gone on;
* one position before its end, because a draw may be repeated;
* its end.

The next row keeps the states at multiples of the stride, at its own start and at the last multiple of ``BLOCK``, and
drops the others.

The store also holds copies of another worker's states, in layers that are not in use (``state_positions``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.grid import Span
from swarm.wire.messages import BLOCK, STATE_STRIDE
from swarm.wire.state_positions import positions_after_part


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
        self._copied: set[tuple[int, int]] = set()  # sequences and layers that hold copies

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
        start, stop = span.start, span.start + span.count
        last = stop // BLOCK * BLOCK
        kept = {p: s for p, s in held.items() if p == start or (p < start and (p % self._stride == 0 or p == last))}
        held.clear()
        held.update(kept)
        grid = range(start // self._stride * self._stride + self._stride, stop, self._stride)
        for end in sorted({*grid, stop} | {position for position in (last, stop - 1) if position > start}):
            after = held[end] = torch.empty(numbers, device=self._device)
            yield Segment(span.offset + start - span.start, end - start, before, after)
            start, before = end, after

    def fork(self, sequence: int, source: int, position: int) -> None:
        """Begin a sequence with another one's states up to ``position``. Raises ``IllegalMove`` if a layer has none
        there."""
        own = {layer: held for layer, held in self._held.get(source, {}).items() if (source, layer) not in self._copied}
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
        """Keep only the states from which another sequence can begin, up to ``position``, and there."""
        for held in self._held.get(sequence, {}).values():
            for other in [p for p in held if p > position or (p % self._stride and p != position)]:
                del held[other]

    # --- copies ------------------------------------------------------------------------------------------------------

    def read(self, sequence: int, layer: int, position: int) -> torch.Tensor:
        """Return the state of a layer at this position, which must not be written. Raises ``IllegalMove`` if there is
        none."""
        state = self._held.get(sequence, {}).get(layer, {}).get(position)
        if state is None:
            raise IllegalMove(f"layer {layer} has no state of sequence {sequence} at {position}")
        return state

    def write(self, sequence: int, layer: int, position: int, state: torch.Tensor, *, is_copy: bool) -> None:
        """Store a state that ``read`` returned, here or on another machine. ``is_copy``: the layer is not in use."""
        held = self._held.setdefault(sequence, {}).setdefault(layer, {})
        held[position] = state
        for other in held.keys() - positions_after_part(held, position, self._stride):
            del held[other]
        if is_copy:
            self._copied.add((sequence, layer))

    def drop_copies(self, sequence: int, layers: Collection[int]) -> None:
        """Drop a sequence's copies in these layers."""
        for layer in [layer for number, layer in self._copied if number == sequence and layer in layers]:
            self._copied.remove((sequence, layer))
            del self._held[sequence][layer]

    @property
    def copied_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(
            state.nbytes for sequence, layer in self._copied for state in self._held[sequence].get(layer, {}).values()
        )

    # --- ends --------------------------------------------------------------------------------------------------------

    def keep_layers(self, layers: Collection[int], kept: Collection[int] = ()) -> None:
        """Drop the states of all other layers, except copies in ``kept`` ones. Copies in ``layers`` are in use from now
        on."""
        self._copied = {(sequence, layer) for sequence, layer in self._copied if layer in kept and layer not in layers}
        for sequence, states in self._held.items():
            for layer in states.keys() - set(layers):
                if (sequence, layer) not in self._copied:
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
        self._copied = {(number, layer) for number, layer in self._copied if number != sequence}

    def clear(self) -> None:
        self._held.clear()
        self._copied.clear()

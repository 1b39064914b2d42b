"""States between positions: what a recurrent layer keeps of a sequence instead of keys and values.

A state is a flat float32 tensor, whose parts only the layer knows. A step reads the state at its first position and
writes another one at its end. The one before stays until the next step begins, because a step may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.grid import Span


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

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by sequence and layer: state by position

    def segments(self, spans: Sequence[Span], layer: int, numbers: int) -> list[Segment]:
        """Return the segments of these spans in a layer whose state has this many numbers.

        A sequence's segments come in the order of its rows, and each begins with the state that the one before it wrote.
        """
        return [self._segment(span, layer, numbers) for span in spans]

    def _segment(self, span: Span, layer: int, numbers: int) -> Segment:
        held = self._held.get((span.sequence, layer), {})
        before = held.get(span.start)
        if before is None and span.start:
            raise IllegalMove(f"layer {layer} has no state of sequence {span.sequence} at {span.start}")
        if before is None:
            before = torch.zeros(numbers, device=self._device)
        after = torch.empty(numbers, device=self._device)
        self._held[span.sequence, layer] = {span.start: before, span.start + span.count: after}
        return Segment(span.offset, span.count, before, after)

    def release(self, sequence: int) -> None:
        for key in [key for key in self._held if key[0] == sequence]:
            del self._held[key]

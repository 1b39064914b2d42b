"""Positions that must be replayed after a loss: of each sequence and each lost layer those that its new holder has no
copies of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swarm.broker.planner.tables import Table


@dataclass(frozen=True, slots=True)
class LostSequence:
    """A sequence of ``length`` positions. ``copies``: by device, the position of its copies in each layer of the
    model. ``shared``: positions that it gets from another sequence, which is replayed."""

    length: int
    copies: Mapping[str, Sequence[int]] = field(default_factory=dict)
    shared: int = 0

    @property
    def own(self) -> int:
        """Positions to replay in a layer of which there is no copy."""
        return self.length - self.shared

    def lacking(self, device: str, layer: int) -> int:
        """Return the number of positions that this device must replay if it takes the layer."""
        held = self.copies.get(device)
        return self.own if held is None else max(0, min(self.own, self.length - held[layer]))


class Chunks(NamedTuple):
    """Chunks in which positions of several sequences are replayed. ``first``: positions until the first sequence is
    complete; ``num_ends``: number of chunks with which a sequence is complete."""

    num: int
    num_ends: int
    first: int


def pack_chunks(lengths: Iterable[int], chunk: int) -> Chunks:
    """Return the chunks for these numbers of positions, as ``recovery.rebuild`` orders them: the shortest first, and
    with the last chunk of a sequence whole rests of others that fit."""
    waiting = sorted(lengths)
    num = num_ends = positions = first = 0
    while waiting:
        num += 1
        left, *waiting = waiting
        if left > chunk:
            waiting.insert(0, left - chunk)
            positions += chunk
            continue
        room, rest = chunk - left, []
        for other in waiting:
            if other <= room:
                room -= other
            else:
                rest.append(other)
        num_ends, positions, waiting = num_ends + 1, positions + chunk - room, rest
        first = first or positions
    return Chunks(num, num_ends, first)


def sum_lacking(sequences: Iterable[LostSequence], device: str, num_layers: int) -> list[int]:
    """Return for each layer the positions of all sequences that the device must replay if it takes the layer."""
    totals = [0] * num_layers
    for sequence in sequences:
        for layer in range(num_layers):
            totals[layer] += sequence.lacking(device, layer)
    return totals


def run_sums(weights: Sequence[float], lacking: Sequence[int]) -> Table:
    """Return the work of replaying the layers from the row's up to, not including, the column's. A layer must compute
    what any layer behind it lacks."""
    num = len(weights)
    sums: Table = np.zeros((num + 1, num + 1))
    factors, positions = np.asarray(weights, np.float64), np.asarray(lacking, np.float64)
    for stop in range(1, num + 1):
        needed = np.maximum.accumulate(positions[:stop][::-1])[::-1]
        sums[:stop, stop] = np.cumsum((factors[:stop] * needed)[::-1])[::-1]
    return sums

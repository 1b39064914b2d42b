"""Copies of other workers' keys and values: which sequences, layers and positions are held, and from which tokens.

A copy lies in the memory of its sequence, beside the keys and values that the stage computes itself, so that taking a
layer over moves nothing. A sequence can also consist of copies only: on a worker without a part in the plan, or before
the stage's own first step of the sequence.

In every layer the copied positions begin at 0 and have no gap. All layers were computed from the same tokens, as far as
each has come. A copied layer is never one of the stage's own.

Where layers keep states, every part ends with one (``state_positions``), and a copy that is cut ends at one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from swarm.stage.actions import Action, DropKv, ReleaseSequence
from swarm.stage.executor import KvData
from swarm.wire.messages import (
    BLOCK,
    HeldSequence,
    LayerRange,
    Open,
    RangePosition,
    num_blocks,
    to_ranges,
)
from swarm.wire.state_positions import last_held, positions_after_part


def describe_sequence(item: Open) -> Open:
    """Return a sequence's record as it travels with a copy: without tokens, and without the sequence that it began as,
    which the receiver need not have."""
    return msgspec.structs.replace(item, tokens=(), source=None, shared=0)


def count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning of two lists of tokens."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):  # a list never equals a tuple
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])


@dataclass(slots=True)
class KvCopy:
    """Copied keys and values of one sequence."""

    open: Open  # without tokens
    tokens: list[int] = field(default_factory=list)  # at the positions of the layer that has come furthest
    positions: dict[int, int] = field(default_factory=dict)  # number of positions by layer; never 0
    states: dict[int, set[int]] = field(default_factory=dict)  # positions of states by layer, if layers keep them
    stride: int = 0  # positions between states that are kept; 0: there are no states

    def min_position(self, layers: LayerRange) -> int:
        return min(self.positions.get(layer, 0) for layer in range(layers.first, layers.stop))

    def extend(self, layers: LayerRange, start: int, tokens: tuple[int, ...]) -> None:
        """Record that these positions of these layers were written.

        Keys and values are written in units of at most ``BLOCK`` positions: a layer that was further within the last
        block has lost what lay behind.
        """
        stop = start + len(tokens)
        self.tokens[start:stop] = tokens
        for layer in range(layers.first, layers.stop):
            held = self.positions.get(layer, 0)
            self.positions[layer] = held if held >= num_blocks(stop) * BLOCK else stop
            if self.stride:
                self.states[layer] = positions_after_part(self.states.get(layer, ()), stop, self.stride)
        del self.tokens[max(self.positions.values()) :]

    def usable(self, layer: int, position: int) -> int:
        """Return the last position, not behind this one, from which the layer can go on; 0 if there is none."""
        if self.stride:
            return last_held(self.states.get(layer, ()), position)
        return min(self.positions.get(layer, 0), position)

    def truncate(self, position: int) -> list[int]:
        """Cut to ``position``, which is not 0. Return the layers that have nothing left."""
        left = {layer: self.usable(layer, position) for layer in self.positions}
        self.positions = {layer: held for layer, held in left.items() if held}
        self.states = {layer: {p for p in self.states.get(layer, ()) if p <= position} for layer in self.positions}
        del self.tokens[max(self.positions.values(), default=0) :]
        return [layer for layer, held in left.items() if not held]

    def remove(self, layer: int) -> int:
        """Remove a layer. Return its positions."""
        self.states.pop(layer, None)
        return self.positions.pop(layer)

    def ranges(self) -> tuple[RangePosition, ...]:
        """Return the positions of the copied layers, in layer order."""
        ranges: list[RangePosition] = []
        for layer, position in sorted(self.positions.items()):
            last = ranges[-1] if ranges else None
            if last is not None and last.layers.stop == layer and last.position == position:
                ranges[-1] = RangePosition(LayerRange(last.layers.first, layer + 1), position)
            else:
                ranges.append(RangePosition(LayerRange(layer, layer + 1), position))
        return tuple(ranges)


@dataclass(slots=True)
class KvCopies:
    """All copies held here. Appends changes of the executor's memory to ``actions``.

    ``stored``: the sequences that the stage has opened itself. Their memory outlives their copies.
    """

    actions: list[Action]
    stored: Container[int]
    stride: int = 0  # positions between states that are kept; 0: layers keep none
    sequences: dict[int, KvCopy] = field(default_factory=dict)
    layer_bytes: dict[int, float] = field(default_factory=dict)  # memory of a position, by layer, as received
    state_bytes: tuple[int, ...] = ()  # memory of a state, by layer; empty if states take none

    def inventory(self) -> tuple[HeldSequence, ...]:
        """Return what is held, for the broker."""
        return tuple(HeldSequence(sequence, copy.ranges()) for sequence, copy in self.sequences.items())

    @property
    def num_bytes(self) -> int:
        """Memory of all copies."""
        return sum(map(self.bytes_of, self.sequences.values()))

    def bytes_of(self, copy: KvCopy) -> int:
        num_bytes = sum(self.layer_bytes.get(layer, 0.0) * held for layer, held in copy.positions.items())
        if self.state_bytes:
            num_bytes += sum(self.state_bytes[layer] * len(held) for layer, held in copy.states.items())
        return round(num_bytes)

    def record(self, sequence: int, item: Open, tokens: tuple[int, ...], data: KvData) -> None:
        """Record a part that is being stored."""
        num_bytes = data.numbers.nbytes - sum(self.state_bytes[data.layers.first : data.layers.stop])
        per_position = num_bytes / (len(tokens) * len(data.layers))
        self.layer_bytes.update(dict.fromkeys(range(data.layers.first, data.layers.stop), per_position))
        copy = self.sequences.setdefault(sequence, KvCopy(describe_sequence(item), stride=self.stride))
        copy.extend(data.layers, data.start, tokens)

    def truncate(self, sequence: int, position: int) -> None:
        """Cut a sequence's copies. Its memory is cut by the caller."""
        copy = self.sequences.get(sequence)
        if copy is None:
            return
        if not any(copy.usable(layer, position) for layer in copy.positions):
            self.drop(sequence)
        elif lost := copy.truncate(position):
            self._free(sequence, lost)

    def forget(self, sequence: int) -> bool:
        """Remove the record of copies whose memory is being freed. Return whether there was one."""
        return self.sequences.pop(sequence, None) is not None

    def take_over(self, sequence: int, layers: LayerRange, position: int) -> dict[int, int]:
        """Remove these layers from a sequence's copies, since they become the stage's own. Return from where each of
        them can go on, at ``position`` or before it."""
        copy = self.sequences.get(sequence)
        if copy is None:
            return {}
        own = [layer for layer in copy.positions if layers.first <= layer < layers.stop]
        taken = {layer: copy.usable(layer, position) for layer in own}
        for layer in own:
            copy.remove(layer)
        if copy.positions:
            del copy.tokens[max(copy.positions.values()) :]
        else:
            del self.sequences[sequence]
        return taken

    # --- dropping ----------------------------------------------------------------------------------------------------

    def drop(self, sequence: int) -> None:
        """Drop a sequence's copies, and its memory if nothing else is in it."""
        copy = self.sequences.pop(sequence, None)
        if copy is not None:
            self._free(sequence, copy.positions)

    def drop_others(self, layers: Container[int]) -> bool:
        """Drop the copies of all layers but these. Return whether there were any."""
        has_dropped = False
        for sequence, copy in list(self.sequences.items()):
            dropped = [layer for layer in copy.positions if layer not in layers]
            if len(dropped) == len(copy.positions):
                self.drop(sequence)
            elif dropped:
                self._free(sequence, dropped)
                for layer in dropped:
                    copy.remove(layer)
                del copy.tokens[max(copy.positions.values()) :]
            has_dropped = has_dropped or bool(dropped)
        return has_dropped

    def drop_unopened(self) -> None:
        """Drop the sequences that consist of copies only."""
        for sequence in [sequence for sequence in self.sequences if sequence not in self.stored]:
            self.drop(sequence)

    def clear(self) -> None:
        for sequence in list(self.sequences):
            self.drop(sequence)

    def free_memory(self, num_bytes: int) -> int:
        """Drop copies until this much memory is free, the longest sequence first. Return the memory that they took."""
        freed = 0
        while freed < num_bytes and self.sequences:
            longest = max(self.sequences, key=lambda sequence: len(self.sequences[sequence].tokens))
            freed += self.bytes_of(self.sequences[longest])
            self.drop(longest)
        return freed

    def _free(self, sequence: int, layers: Iterable[int]) -> None:
        if sequence in self.stored or sequence in self.sequences:
            self.actions.extend(DropKv(sequence, dropped) for dropped in to_ranges(layers))
        else:
            self.actions.append(ReleaseSequence(sequence))

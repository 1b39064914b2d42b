"""Sequences that hold KV blocks in the stages, sorted by the work that each needs next.

``due`` holds sequences whose next token can be computed now, the longest unserved first. ``prefilling`` holds sequences
with known tokens that are not dispatched yet, in the order in which they will be. All others have a step in flight.
Code that changes a running sequence's positions calls ``refresh``; a step therefore only visits the sequences that it
carries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm.broker.state.queue import NO_DEADLINE

if TYPE_CHECKING:
    from swarm.broker.state.sequences import Sequence

_Key = tuple[int, float, int]


class RunningSequences:
    """Running sequences (see the module). Iteration is in the order of admission."""

    def __init__(self) -> None:
        self.blocks = 0  # KV blocks that they hold
        self.num_pending = 0  # tokens of ``prefilling`` sequences that are not dispatched yet
        self.prompts_are_next = False  # whether prompts go next if a step cannot hold both prompts and decodes
        self.due: dict[int, Sequence] = {}  # sequences that wait for their next token, by id
        self._all: dict[int, Sequence] = {}
        self._keys: list[_Key] = []  # sort keys of ``prefilling``: class, deadline, arrival
        self._prefilling: dict[int, tuple[_Key, int]] = {}  # sort key, and tokens counted in ``num_pending``
        self._classes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._all

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences with prompt tokens to dispatch, by class, deadline and arrival."""
        return [self._all[key[2]] for key in self._keys]

    @property
    def num_prefilling(self) -> int:
        return len(self._keys)

    @property
    def lowest_class(self) -> int | None:
        """The lowest class of a running sequence."""
        return min(self._classes, default=None)

    def add(self, sequence: Sequence, blocks: int) -> None:
        self._all[sequence.id] = sequence
        self._classes[sequence.priority] += 1
        self.resize(sequence, blocks)
        self.refresh(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._all[sequence.id]
        self._classes[sequence.priority] -= 1
        if not self._classes[sequence.priority]:
            del self._classes[sequence.priority]
        self.resize(sequence, 0)
        self.due.pop(sequence.id, None)
        self._remove_from_prefill(sequence)

    def clear(self) -> None:
        """Remove all sequences; the caller decides what happens to them."""
        for sequence in list(self):
            self.remove(sequence)

    def resize(self, sequence: Sequence, blocks: int) -> None:
        """Set the number of KV blocks of a sequence."""
        self.blocks += blocks - sequence.blocks
        sequence.blocks = blocks

    def refresh(self, sequence: Sequence) -> None:
        """Move a sequence to the list that its changed positions require."""
        pending = sequence.pending
        if pending == 0 or sequence.is_decoding:
            self._remove_from_prefill(sequence)
            if pending == 0:
                self.due.pop(sequence.id, None)
            else:
                self.due.setdefault(sequence.id, sequence)
            return
        self.due.pop(sequence.id, None)
        entry = self._prefilling.get(sequence.id)
        key = entry[0] if entry is not None else self._key(sequence)
        if entry is None:
            insort(self._keys, key)
        self.num_pending += pending - (entry[1] if entry is not None else 0)
        self._prefilling[sequence.id] = (key, pending)

    def check(self) -> str | None:
        """Return the list that does not match the sequences' positions, if any. The lists are not maintained between
        two plans."""
        pending = {s.id: s.pending for s in self if s.pending}
        prefilling = {id_: count for id_, count in pending.items() if not self._all[id_].is_decoding}
        if self.due.keys() != pending.keys() - prefilling.keys():
            return f"due are {sorted(self.due)}, and should be {sorted(pending.keys() - prefilling.keys())}"
        if {id_: count for id_, (_, count) in self._prefilling.items()} != prefilling:
            return f"prompts to be dispatched are {self._prefilling}, and should be {prefilling}"
        if len(self._keys) != len(prefilling) or self.num_pending != sum(prefilling.values()):
            return f"{self.num_pending} tokens are pending, and should be {sum(prefilling.values())}"
        return None

    def _key(self, sequence: Sequence) -> _Key:
        deadline = sequence.request.deadline_at
        return (-sequence.priority, NO_DEADLINE if deadline is None else deadline, sequence.id)

    def _remove_from_prefill(self, sequence: Sequence) -> None:
        entry = self._prefilling.pop(sequence.id, None)
        if entry is not None:
            self.num_pending -= entry[1]
            del self._keys[bisect_left(self._keys, entry[0])]

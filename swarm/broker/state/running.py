"""The sequences that hold room in the stages, sorted by what each needs next.

``due`` are those whose next token can be computed now, the longest unserved first; ``prefilling`` those of whose known
tokens some are yet to be dispatched, in the order in which they get them. All others have a step under way. Whoever
changes a running sequence's positions calls ``refresh``: then a step looks only at those that it carries.
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


class Running:
    """See the module's text. Iteration is in the order of joining."""

    def __init__(self) -> None:
        self.blocks = 0  # room that they hold
        self.num_pending = 0  # tokens that ``prefilling`` are yet to be given
        self.prompts_are_next = False  # whose turn it was last, where a step has no room for both
        self.due: dict[int, Sequence] = {}
        self._all: dict[int, Sequence] = {}
        self._keys: list[_Key] = []
        self._prefilling: dict[int, tuple[_Key, int]] = {}  # with the tokens counted in ``num_pending``
        self._classes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._all

    @property
    def prefilling(self) -> list[Sequence]:
        """By class, deadline and arrival."""
        return [self._all[key[2]] for key in self._keys]

    @property
    def num_prefilling(self) -> int:
        return len(self._keys)

    @property
    def lowest(self) -> int | None:
        """The lowest class of which one runs."""
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
        self._leave_prefill(sequence)

    def clear(self) -> None:
        """Empty the list; the caller tells who ran what becomes of it."""
        for sequence in list(self):
            self.remove(sequence)

    def resize(self, sequence: Sequence, blocks: int) -> None:
        """Note how many blocks it holds from now on."""
        self.blocks += blocks - sequence.blocks
        sequence.blocks = blocks

    def refresh(self, sequence: Sequence) -> None:
        """Sort a sequence anew whose positions have changed."""
        pending = sequence.pending
        if pending == 0 or sequence.is_decoding:
            self._leave_prefill(sequence)
            if pending == 0:
                self.due.pop(sequence.id, None)
            else:
                self.due.setdefault(sequence.id, sequence)
            return
        self.due.pop(sequence.id, None)
        known = self._prefilling.get(sequence.id)
        key = known[0] if known is not None else self._key(sequence)
        if known is None:
            insort(self._keys, key)
        self.num_pending += pending - (known[1] if known is not None else 0)
        self._prefilling[sequence.id] = (key, pending)

    def check(self) -> str | None:
        """Return which list is not as the sequences' positions say, if any. Between two plans nobody keeps them."""
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

    def _leave_prefill(self, sequence: Sequence) -> None:
        known = self._prefilling.pop(sequence.id, None)
        if known is not None:
            self.num_pending -= known[1]
            del self._keys[bisect_left(self._keys, known[0])]

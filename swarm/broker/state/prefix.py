"""The prefix cache: which sequences hold the keys and values of which beginnings.

The unit is a full block of 32 positions; its key is a hash of all tokens up to its end, so equal keys mean equal
content at equal positions. A sequence that is admitted looks for the longest beginning that a stage-resident sequence
holds already, running or *retired* (ended, but kept for this), and starts from a copy of it: every stage copies the
blocks within itself when the sequence's first step comes by, and shares the log of their inputs.

Retired sequences count as used room and go first when room is needed, the longest unused first, or those whose
beginning the fewest have begun from (``PrefixRules.policy``). One that somebody is
about to copy from is pinned until the copying step is in the pipe: the pipe keeps order, so a release that follows
can't overtake it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from swarm.wire.messages import BLOCK


@dataclass(frozen=True, slots=True)
class Retired:
    """An ended sequence whose first blocks the stages still hold."""

    sequence: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """What is kept: nothing, if not ``is_kept``; else at most this ``share`` of all room. ``policy``: whose beginning
    is kept longest, the one used last (recent) or the one used most (frequent)."""

    is_kept: bool = True
    share: float = 1.0
    policy: Literal["recent", "frequent"] = "recent"


class PrefixIndex:
    """Tokens in, holders out. Knows nothing of rooms and steps."""

    def __init__(self) -> None:
        self._holders: dict[bytes, OrderedDict[int, None]] = {}  # block -> sequences that hold it
        self._keys: dict[int, list[bytes]] = {}  # sequence -> its full blocks, in order
        self._uses: dict[bytes, int] = {}  # first block -> how many sequences have begun from a holder of it

    def note(self, sequence: int, tokens: Sequence[int], position: int) -> None:
        """Every stage holds this sequence's keys and values up to ``position``."""
        keys = self._keys.setdefault(sequence, [])
        for key in _block_keys(tokens, len(keys), position // BLOCK, keys[-1] if keys else b""):
            keys.append(key)
            self._holders.setdefault(key, OrderedDict())[sequence] = None

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(sequence, position): who holds the longest beginning, and how long it is. The last token is never part of
        it: somebody must compute what comes after it."""
        found: tuple[int, int] | None = None
        key = b""
        for index in range((len(tokens) - 1) // BLOCK):
            key = _block_key(key, tokens[index * BLOCK : (index + 1) * BLOCK])
            holders = self._holders.get(key)
            if not holders:
                break
            found = (next(reversed(holders)), (index + 1) * BLOCK)
        return found

    def num_blocks(self, sequence: int) -> int:
        return len(self._keys.get(sequence, ()))

    def is_redundant(self, sequence: int) -> bool:
        """Does somebody else hold all that this one holds?"""
        keys = self._keys.get(sequence)
        return not keys or len(self._holders[keys[-1]]) > 1

    def use(self, sequence: int) -> None:
        """Somebody begins from this one."""
        first = self._keys[sequence][0]
        self._uses[first] = self._uses.get(first, 0) + 1

    def uses(self, sequence: int) -> int:
        """How many have begun from it, or from another that begins alike."""
        return self._uses.get(self._keys[sequence][0], 0)

    def forget(self, sequence: int) -> None:
        for key in self._keys.pop(sequence, ()):
            holders = self._holders[key]
            del holders[sequence]
            if not holders:
                del self._holders[key]
                self._uses.pop(key, None)

    def clear(self) -> None:
        self._holders.clear()
        self._keys.clear()
        self._uses.clear()


class PrefixCache:
    """The index and the retired sequences."""

    def __init__(self, rules: PrefixRules) -> None:
        self.rules = rules
        self.index = PrefixIndex()
        self.retired: OrderedDict[int, Retired] = OrderedDict()  # the longest unused first
        self.num_blocks = 0  # room that retired sequences take
        self._pins: dict[int, int] = {}

    @property
    def evictable_blocks(self) -> int:
        """Room that retired sequences would give back."""
        return self.num_blocks - sum(self.retired[s].num_blocks for s in self._pins if s in self.retired)

    @property
    def num_evictable(self) -> int:
        return len(self.retired) - sum(s in self.retired for s in self._pins)

    def acknowledge(self, sequence: int, tokens: Sequence[int], position: int) -> None:
        if self.rules.is_kept:
            self.index.note(sequence, tokens, position)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The longest beginning that is held; its holder counts as used just now."""
        found = self.index.find(tokens) if self.rules.is_kept else None
        if found is not None and found[0] in self.retired:
            self.retired.move_to_end(found[0])
        return found

    def pin(self, sequence: int) -> None:
        self._pins[sequence] = self._pins.get(sequence, 0) + 1

    def unpin(self, sequence: int) -> None:
        self._pins[sequence] -= 1
        if not self._pins[sequence]:
            del self._pins[sequence]

    def is_pinned(self, sequence: int) -> bool:
        return sequence in self._pins

    def retire(self, sequence: int, all_blocks: int) -> Retired | None:
        """Keep an ended sequence's full blocks; None if that is of no use or more than may be kept of all room, and its
        room shall be given back."""
        num_blocks = self.index.num_blocks(sequence)
        is_of_use = num_blocks and (self.is_pinned(sequence) or not self.index.is_redundant(sequence))
        if not self.rules.is_kept or not is_of_use or num_blocks > self._most(all_blocks):
            self.index.forget(sequence)
            return None
        self.retired[sequence] = Retired(sequence, num_blocks)
        self.num_blocks += num_blocks
        return self.retired[sequence]

    def blocks_beyond(self, all_blocks: int) -> int:
        """Count what is kept beyond its share of all room."""
        return max(0, self.num_blocks - self._most(all_blocks))

    def _most(self, all_blocks: int) -> int:
        return int(all_blocks * self.rules.share)

    def evict(self, blocks: int, places: int) -> Iterator[int]:
        """Let retired sequences go, until so many blocks and places are free; yields who."""
        is_recent = self.rules.policy == "recent"
        for sequence in list(self.retired) if is_recent else sorted(self.retired, key=self.index.uses):
            if blocks <= 0 and places <= 0:
                return
            if self.is_pinned(sequence):
                continue
            freed = self.retired.pop(sequence).num_blocks
            self.num_blocks -= freed
            blocks -= freed
            places -= 1
            self.index.forget(sequence)
            yield sequence

    def clear(self) -> None:
        """A new epoch: the stages keep only what runs."""
        self.index.clear()
        self.retired.clear()
        self.num_blocks = 0
        self._pins.clear()


def _block_keys(tokens: Sequence[int], first: int, stop: int, before: bytes) -> Iterator[bytes]:
    key = before
    for index in range(first, stop):
        key = _block_key(key, tokens[index * BLOCK : (index + 1) * BLOCK])
        yield key


def _block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    return xxhash.xxh3_128_digest(before + b"".join(token.to_bytes(4, "little") for token in tokens))

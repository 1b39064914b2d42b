"""Prefix cache: index of the sequences whose keys and values a new sequence can copy instead of computing them.

The unit is a full block of 32 positions. A block's key is a hash of the adapter's name, and of all tokens and images up
to its end, so equal keys mean equal content at equal positions. A sequence that is admitted starts from a copy of the
longest prefix that a sequence in the stages already holds; that sequence may be running or *retired* (ended, but kept
for this purpose). Every stage copies the blocks within itself when it receives the sequence's first step, and shares
the log of their inputs. Where every stage can, sequences share the memory of whole chunks instead, which then count
once (``wire.shared_positions``).

Retired sequences occupy KV blocks and are evicted first when blocks are needed: the longest unused first, or the least
used prefix first (``PrefixRules.policy``). A sequence that is about to be copied is pinned until the copying step has
been sent. The pipeline keeps order, so a later release cannot overtake that step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from swarm.params import ImageSpan, image_content
from swarm.wire.messages import BLOCK
from swarm.wire.shared_positions import Departures, SharedPositions


@dataclass(frozen=True, slots=True)
class RetiredSequence:
    """An ended sequence whose first blocks the stages still hold."""

    sequence: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """Limits of the prefix cache."""

    is_enabled: bool = True  # False: the cache is disabled
    share: float = 1.0  # maximum fraction of all KV blocks
    max_tokens: int = 0  # tokens that a sequence takes over at most; 0: no limit
    # which prefixes are kept longest: the most recently or the most frequently used
    policy: Literal["recent", "frequent"] = "recent"


class PrefixIndex:
    """Index from tokens to the sequences that hold them. It is independent of KV capacity and steps."""

    def __init__(self) -> None:
        self._holders: dict[bytes, OrderedDict[int, None]] = {}  # block key -> sequences that hold it
        self._keys: dict[int, list[bytes]] = {}  # sequence -> keys of its full blocks, in order
        # key of the first block -> number of sequences that started from a holder of it
        self._uses: dict[bytes, int] = {}

    def record(
        self,
        sequence: int,
        tokens: Sequence[int],
        position: int,
        adapter: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Record that every stage holds this sequence's keys and values up to ``position``."""
        keys = self._keys.setdefault(sequence, [])
        for index in range(len(keys), position // BLOCK):
            key = _block_key(keys[-1] if keys else adapter.encode(), tokens, index, images)
            keys.append(key)
            self._holders.setdefault(key, OrderedDict())[sequence] = None

    def shorten(self, sequence: int, position: int) -> None:
        """Remove the blocks that end behind ``position``."""
        keys = self._keys.get(sequence, [])
        for key in keys[position // BLOCK :]:
            self._remove(key, sequence)
        del keys[position // BLOCK :]

    def find(
        self,
        tokens: Sequence[int],
        adapter: str = "",
        images: Sequence[ImageSpan] = (),
        *,
        stride: int = 0,
        ended: Collection[int] = (),
    ) -> tuple[int, int] | None:
        """Return (sequence, position) of the longest prefix that is held. It never includes the last token, which must
        be computed to get its successor.

        ``stride``: positions between states that layers keep; then a prefix ends there, or where one of the ``ended``
        sequences does. 0: they keep none.
        """
        longest: tuple[int, int] | None = None
        key = adapter.encode()
        for index in range((len(tokens) - 1) // BLOCK):
            key = _block_key(key, tokens, index, images)
            holders = self._holders.get(key)
            if not holders:
                break
            position = (index + 1) * BLOCK
            if not stride or position % stride == 0:
                longest = (next(reversed(holders)), position)
                continue
            ends = [holder for holder in holders if holder in ended and self.num_blocks(holder) == index + 1]
            longest = (ends[-1], position) if ends else longest
        return longest

    def num_blocks(self, sequence: int) -> int:
        return len(self._keys.get(sequence, ()))

    def is_redundant(self, sequence: int, among: Collection[int] | None = None) -> bool:
        """Whether another sequence holds all blocks of this one. ``among``: whether one of these ends where it does."""
        keys = self._keys.get(sequence)
        if not keys:
            return True
        if among is None:
            return len(self._holders[keys[-1]]) > 1
        others = self._holders[keys[-1]].keys() - {sequence}
        return any(other in among and self.num_blocks(other) == len(keys) for other in others)

    def count_use(self, sequence: int) -> None:
        """Count a sequence that starts from this one."""
        first = self._keys[sequence][0]
        self._uses[first] = self._uses.get(first, 0) + 1

    def num_uses(self, sequence: int) -> int:
        """Return how many sequences have started from it, or from another one with the same first block."""
        return self._uses.get(self._keys[sequence][0], 0)

    def forget(self, sequence: int) -> None:
        for key in self._keys.pop(sequence, ()):
            self._remove(key, sequence)

    def _remove(self, key: bytes, sequence: int) -> None:
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
    """Prefix cache: the index of prefixes, and the retired sequences, which have ended but keep their KV blocks."""

    def __init__(self, rules: PrefixRules) -> None:
        self.rules = rules
        self.index = PrefixIndex()
        self.retired: OrderedDict[int, RetiredSequence] = OrderedDict()  # longest unused first
        self.num_blocks = 0  # KV blocks held by retired sequences
        self._pins: dict[int, int] = {}  # sequence -> number of sequences that are about to copy from it

    def evictable_blocks(self, departures: Departures) -> int:
        """Return the number of KV blocks that eviction of all unpinned retired sequences would free, in addition to the
        ``departures`` so far, to which they are added."""
        pinned = [self.retired[sequence] for sequence in self._pins if sequence in self.retired]
        num_kept = departures.add_retired(retired.sequence for retired in pinned)
        return self.num_blocks - sum(retired.num_blocks for retired in pinned) - num_kept // BLOCK

    @property
    def num_evictable(self) -> int:
        return len(self.retired) - sum(s in self.retired for s in self._pins)

    def acknowledge(
        self,
        sequence: int,
        tokens: Sequence[int],
        position: int,
        adapter: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> None:
        if self.rules.is_enabled:
            self.index.record(sequence, tokens, position, adapter, images)

    def find(
        self, tokens: Sequence[int], adapter: str = "", images: Sequence[ImageSpan] = (), *, stride: int = 0
    ) -> tuple[int, int] | None:
        """Return the longest prefix that is held, and mark its holder as used now. ``stride``: positions between states
        that layers keep; 0: they keep none."""
        if self.rules.max_tokens:
            tokens = tokens[: self.rules.max_tokens + 1]
        prefix = None
        if self.rules.is_enabled:
            prefix = self.index.find(tokens, adapter, images, stride=stride, ended=self.retired)
        if prefix is not None and prefix[0] in self.retired:
            self.retired.move_to_end(prefix[0])
        return prefix

    def pin(self, sequence: int) -> None:
        self._pins[sequence] = self._pins.get(sequence, 0) + 1

    def unpin(self, sequence: int) -> None:
        self._pins[sequence] -= 1
        if not self._pins[sequence]:
            del self._pins[sequence]

    def is_pinned(self, sequence: int) -> bool:
        return sequence in self._pins

    def retire(self, sequence: int, all_blocks: int, *, has_states: bool = False) -> RetiredSequence | None:
        """Keep the full blocks of an ended sequence. Return None if they are redundant or exceed the cache's limit, and
        no other sequence is about to copy them; then the caller must free them. ``has_states``: others can begin at its
        end, and not there in a longer one."""
        num_blocks = self.index.num_blocks(sequence)
        is_redundant = self.index.is_redundant(sequence, self.retired if has_states else None)
        is_useful = not is_redundant and num_blocks <= self._max_blocks(all_blocks)
        if not self.rules.is_enabled or not num_blocks or not (is_useful or self.is_pinned(sequence)):
            self.index.forget(sequence)
            return None
        self.retired[sequence] = RetiredSequence(sequence, num_blocks)
        self.num_blocks += num_blocks
        return self.retired[sequence]

    def excess_blocks(self, all_blocks: int, shared: SharedPositions) -> int:
        """Return the number of blocks that exceed the cache's share. Blocks that running sequences share do not
        count."""
        return max(0, self.exclusive_blocks(shared) - self._max_blocks(all_blocks))

    def exclusive_blocks(self, shared: SharedPositions) -> int:
        """Return the number of blocks that only retired sequences hold."""
        return self.num_blocks - shared.retired_kept // BLOCK

    def _max_blocks(self, all_blocks: int) -> int:
        return int(all_blocks * self.rules.share)

    def evict(self, blocks: int, slots: int, shared: SharedPositions) -> Iterator[int]:
        """Evict retired sequences until ``blocks`` KV blocks and ``slots`` slots have been freed. Yield the evicted
        ids. Blocks that other sequences share are not freed."""
        is_recent = self.rules.policy == "recent"
        for sequence in list(self.retired) if is_recent else sorted(self.retired, key=self.index.num_uses):
            if blocks <= 0 and slots <= 0:
                return
            if self.is_pinned(sequence):
                continue
            num_blocks = self.retired.pop(sequence).num_blocks
            self.num_blocks -= num_blocks
            blocks -= num_blocks - shared.release(sequence) // BLOCK
            slots -= 1
            self.index.forget(sequence)
            yield sequence

    def clear(self) -> None:
        """Drop everything at a new epoch: the stages keep only running sequences."""
        self.index.clear()
        self.retired.clear()
        self.num_blocks = 0
        self._pins.clear()


def _block_key(before: bytes, tokens: Sequence[int], index: int, images: Sequence[ImageSpan]) -> bytes:
    """Return the key of the block with this number. ``before``: the key of the block in front of it."""
    start, stop = index * BLOCK, (index + 1) * BLOCK
    content = b"".join(token.to_bytes(4, "little") for token in tokens[start:stop])
    return xxhash.xxh3_128_digest(before + content + image_content(images, start, stop))

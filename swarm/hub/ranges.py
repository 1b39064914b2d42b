"""Sets of bytes of a file, as sorted ranges: which are wanted, present, and still to fetch. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

# A gap of at most this size between two fetched ranges is fetched, too: padding between tensors, and small tensors
# for which a request of their own would take longer.
MAX_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Ranges:
    """Set of positions in a file. ``pairs`` are (first, stop): sorted, not empty, neither overlapping nor touching."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Self:
        """Return the union of any ranges. Raises ValueError for a range with a negative bound."""
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if first < 0:
                raise ValueError(f"a range starts at {first}")
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((first, stop))
        return cls(tuple(merged))

    @property
    def num_bytes(self) -> int:
        return sum(stop - first for first, stop in self.pairs)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.of((*self.pairs, *other.pairs))

    def __and__(self, other: Ranges) -> Ranges:
        return self - (self - other)

    def __sub__(self, other: Ranges) -> Ranges:
        remaining: list[tuple[int, int]] = []
        for first, stop in self.pairs:
            for other_first, other_stop in other.pairs:
                if other_stop <= first:
                    continue
                if other_first >= stop:
                    break
                remaining.append((first, other_first))
                first = other_stop  # noqa: PLW2901 (the rest of this range)
            remaining.append((first, stop))
        return Ranges.of(remaining)

    def first_bytes(self, num_bytes: int) -> Ranges:
        """Return the part of the first range with at most this many bytes."""
        return Ranges.of((first, min(stop, first + num_bytes)) for first, stop in self.pairs[:1])


def plan_fetch(wanted: Ranges, present: Ranges, file_bytes: int) -> Ranges:
    """Return the ranges to fetch so that ``wanted`` is present, with the small gaps beside them."""
    missing = (wanted & Ranges.of([(0, file_bytes)])) - present
    gaps = Ranges.of([(0, file_bytes)]) - present - missing
    edges = {edge for pair in missing.pairs for edge in pair}
    small = [pair for pair in gaps.pairs if pair[1] - pair[0] <= MAX_GAP_BYTES and edges & {*pair}]
    return missing | Ranges.of(small)

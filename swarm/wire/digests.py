"""Digests of a sequence's tokens: what keys and values were computed from, told without the tokens.

A worker tells them of all the tokens behind what it holds, and of beginnings of them: one token fewer, then three,
seven, fifteen… So a broker that knows fewer tokens (its machine lost power before the last ones were on the disk) finds
a beginning that it knows, and what it can't compare is less than what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

_LOW_63_BITS = 2**63 - 1


def digests_of(tokens: Sequence[int], position: int) -> tuple[int, ...]:
    """Digest beginnings of the first ``position`` tokens, the longest last."""
    return _digests(tokens, _lengths(position))


def num_matching(tokens: Sequence[int], position: int, digests: tuple[int, ...]) -> int:
    """How many of these tokens are surely among the first ``position`` ones that the digests were made of."""
    lengths = _lengths(position)
    if len(lengths) != len(digests):
        return 0
    known = [length for length in lengths if length <= len(tokens)]
    matching = 0
    for length, own, told in zip(known, _digests(tokens, known), digests, strict=False):
        if own == told:
            matching = length
    return matching


def _lengths(position: int) -> list[int]:
    found: list[int] = []
    fewer = 0
    while position > fewer:
        found.append(position - fewer)
        fewer = 2 * fewer + 1
    return found[::-1]


def _digests(tokens: Sequence[int], lengths: list[int]) -> tuple[int, ...]:
    data = np.asarray(tokens[: lengths[-1]] if lengths else (), dtype="<i8").data.cast("B")
    state, done, found = xxhash.xxh3_64(), 0, []
    for length in lengths:
        state.update(data[8 * done : 8 * length])
        done = length
        found.append(state.intdigest() & _LOW_63_BITS)
    return tuple(found)

"""Digests of a sequence's tokens, its images and its adapter's name: they identify what keys and values were computed
from, without sending it.

A worker reports digests of all tokens behind its keys and values, and of prefixes of them: shorter by 1, 3, 7, 15 …
tokens. A broker that has fewer tokens than the worker (its machine lost power before the last ones reached the disk)
can therefore still compare a prefix, and loses fewer verified positions than it lost tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from swarm.params import ImageSpan, image_content

_LOW_63_BITS = 2**63 - 1


def prefix_digests(
    tokens: Sequence[int], position: int, adapter: str = "", images: Sequence[ImageSpan] = ()
) -> tuple[int, ...]:
    """Return digests of prefixes of the first ``position`` tokens, the longest last."""
    return _digests(tokens, _prefix_lengths(position), adapter, images)


def num_matching(
    tokens: Sequence[int],
    position: int,
    digests: tuple[int, ...],
    adapter: str = "",
    images: Sequence[ImageSpan] = (),
) -> int:
    """Return the length of the longest reported prefix that these tokens match. ``digests``: those of the prefixes of
    ``position`` tokens."""
    lengths = _prefix_lengths(position)
    if len(lengths) != len(digests):
        return 0
    known = [length for length in lengths if length <= len(tokens)]
    matching = 0
    for length, own, reported in zip(known, _digests(tokens, known, adapter, images), digests, strict=False):
        if own == reported:
            matching = length
    return matching


def _prefix_lengths(position: int) -> list[int]:
    """Return the lengths of the digested prefixes, ascending."""
    lengths: list[int] = []
    fewer = 0
    while position > fewer:
        lengths.append(position - fewer)
        fewer = 2 * fewer + 1
    return lengths[::-1]


def _digests(tokens: Sequence[int], lengths: list[int], adapter: str, images: Sequence[ImageSpan]) -> tuple[int, ...]:
    data = np.asarray(tokens[: lengths[-1]] if lengths else (), dtype="<i8").data.cast("B")
    state, done, digests = xxhash.xxh3_64(adapter.encode()), 0, []
    for length in lengths:
        state.update(data[8 * done : 8 * length])
        state.update(image_content(images, done, length))
        done = length
        digests.append(state.intdigest() & _LOW_63_BITS)
    return tuple(digests)

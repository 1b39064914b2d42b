"""How values look in the journal: msgpack behind a checksum, since SQLite's own pages carry none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import xxhash

from swarm.wire.messages import Hop, TokenLogprob

T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens of a sequence, one after the other, with what was asked for beside them."""

    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_DIGEST = 8  # bytes of xxh3-64 before each value


class Damaged(Exception):
    """A value is not what was written."""


def sealed(value: object) -> bytes:
    data = _encode(value)
    return xxhash.xxh3_64_digest(data) + data


def unsealed(data: object, kind: type[T]) -> T:
    """The value again. Raises Damaged."""
    if not isinstance(data, bytes) or xxhash.xxh3_64_digest(data[_DIGEST:]) != data[:_DIGEST]:
        raise Damaged("a value's checksum differs")
    try:
        return msgspec.msgpack.decode(data[_DIGEST:], type=kind)
    except msgspec.DecodeError as error:
        raise Damaged(str(error)) from None


def joined(parts: Iterable[tuple[int, Part]], num: int | None = None) -> Part:
    """One after the other up to the first gap (after a power cut the last ones may be missing), at most ``num``. What
    is there twice is the same twice."""
    ids: list[int] = []
    logprobs: list[tuple[TokenLogprob, ...]] = []
    hops: list[tuple[Hop, ...]] = []
    for first, part in parts:
        known = len(ids) - first
        if known < 0:
            break
        ids += part.ids[known:]
        logprobs += part.logprobs[known:]
        hops += part.hops[known:]
    return Part(tuple(ids[:num]), tuple(logprobs[:num]), tuple(hops[:num]))

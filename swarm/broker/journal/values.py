"""Values as they stand in the journal: msgpack behind a checksum, since SQLite's own pages carry none."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from operator import ne
from typing import Any, TypeVar, cast

import msgspec
import xxhash

from swarm.wire.messages import Hop, TokenLogprob

T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens of a sequence, one after the other, with what was asked for beside them. ``place``: of which sequence
    and the index of the first, for a row whose own columns say so too, without a checksum; None: it is not told.
    ``num_cached`` counts tokens of the prompt and stands in the part with the first token. It comes last: journals of
    earlier versions end before it."""

    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()
    place: tuple[int, int] | None = None
    num_cached: int = 0


class RawPart(msgspec.Struct, frozen=True, array_like=True):
    """A part for whoever only passes it on: what stands beside the tokens is not looked at."""

    ids: tuple[int, ...]
    logprobs: tuple[msgspec.Raw, ...] = ()
    hops: tuple[msgspec.Raw, ...] = ()
    place: tuple[int, int] | None = None
    num_cached: int = 0


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a part alone: for lists, which only count them."""

    ids: tuple[int, ...]


AnyPart = TypeVar("AnyPart", Part, RawPart)

# Of epochs, sequences and generations: no count of anything that happens comes to it. A number beyond it is what damage
# made of one, or somebody's mischief; and the next one after it may be more than a message or the file can hold.
HIGHEST = 1 << 53

_encode = msgspec.msgpack.Encoder().encode
_DIGEST = 8  # bytes of xxh3-64 before each value


class Damaged(Exception):
    """A value is not what was written."""


def sealed(value: object) -> bytes:
    data = _encode(value)
    return xxhash.xxh3_64_digest(data) + data


def unsealed(data: object, kind: type[T]) -> T:
    """Give the value back. Raises Damaged."""
    if not isinstance(data, bytes) or xxhash.xxh3_64_digest(data[_DIGEST:]) != data[:_DIGEST]:
        raise Damaged("a value's checksum differs")
    try:
        value: T = _decoder(cast(Any, kind)).decode(data[_DIGEST:])
    except msgspec.DecodeError as error:
        raise Damaged(str(error)) from None
    return value


def counted(value: int, what: str) -> int:
    """Return the number if it can have come about by counting. Raises Damaged."""
    if not 0 <= value < HIGHEST:
        raise Damaged(f"it says that {what} is {value}, which no swarm comes to")
    return value


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make a type's decoder once: what the type looks like takes longer to find out than a small value to read."""
    return msgspec.msgpack.Decoder(kind)


def joined(parts: Iterable[tuple[int, AnyPart]], kind: type[AnyPart], num: int | None = None) -> AnyPart:
    """Join the parts up to the first gap (after a power cut the last ones may be missing), at most ``num`` tokens.
    Tokens may be there twice; what says otherwise than what is before it has no true index, and is passed over."""
    ids: list[int] = []
    logprobs: list[Any] = []
    hops: list[Any] = []
    num_cached = 0
    for first, part in parts:
        known = len(ids) - first
        if known < 0:
            break
        if first < 0 or any(map(ne, ids[first:], part.ids)):
            continue
        ids += part.ids[known:]
        logprobs += part.logprobs[known:]
        hops += part.hops[known:]
        num_cached = max(num_cached, part.num_cached)
    return kind(tuple(ids[:num]), tuple(logprobs[:num]), tuple(hops[:num]), num_cached=num_cached)

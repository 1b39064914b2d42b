"""Encoding of values in the journal: msgpack with a checksum in front, since SQLite's pages have none."""

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
    """Consecutive tokens of a sequence, with the log probabilities and hops that were requested.

    ``place``: sequence and index of the first token, repeated here because the row's columns have no checksum; None:
    not recorded. ``num_cached``: cached prompt tokens, in the part with the first token. ``vector``: the answer of a
    request for a vector, which has no tokens. ``prompt_logprobs``: as ``num_cached``. Journals of earlier versions lack
    the last three fields.
    """

    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()
    place: tuple[int, int] | None = None
    num_cached: int = 0
    vector: bytes = b""
    prompt_logprobs: bytes = b""


class RawPart(msgspec.Struct, frozen=True, array_like=True):
    """A part that is only copied: log probabilities and hops stay encoded."""

    ids: tuple[int, ...]
    logprobs: tuple[msgspec.Raw, ...] = ()
    hops: tuple[msgspec.Raw, ...] = ()
    place: tuple[int, int] | None = None
    num_cached: int = 0
    vector: bytes = b""
    prompt_logprobs: bytes = b""


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """Only the tokens of a part: for lists, which merely count them."""

    ids: tuple[int, ...]


AnyPart = TypeVar("AnyPart", Part, RawPart)

# Limit of epochs, sequence numbers and generations; no real count reaches it. A higher number is a result of damage or
# manipulation, and its successor may not fit into a message or the file.
MAX_COUNT = 1 << 53

_encode_msgpack = msgspec.msgpack.Encoder().encode
_DIGEST = 8  # bytes of xxh3-64 in front of each value


class DamagedValue(Exception):
    """A value differs from what was written."""


def encode(value: object) -> bytes:
    """Encode a value, with its checksum in front."""
    data = _encode_msgpack(value)
    return xxhash.xxh3_64_digest(data) + data


def decode(data: object, kind: type[T]) -> T:
    """Decode a value. Raises DamagedValue."""
    if not isinstance(data, bytes) or xxhash.xxh3_64_digest(data[_DIGEST:]) != data[:_DIGEST]:
        raise DamagedValue("a value's checksum differs")
    try:
        value: T = _get_decoder(cast(Any, kind)).decode(data[_DIGEST:])
    except msgspec.DecodeError as error:
        raise DamagedValue(str(error)) from None
    return value


def check_count(value: int, what: str) -> int:
    """Return the number if counting can have reached it. Raises DamagedValue."""
    if not 0 <= value < MAX_COUNT:
        raise DamagedValue(f"{what} is {value}, which no count can reach")
    return value


@functools.cache
def _get_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a cached decoder: inspecting a type takes longer than decoding a small value."""
    return msgspec.msgpack.Decoder(kind)


def join_parts(parts: Iterable[tuple[int, AnyPart]], kind: type[AnyPart], num: int | None = None) -> AnyPart:
    """Join the parts up to the first gap (after a power cut the last ones may be missing), at most ``num`` tokens.
    Duplicates are allowed; a part that contradicts earlier ones has a wrong index and is skipped."""
    ids: list[int] = []
    logprobs: list[Any] = []
    hops: list[Any] = []
    num_cached, prompt_logprobs = 0, b""
    for first, part in parts:
        overlap = len(ids) - first
        if overlap < 0:
            break
        if first < 0 or any(map(ne, ids[first:], part.ids)):
            continue
        ids += part.ids[overlap:]
        logprobs += part.logprobs[overlap:]
        hops += part.hops[overlap:]
        num_cached = max(num_cached, part.num_cached)
        prompt_logprobs = prompt_logprobs or part.prompt_logprobs
    return kind(
        tuple(ids[:num]),
        tuple(logprobs[:num]),
        tuple(hops[:num]),
        num_cached=num_cached,
        prompt_logprobs=prompt_logprobs,
    )

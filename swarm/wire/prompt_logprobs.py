"""Log probabilities of a prompt's tokens as bytes.

The first token has none. Each other token has the same number of entries: its own, then the requested alternatives. An
entry is a token id (uint32) and a log probability (float64), little-endian, so it has the bits of a drawn token's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from swarm.wire.messages import TokenLogprob

_ENTRY = struct.Struct("<Id")


def row_bytes(alternatives: int, vocab_size: int) -> int:
    """Return the size of a token's entries. A small vocabulary has fewer alternatives than a request may ask for."""
    return _ENTRY.size * (1 + min(alternatives, vocab_size))


def pack_logprobs(rows: Iterable[Iterable[TokenLogprob]]) -> bytes:
    return b"".join(_ENTRY.pack(entry.token, entry.logprob) for row in rows for entry in row)


def unpack_logprobs(values: bytes, num_tokens: int) -> list[tuple[TokenLogprob, ...]]:
    """Return the entries of each of the ``num_tokens`` tokens; none if there are no values. Raises ValueError."""
    if not values:
        return []
    entries, rest = divmod(len(values), _ENTRY.size * num_tokens)
    if rest:
        raise ValueError(f"{len(values)} bytes are no log probabilities of {num_tokens} tokens")
    unpacked = [TokenLogprob(token, logprob) for token, logprob in _ENTRY.iter_unpack(values)]
    return [tuple(unpacked[start : start + entries]) for start in range(0, len(unpacked), entries)]

"""Result types of the client library."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import NamedTuple, Self

from swarm.wire.messages import Hop, Submit, Timing, TokenLogprob
from swarm.wire.prompt_logprobs import unpack_logprobs

Logprobs = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream, with the text that it completed.

    ``index`` is the token's place in its continuation; ``choice`` is the number of the continuation (0 unless n > 1).
    The last piece of a continuation has a ``finish_reason`` ("stop" or "length"). Its ``token`` is None if the end came
    without a further token, as after a stop string; ``stop`` is that string. ``logprobs`` (the token's own first, then
    the alternatives) and ``hops`` (one per stage) are empty unless requested.
    """

    token: int | None
    text: str
    index: int
    choice: int = 0
    finish_reason: str | None = None
    logprobs: Logprobs = ()
    hops: tuple[Hop, ...] = ()
    stop: str | None = None


class _BatchPiece(NamedTuple):
    index: int  # type: ignore[assignment]  # hides a method of tuples that is not needed here
    token: int | None
    text: str
    finished: bool


class BatchPiece(_BatchPiece):
    """One token of a batch: ``index, token, text, finished``.

    ``index`` is the prompt's place in the batch; ``finished`` marks the last token of a continuation. ``piece`` has the
    rest: the token's place in the answer, the finish reason, and with n > 1 the number of the continuation.
    """

    piece: Piece

    @classmethod
    def from_piece(cls, index: int, piece: Piece) -> Self:
        batch_piece = cls(index, piece.token, piece.text, piece.finish_reason is not None)
        batch_piece.piece = piece
        return batch_piece


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: the prompt once, and all continuations together. ``num_cached`` prompt tokens were not
    computed again, because the swarm still had them from an earlier request. Reading the request again returns the same
    counts."""

    num_prompt: int
    num_tokens: int
    num_cached: int = 0

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished continuation. ``logprobs`` and ``hops`` have one entry per token, or none if not requested.

    The fields ``first_token_s`` and ``queued_s`` of ``timing`` are 0 if they are unknown, because the broker was
    restarted after the first token. ``total_s`` is always known.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    timing: Timing
    logprobs: tuple[Logprobs, ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. ``text``, ``tokens`` and the other properties belong to its first choice. ``vector``: the
    answer of a request for a vector, as the last stage computed it."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    seed: int
    vector: bytes | None = None
    packed_prompt_logprobs: bytes = b""  # see ``prompt_logprobs``

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """The log probabilities of each token of the prompt, unpacked at each access; none if not requested. The first
        token's is empty."""
        rows = unpack_logprobs(self.packed_prompt_logprobs, self.usage.num_prompt - 1)
        return ((), *rows) if rows else ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def timing(self) -> Timing:
        return self.choices[0].timing

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return self.choices[0].logprobs

    @property
    def hops(self) -> tuple[tuple[Hop, ...], ...]:
        return self.choices[0].hops


@dataclass(frozen=True, slots=True)
class VectorAnswer:
    """A request's vector as the last stage computed it: float32, little-endian. ``queued_s``: seconds in the broker's
    queue."""

    request_id: str
    vector: bytes
    num_prompt: int
    num_cached: int = 0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text, in float32. ``num_prompt``: its tokens, of which ``num_cached`` were not computed
    again."""

    request_id: str
    vector: array.array[float]
    num_prompt: int
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's place in the list, and how well it answers the query, from 0 to 1."""

    index: int
    score: float
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a request so far. ``pieces``: what a reader would have received by now; ``completion``: the whole
    answer, None before the end."""

    submit: Submit
    pieces: tuple[Piece, ...]
    completion: Completion | None

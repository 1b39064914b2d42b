"""What the client library gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from swarm.wire.messages import Hop, Submit, Timing, TokenLogprob

Logprobs = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream, with the text that it completed.

    ``index`` is the token's place in its continuation, ``choice`` says which continuation (0 unless n > 1). The last
    piece of a continuation has a ``finish_reason`` ("stop" or "length"). Its ``token`` is None if the end came without
    a further token, as after a stop string; ``stop`` is that string. ``logprobs`` (the token's own first, then the
    alternatives) and ``hops`` (one per stage) are empty unless asked for.
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
    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs here
    token: int | None
    text: str
    finished: bool


class BatchPiece(_BatchPiece):
    """One token of a batch: ``index, token, text, finished``.

    ``index`` is the prompt's place in the batch; ``finished`` says that this is the last of its answer. ``piece`` is
    the whole piece: its place in the answer, the finish reason, and with n > 1 which continuation it belongs to, and
    finishes.
    """

    piece: Piece

    @classmethod
    def of(cls, index: int, piece: Piece) -> Self:
        made = cls(index, piece.token, piece.text, piece.finish_reason is not None)
        made.piece = piece
        return made


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted: the prompt once, and all continuations together. ``num_cached`` of the prompt's were not computed
    again, because the swarm still had them from an earlier request. They are the same when it is read again."""

    num_prompt: int
    num_tokens: int
    num_cached: int = 0

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished continuation. ``logprobs`` and ``hops`` have one entry per token, or none if not asked for.

    In ``timing``, a ``first_token_s`` of 0 is not measured but not known: the broker was started again after the first
    token, and ``queued_s`` is 0 for the same reason. ``total_s`` is always known.
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
    """A finished request. With n = 1 its only choice is at hand as ``text``, ``tokens`` and so on."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    seed: int

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
class Progress:
    """What has come of a request so far. ``pieces``: what a reader would have had by now; ``completion``: what they add
    up to, None before the end."""

    submit: Submit
    pieces: tuple[Piece, ...]
    completion: Completion | None

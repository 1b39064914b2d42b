"""Assembles the tokens of one continuation into the pieces that a caller sees. Pure.

A piece is released when two things are certain: that its token counts (no stop string may have begun in it), and
whether it is the last one. So a token that may end the continuation (an end-of-sequence or stop token, or the last one
that ``max_tokens`` allows) waits for the next message, which the broker sends right after it. All other pieces are
released immediately.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from swarm.client.results import Logprobs, Piece
from swarm.client.text.detokenize import Detokenizer, StopMatcher
from swarm.params import SamplingParams
from swarm.wire.messages import Hop


@dataclass(slots=True)
class _Waiting:
    """A piece whose text is not certain yet. ``end``: offset in the continuation's text at which the piece ends."""

    piece: Piece
    end: int


def replace_text(piece: Piece, text: str) -> Piece:
    """Return the piece with this text. Called once per token, so it avoids ``replace``, which is several times
    slower."""
    return Piece(piece.token, text, piece.index, piece.choice, piece.finish_reason, piece.logprobs, piece.hops)


@dataclass(slots=True)
class PieceAssembler:
    """Assembles the pieces of continuation ``choice``. Without a detokenizer, pieces have no text.

    When a stop string is found, ``stop_at`` becomes the number of tokens that count; the caller must then report it to
    the broker.
    """

    params: SamplingParams
    choice: int
    end_tokens: frozenset[int]  # tokens that end the continuation
    detokenizer: Detokenizer | None
    stop_at: int | None = None
    num_tokens: int = 0  # tokens pushed
    num_released: int = 0  # pieces released
    _matcher: StopMatcher = field(init=False)
    _waiting: deque[_Waiting] = field(default_factory=deque)  # pieces held back
    _maybe_last: Piece | None = None  # a pushed token that may turn out to be the last
    _num_chars: int = 0  # characters of all pushed tokens
    _num_released_chars: int = 0  # characters of all released pieces
    _text: str = ""  # certain text that belongs to no released piece yet

    def __post_init__(self) -> None:
        self._matcher = StopMatcher(self.params.stop)

    def push(self, token: int, logprobs: Logprobs = (), hops: tuple[Hop, ...] = ()) -> list[Piece]:
        """Add the next token and return the pieces that are now certain. Tokens after a stop string are ignored."""
        if self._maybe_last is not None:
            piece, self._maybe_last = self._maybe_last, None
            self._add_piece(piece)
        if self.stop_at is not None:
            return []
        piece = Piece(token, "", self.num_tokens, self.choice, None, logprobs, hops)
        self.num_tokens += 1
        if token in self.end_tokens or self.num_tokens >= self.params.max_tokens:
            self._maybe_last = piece
        else:
            self._add_piece(piece)
        return self._release_certain()

    def finish(self, reason: str) -> list[Piece]:
        """End the continuation: return the remaining pieces, the last of them with the finish reason."""
        if self.stop_at is None:
            self._add_last_piece(reason)
        if self.stop_at is None and self.detokenizer is not None:
            self._match_stops(self.detokenizer.finish())
        if self.stop_at is None:
            self._text += self._matcher.finish()
        else:
            reason = "stop"
        return self._release_rest(reason)

    def _add_last_piece(self, reason: str) -> None:
        piece, self._maybe_last = self._maybe_last, None
        if piece is not None and reason == "stop" and piece.token in self.end_tokens:
            self._waiting.append(_Waiting(piece, self._num_chars))  # the token that ends the text is not part of it
        elif piece is not None:
            self._add_piece(piece)

    def _add_piece(self, piece: Piece) -> None:
        text = self.detokenizer.push(piece.token) if self.detokenizer is not None and piece.token is not None else ""
        self._num_chars += len(text)
        self._waiting.append(_Waiting(piece, self._num_chars))
        if piece.index < self.params.min_tokens:
            self._text += self._matcher.skip(text)  # too early to stop
        else:
            self._match_stops(text)

    def _match_stops(self, text: str) -> None:
        self._text += self._matcher.push(text)
        if self._matcher.found_at is not None:
            self._cut(self._matcher.found_at)

    def _cut(self, at: int) -> None:
        """End the text at offset ``at``: only tokens that begin before it count."""
        remaining: deque[_Waiting] = deque()
        start = self._num_released_chars
        for waiting in self._waiting:
            if start < at:
                remaining.append(_Waiting(waiting.piece, min(waiting.end, at)))
            start = waiting.end
        self._waiting = remaining
        self.stop_at = self.num_released + len(remaining)

    def _release_certain(self) -> list[Piece]:
        num_kept = 0 if self.stop_at is None else 1  # after a stop string, hold back the last piece for the end
        pieces: list[Piece] = []
        while len(self._waiting) > num_kept and self._waiting[0].end <= self._matcher.num_released:
            pieces.append(self._release(self._waiting.popleft()))
        return pieces

    def _release_rest(self, reason: str) -> list[Piece]:
        pieces = [self._release(self._waiting.popleft()) for _ in range(len(self._waiting))]
        last = pieces.pop() if pieces else Piece(None, "", self.num_released, self.choice)
        text, self._text = last.text + self._text, ""
        return [*pieces, replace(last, text=text, finish_reason=reason, stop=self._matcher.found_stop)]

    def _release(self, waiting: _Waiting) -> Piece:
        length = waiting.end - self._num_released_chars
        text, self._text = self._text[:length], self._text[length:]
        self._num_released_chars = waiting.end
        self.num_released += 1
        return replace_text(waiting.piece, text)

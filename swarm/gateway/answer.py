"""Parts of an answer, in order. Each part belongs to a choice (a continuation; 0 unless n > 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.client.results import Completion, Piece
from swarm.wire.messages import Timing

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer. ``pieces``: the tokens that it came with, for log probabilities and hops."""

    choice: int
    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text of the thinking that precedes the answer. ``pieces``: as of text."""

    choice: int
    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class CallStartPart:
    """Start of a tool call, the ``number``-th one in this answer, from 0."""

    choice: int
    number: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgumentsPart:
    """More of a call's arguments: JSON, or a custom tool's own text."""

    choice: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEndPart:
    """End of a call's arguments."""

    choice: int
    number: int


@dataclass(frozen=True, slots=True)
class ChoiceEndPart:
    """End of a choice. ``stop``: the stop string that ended it, if one did."""

    choice: int
    reason: FinishReason
    num_tokens: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt's tokens, and the completion with their log probabilities, after the end of all choices."""

    choice: int
    tokens: tuple[int, ...]
    completion: Completion


AnswerPart = PromptPart | TextPart | ReasoningPart | CallStartPart | CallArgumentsPart | CallEndPart | ChoiceEndPart


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of a whole answer. ``cached``: tokens of the prompt that the swarm had already computed.
    ``reasoning``: tokens of the answer that are thinking, with its marks. ``timing``: the broker's times, at the
    end."""

    prompt: int
    answer: int
    cached: int = 0
    reasoning: int = 0
    timing: Timing | None = None

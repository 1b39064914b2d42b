"""What an answer is made of, in order. Each part belongs to a choice (a continuation; 0 unless n > 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.client.results import Piece

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Text:
    """Some text of the answer; ``pieces``: the tokens that it came with (for log probabilities and hops)."""

    choice: int
    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The model calls a tool: its ``number``-th call in this answer, from 0."""

    choice: int
    number: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of a call's arguments: JSON, or a custom tool's own text."""

    choice: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The arguments are whole."""

    choice: int
    number: int


@dataclass(frozen=True, slots=True)
class End:
    """The choice is finished. ``stop``: the stop string that ended it, if one did."""

    choice: int
    reason: Reason
    num_tokens: int = 0
    stop: str | None = None


Part = Text | CallBegins | CallText | CallEnds | End


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a whole answer: ``cached`` of the prompt's were found computed already."""

    prompt: int
    answer: int
    cached: int = 0

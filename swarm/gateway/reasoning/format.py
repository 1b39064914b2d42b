"""Interfaces of reasoning formats and their parsers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

# How an answer begins. "none": no thinking is split off. "optional": the model may open its thinking. "opened": the
# prompt has opened it.
ReasoningStart = Literal["none", "optional", "opened"]

# What follows the thinking: any text or calls, a text by a grammar, or a call by a grammar.
AfterThinking = Literal["anything", "text", "call"]


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """End of the thinking. ``texts``: each ends it. ``closing``: text that ends it when its budget is used."""

    texts: tuple[str, ...]
    closing: str


class Phase(Enum):
    """What the text read so far ends in."""

    UNDECIDED = "undecided"  # perhaps in the mark that opens thinking
    THINKING = "thinking"
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """Text of the answer, in which the tool-call parser looks for calls."""

    text: str


ReasoningResult = ReasoningDelta | AnswerDelta


class ReasoningParser(Protocol):
    """Parser of one answer."""

    @property
    def phase(self) -> Phase: ...

    def push(self, text: str) -> Sequence[ReasoningResult]:
        """Add text and return what is now certain. Text that could be part of a mark is held back."""
        ...

    def finish(self) -> Sequence[ReasoningResult]:
        """End the answer and return the held text."""
        ...


class ReasoningFormat(Protocol):
    """A format in which models write their thinking."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that mark thinking. Those that are special tokens of the model must be made visible."""
        ...

    @property
    def opening(self) -> str:
        """Text that opens thinking at the end of a prompt."""
        ...

    def end_of(self, rest: AfterThinking) -> ThinkingEnd:
        """Return how the thinking ends if this follows."""
        ...

    def fits(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        ...

    def start(self, prompt_end: str) -> ReasoningStart:
        """Return how an answer begins after a prompt with this end."""
        ...

    def parser(self, *, is_opened: bool) -> ReasoningParser: ...


@dataclass(frozen=True, slots=True)
class ComposedFormat:
    """A format composed of values and functions."""

    name: str
    marks: tuple[str, ...]
    opening: str
    end_of: Callable[[AfterThinking], ThinkingEnd]
    fits: Callable[[str], bool]
    start: Callable[[str], ReasoningStart]
    make_parser: Callable[[bool], ReasoningParser]

    def parser(self, *, is_opened: bool) -> ReasoningParser:
        return self.make_parser(is_opened)

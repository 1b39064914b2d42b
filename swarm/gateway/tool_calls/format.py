"""Interfaces of tool-call formats and their parsers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.gateway.completion_request import ToolOptions
from swarm.params import Grammar


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """Start of a call of this tool."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the current call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """End of the current call's arguments."""


ParseResult = TextDelta | CallStarted | ArgumentsDelta | CallFinished


class ToolCallParser(Protocol):
    """Parser of one answer."""

    @property
    def done(self) -> bool:
        """Whether nothing further counts (the only allowed call is over), so that the answer may be stopped."""
        ...

    def push(self, text: str) -> Sequence[ParseResult]:
        """Add text and return what is now certain. Text that could be part of a mark is held back."""
        ...

    def finish(self) -> Sequence[ParseResult]:
        """End the answer and return the rest: a call that was cut off ends; held text that is no call is returned as
        text."""
        ...


class ToolCallFormat(Protocol):
    """A format in which models write tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that mark calls. Those that are special tokens of the model must be made visible."""
        ...

    def fits(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        ...

    def instructions(self, use: ToolOptions) -> str:
        """Return a system message that describes the tools to the model; empty if the chat template does that
        itself."""
        ...

    def parser(self, use: ToolOptions) -> ToolCallParser: ...

    def forced_call_grammar(self, use: ToolOptions) -> Grammar:
        """Return the grammar of an answer that makes the required calls: of any tool or of the named one, once or
        several times. Raises InvalidRequest if no grammar can express that."""
        ...


def _no_instructions(_: ToolOptions) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ComposedFormat:
    """A format composed of functions."""

    name: str
    marks: tuple[str, ...]
    fits: Callable[[str], bool]
    parser: Callable[[ToolOptions], ToolCallParser]
    forced_call_grammar: Callable[[ToolOptions], Grammar]
    instructions: Callable[[ToolOptions], str] = _no_instructions
    # the grammar of an answer that may call: arguments of strict tools follow their schemas; None: there is none
    optional_call_grammar: Callable[[ToolOptions], Grammar | None] | None = None

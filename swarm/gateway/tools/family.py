"""What a family of models must be able to do with tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.gateway.ask import ToolUse
from swarm.params import Grammar


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of this tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class Over:
    """The arguments of that call are whole."""


Found = Said | Begun | Argued | Over


class CallReader(Protocol):
    """Reads one answer."""

    @property
    def done(self) -> bool:
        """Will nothing more count, so that the answer may be stopped? (The only call that was allowed is over.)"""
        ...

    def push(self, text: str) -> Sequence[Found]:
        """What is certain after this text. Nothing that could be part of a mark is shown yet."""
        ...

    def finish(self) -> Sequence[Found]:
        """The rest, when nothing more comes: a call that was cut off is over; what was no call is said as it is."""
        ...


class Family(Protocol):
    """One way to write calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that calls are found by. Those that are special tokens of the model must be made visible."""
        ...

    def fits(self, template: str) -> bool:
        """Does this chat template belong to the family?"""
        ...

    def instructions(self, use: ToolUse) -> str:
        """A system text that tells the model of the tools; empty if the chat template does that itself."""
        ...

    def reader(self, use: ToolUse) -> CallReader: ...

    def forced(self, use: ToolUse) -> Grammar:
        """The grammar of an answer that calls as ``use`` says: any tool, or the named one; once, or several times.
        Raises InvalidRequest if that can't be said in a grammar."""
        ...


def _nothing(_: ToolUse) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Way:
    """A family put together from its parts."""

    name: str
    marks: tuple[str, ...]
    fits: Callable[[str], bool]
    reader: Callable[[ToolUse], CallReader]
    forced: Callable[[ToolUse], Grammar]
    instructions: Callable[[ToolUse], str] = _nothing

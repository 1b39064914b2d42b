"""Parses an answer character by character into text and calls.

Every parser is a generator that requests one character at a time, so its result cannot depend on how the text was cut.
The text read since the last certain point is *held*: whitespace, then a mark or its beginning, then everything before
the tool's name is certain. When a call begins, the held text was its head and is dropped; when it turns out that none
begins, the held text is released as text. The character that decides this may be the first of a mark, so it is read
again; no other character can be, because a mark's first character occurs nowhere else in it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ArgumentsDelta, CallFinished, CallStarted, ParseResult, TextDelta

_T = TypeVar("_T")
ParseSteps = Generator[None, str, _T]  # requests characters one by one, and returns a result

SPACE = " \t\r\n"
MAX_HELD = 1 << 16  # characters held before the name is certain: arguments that come first wait for it
MAX_SPACE = 256  # whitespace held before a mark
_MAX_NAME = 256


class NotACall(Exception):
    """The text is not a call, or no longer a valid one."""


class CharacterSource:
    """Source of characters, read one at a time; the last one can be read again."""

    def __init__(self) -> None:
        self._again = ""
        self._last = ""

    def next_char(self) -> ParseSteps[str]:
        """Return the next character."""
        if self._again:
            self._last, self._again = self._again, ""
        else:
            self._last = yield
        return self._last

    def unread(self) -> None:
        """Make the last character the next one again."""
        self._again = self._last


class BaseToolCallParser(CharacterSource):
    """Base class of the parsers of all tool-call formats.

    A subclass implements ``parse_calls``, which parses the text after a mark, and ``parse_opening``, which parses the
    beginning of an answer without a mark.
    """

    starts: Sequence[str] = ()  # marks that begin calls
    ends: Sequence[str] = ()  # marks that end calls; the rest of a broken call is skipped up to one

    def __init__(self, use: ToolOptions) -> None:
        super().__init__()
        self.done = False
        self.num_calls_ended = 0  # calls that have ended
        self._parallel = use.parallel
        self._tools = {tool.name: tool for tool in use.tools} if use.are_offered else {}
        self._all = (*self.starts, *self.ends)
        firsts = {mark[0] for mark in self._all}
        # matches the first character of any mark
        self._first = re.compile("[" + re.escape("".join(sorted(firsts))) + "]") if firsts else None
        self._held: list[str] = []  # text held back, by characters
        self._in_call = False  # inside a call
        self._has_arguments = False  # the current call has arguments
        self._is_between_calls = False  # at a point where plain text may be passed on in bulk
        self._is_skipping = False  # skipping the rest of a broken call
        # results that have not been returned
        self._results: list[tuple[type[TextDelta | CallStarted | ArgumentsDelta | CallFinished], list[str]]] = []
        self._main = self._parse() if self._tools else None
        if self._main is not None:
            next(self._main)

    # --- for subclasses to override

    def parse_opening(self) -> ParseSteps[None]:
        """Read calls without a mark at the beginning of the answer. By default there are none."""
        yield from ()

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        """Read the call, or calls, after this mark. Raises NotACall if there is none."""
        raise NotImplementedError

    # --- for callers

    def push(self, text: str) -> Sequence[ParseResult]:
        if self._main is None:
            self._emit(TextDelta, text)
        else:
            self._feed(self._main, text)
        return self._take_results()

    def finish(self) -> Sequence[ParseResult]:
        if self._in_call:
            self.end_call()
        elif not self.done and not self._is_skipping:
            rest = "".join(self._held)
            if self.num_calls_ended == 0 or not self._is_end(rest.strip(SPACE)):
                self._emit(TextDelta, rest)
        self.done = True
        self._held.clear()
        return self._take_results()

    def _is_end(self, text: str) -> bool:
        """Whether the text is empty, or the beginning of a closing mark."""
        return not text or any(mark.startswith(text) for mark in self.ends)

    # --- for subclasses to use

    def next_char(self) -> ParseSteps[str]:
        char = yield from super().next_char()
        if not self._in_call:
            self._held.append(char)
            if len(self._held) > MAX_HELD:
                raise NotACall
        return char

    def unread(self) -> None:
        if self._again:
            return
        super().unread()
        if not self._in_call:
            self._held.pop()

    def drop_held(self) -> None:
        """Drop the held text: it belongs to calls, and is never released."""
        self._held.clear()

    def find_tool(self, name: str) -> Tool | None:
        """Return the offered tool with this name."""
        return self._tools.get(name)

    def begin_call(self, name: str) -> None:
        name = name.strip(SPACE)
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise NotACall
        self._held.clear()
        self._in_call, self._has_arguments = True, False
        self._emit(CallStarted, name)

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if text:
            self._has_arguments = True
            self._emit(ArgumentsDelta, text)

    @property
    def has_arguments(self) -> bool:
        """Whether the current call has any arguments."""
        return self._has_arguments

    def end_call(self) -> None:
        self._in_call = False
        self.num_calls_ended += 1
        self.done = not self._parallel
        self._results.append((CallFinished, []))

    # --- parsing

    def _feed(self, main: ParseSteps[None], text: str) -> None:
        at = 0
        while at < len(text) and not self.done:
            if self._is_between_calls and not self._held and not self._is_skipping:
                at = self._release_plain(text, at)
            if at < len(text):
                main.send(text[at])
                at += 1

    def _release_plain(self, text: str, at: int) -> int:
        """Release text that cannot belong to a mark, and return the position after it."""
        match = self._first.search(text, at) if self._first is not None else None
        plain = text[at : match.start() if match else len(text)].rstrip(SPACE)
        self._emit(TextDelta, plain)
        return at + len(plain)

    def _parse(self) -> ParseSteps[None]:
        yield from self._attempt(self.parse_opening())
        while True:
            mark = yield from self._find_mark()
            yield from self._attempt(self.parse_calls(mark))

    def _attempt(self, reading: ParseSteps[None]) -> ParseSteps[None]:
        try:
            yield from reading
        except NotACall:
            self.unread()
            if self._in_call:
                self.end_call()
                self._is_skipping = bool(self.ends)
            else:
                self._release()

    def _find_mark(self) -> ParseSteps[str]:
        """Release text until a mark begins calls, and return the mark."""
        while True:
            self._is_between_calls = True
            char = yield from self.next_char()
            self._is_between_calls = False
            if char in SPACE:
                if len(self._held) > MAX_SPACE:
                    self._release()
                continue
            mark = yield from self._match_mark(char)
            if mark in self.starts:
                self._is_skipping = False
                return mark
            if mark and (self._is_skipping or self.num_calls_ended):
                self._is_skipping = False
                self._held.clear()
            else:
                self._release()

    def _match_mark(self, begun: str) -> ParseSteps[str]:
        """Return the mark that begins with this character. If there is none, return "" and read the mismatching
        character again."""
        length = len(begun)
        while any(mark.startswith(begun) for mark in self._all):
            if begun in self._all:
                return begun
            begun += yield from self.next_char()
            length += 1
        if length > 1:
            self.unread()
        return ""

    def _release(self) -> None:
        """Release the held text as text, unless it is the rest of a broken call."""
        if not self._is_skipping:
            self._emit(TextDelta, "".join(self._held))
        self._held.clear()

    # --- results

    def _emit(self, kind: type[TextDelta | CallStarted | ArgumentsDelta], text: str) -> None:
        if not text:
            return
        if kind is not CallStarted and self._results and self._results[-1][0] is kind:
            self._results[-1][1].append(text)
        else:
            self._results.append((kind, [text]))

    def _take_results(self) -> list[ParseResult]:
        runs, self._results = self._results, []
        return [CallFinished() if kind is CallFinished else kind("".join(parts)) for kind, parts in runs]  # type: ignore[call-arg]


def skip_space(source: CharacterSource) -> ParseSteps[str]:
    """Return the next character that is not whitespace."""
    while True:
        char = yield from source.next_char()
        if char not in SPACE:
            return char


def expect(source: CharacterSource, text: str) -> ParseSteps[None]:
    """Read exactly this text. Raises NotACall at the first other character."""
    for wanted in text:
        char = yield from source.next_char()
        if char != wanted:
            raise NotACall


def word_until(source: CharacterSource, ends: str) -> ParseSteps[tuple[str, str]]:
    """Read a short word up to one of these characters; returns the word and that character."""
    word: list[str] = []
    while True:
        char = yield from source.next_char()
        if char in ends:
            return "".join(word), char
        word.append(char)
        if len(word) > _MAX_NAME:
            raise NotACall

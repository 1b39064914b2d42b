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

from swarm.gateway.ask import Tool, ToolUse
from swarm.gateway.tools.family import Argued, Begun, Found, Over, Said

_T = TypeVar("_T")
Steps = Generator[None, str, _T]  # requests characters one by one, and returns a result

SPACE = " \t\r\n"
MAX_HELD = 1 << 16  # characters held before the name is certain: arguments that come first wait for it
MAX_SPACE = 256  # whitespace held before a mark
_MAX_NAME = 256


class Broken(Exception):
    """The text is not a call, or no longer a valid one."""


class Characters:
    """Source of characters, read one at a time; the last one can be read again."""

    def __init__(self) -> None:
        self._again = ""
        self._last = ""

    def char(self) -> Steps[str]:
        """Return the next character."""
        if self._again:
            self._last, self._again = self._again, ""
        else:
            self._last = yield
        return self._last

    def unread(self) -> None:
        """Make the last character the next one again."""
        self._again = self._last


class Reader(Characters):
    """Base class of all formats' parsers. A subclass implements what follows a mark (``parse_calls``), and what may
    begin an answer without one (``parse_opening``)."""

    starts: Sequence[str] = ()  # marks that begin calls
    ends: Sequence[str] = ()  # marks that end calls; the rest of a broken call is skipped up to one

    def __init__(self, use: ToolUse) -> None:
        super().__init__()
        self.done = False
        self.num_calls = 0  # calls that have ended
        self._parallel = use.parallel
        self._tools = {tool.name: tool for tool in use.tools} if use.offered else {}
        self._all = (*self.starts, *self.ends)
        firsts = {mark[0] for mark in self._all}
        # matches the first character of any mark
        self._first = re.compile("[" + re.escape("".join(sorted(firsts))) + "]") if firsts else None
        self._held: list[str] = []  # text held back, by characters
        self._calling = False  # inside a call
        self._argued = False  # the current call has arguments
        self._idle = False  # at a point where plain text may be passed on in bulk
        self._skipping = False  # skipping the rest of a broken call
        # results that have not been returned
        self._runs: list[tuple[type[Said | Begun | Argued | Over], list[str]]] = []
        self._main = self._read() if self._tools else None
        if self._main is not None:
            next(self._main)

    # --- for subclasses to override

    def opening(self) -> Steps[None]:
        """Read calls without a mark at the beginning of the answer. By default there are none."""
        yield from ()

    def calls(self, mark: str) -> Steps[None]:
        """Read the call, or calls, after this mark. Raises NotACall if there is none."""
        raise NotImplementedError

    # --- for callers

    def push(self, text: str) -> Sequence[Found]:
        if self._main is None:
            self._put(Said, text)
        else:
            self._feed(self._main, text)
        return self._take()

    def finish(self) -> Sequence[Found]:
        if self._calling:
            self.over()
        elif not self.done and not self._skipping:
            rest = "".join(self._held)
            if self.num_calls == 0 or not self._is_end(rest.strip(SPACE)):
                self._put(Said, rest)
        self.done = True
        self._held.clear()
        return self._take()

    def _is_end(self, text: str) -> bool:
        """Whether the text is empty, or the beginning of a closing mark."""
        return not text or any(mark.startswith(text) for mark in self.ends)

    # --- for subclasses to use

    def char(self) -> Steps[str]:
        char = yield from super().char()
        if not self._calling:
            self._held.append(char)
            if len(self._held) > MAX_HELD:
                raise Broken
        return char

    def unread(self) -> None:
        if self._again:
            return
        super().unread()
        if not self._calling:
            self._held.pop()

    def forget(self) -> None:
        """Drop the held text: it belongs to calls, and is never released."""
        self._held.clear()

    def tool(self, name: str) -> Tool | None:
        """Return the offered tool with this name."""
        return self._tools.get(name)

    def begin(self, name: str) -> None:
        name = name.strip(SPACE)
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise Broken
        self._held.clear()
        self._calling, self._argued = True, False
        self._put(Begun, name)

    def argue(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if text:
            self._argued = True
            self._put(Argued, text)

    @property
    def has_argued(self) -> bool:
        """Whether the current call has any arguments."""
        return self._argued

    def over(self) -> None:
        self._calling = False
        self.num_calls += 1
        self.done = not self._parallel
        self._runs.append((Over, []))

    # --- parsing

    def _feed(self, main: Steps[None], text: str) -> None:
        at = 0
        while at < len(text) and not self.done:
            if self._idle and not self._held and not self._skipping:
                at = self._pass_on(text, at)
            if at < len(text):
                main.send(text[at])
                at += 1

    def _pass_on(self, text: str, at: int) -> int:
        """Release text that cannot belong to a mark, and return the position after it."""
        found = self._first.search(text, at) if self._first is not None else None
        plain = text[at : found.start() if found else len(text)].rstrip(SPACE)
        self._put(Said, plain)
        return at + len(plain)

    def _read(self) -> Steps[None]:
        yield from self._attempt(self.opening())
        while True:
            mark = yield from self._mark()
            yield from self._attempt(self.calls(mark))

    def _attempt(self, reading: Steps[None]) -> Steps[None]:
        try:
            yield from reading
        except Broken:
            self.unread()
            if self._calling:
                self.over()
                self._skipping = bool(self.ends)
            else:
                self._release()

    def _mark(self) -> Steps[str]:
        """Release text until a mark begins calls, and return the mark."""
        while True:
            self._idle = True
            char = yield from self.char()
            self._idle = False
            if char in SPACE:
                if len(self._held) > MAX_SPACE:
                    self._release()
                continue
            mark = yield from self._match(char)
            if mark in self.starts:
                self._skipping = False
                return mark
            if mark and (self._skipping or self.num_calls):
                self._skipping = False
                self._held.clear()
            else:
                self._release()

    def _match(self, begun: str) -> Steps[str]:
        """Return the mark that begins with this character. If there is none, return "" and read the mismatching
        character again."""
        length = len(begun)
        while any(mark.startswith(begun) for mark in self._all):
            if begun in self._all:
                return begun
            begun += yield from self.char()
            length += 1
        if length > 1:
            self.unread()
        return ""

    def _release(self) -> None:
        """Release the held text as text, unless it is the rest of a broken call."""
        if not self._skipping:
            self._put(Said, "".join(self._held))
        self._held.clear()

    # --- results

    def _put(self, kind: type[Said | Begun | Argued], text: str) -> None:
        if not text:
            return
        if kind is not Begun and self._runs and self._runs[-1][0] is kind:
            self._runs[-1][1].append(text)
        else:
            self._runs.append((kind, [text]))

    def _take(self) -> list[Found]:
        runs, self._runs = self._runs, []
        return [Over() if kind is Over else kind("".join(parts)) for kind, parts in runs]  # type: ignore[call-arg]


def skip_space(source: Characters) -> Steps[str]:
    """Return the next character that is not whitespace."""
    while True:
        char = yield from source.char()
        if char not in SPACE:
            return char


def expect(source: Characters, text: str) -> Steps[None]:
    """Read exactly this text. Raises NotACall at the first other character."""
    for wanted in text:
        char = yield from source.char()
        if char != wanted:
            raise Broken


def word_until(source: Characters, ends: str) -> Steps[tuple[str, str]]:
    """Read a short word up to one of these characters; returns the word and that character."""
    word: list[str] = []
    while True:
        char = yield from source.char()
        if char in ends:
            return "".join(word), char
        word.append(char)
        if len(word) > _MAX_NAME:
            raise Broken

"""Parses calls written as JSON: ``{"name": …, "arguments": {…}}``, one object or a list.

Arguments are passed on in their original spelling as they arrive. A custom tool's text, ``{"input": "…"}``, is decoded
and passed on as text; so is JSON that a model has put into a string.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from swarm.gateway.tools.reading import SPACE, Broken, Characters, Reader, Steps, skip_space

Put = Callable[[str], None]

_CLOSE = {"{": "}", "[": "]"}
# characters of numbers and words
_SCALAR = frozenset("0123456789+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BETWEEN = _SCALAR | frozenset(SPACE + ",:")  # characters between brackets, outside strings
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "input")


def value(source: Characters, first: str, put: Put) -> Steps[None]:
    """Pass on a JSON value in its original spelling. Checks only that brackets match."""
    if first in _CLOSE:
        yield from _container(source, first, put)
    elif first == '"':
        put(first)
        yield from _raw_string(source, put)
    elif first in _SCALAR:
        char = first
        while char in _SCALAR:
            put(char)
            char = yield from source.char()
        source.unread()
    else:
        raise Broken


def _container(source: Characters, first: str, put: Put) -> Steps[None]:
    put(first)
    closers = [_CLOSE[first]]
    while closers:
        char = yield from source.char()
        if char in _CLOSE:
            closers.append(_CLOSE[char])
        elif char in "}]":
            if char != closers.pop():
                raise Broken
        elif char != '"' and char not in _BETWEEN:
            raise Broken
        put(char)
        if char == '"':
            yield from _raw_string(source, put)


def _raw_string(source: Characters, put: Put) -> Steps[None]:
    """Pass on the rest of a string in its original spelling, with its closing quote."""
    char = ""
    while char != '"':
        char = yield from source.char()
        put(char)
        if char == "\\":
            put((yield from source.char()))


def string(source: Characters, put: Put) -> Steps[None]:
    """Decode the text of a JSON string, after its opening quote."""
    high = ""  # first half of a surrogate pair
    while True:
        char = yield from source.char()
        code = (yield from _escaped(source)) if char == "\\" else char
        if high and "\udc00" <= code <= "\udfff":
            put((high + code).encode("utf-16", "surrogatepass").decode("utf-16"))
            high = ""
            continue
        if high:
            put(_UNKNOWN)
        high = code if "\ud800" <= code <= "\udbff" else ""
        if char == '"':
            return
        if not high:
            put(_UNKNOWN if "\udc00" <= code <= "\udfff" else code)


def _escaped(source: Characters) -> Steps[str]:
    char = yield from source.char()
    if char != "u":
        return _ESCAPES.get(char, char)
    digits = ""
    while len(digits) < 4:
        digit = yield from source.char()
        if digit not in "0123456789abcdefABCDEF":
            raise Broken
        digits += digit
    return chr(int(digits, 16))


class Arguments(Characters):
    """Converts the JSON of a call's arguments, character by character, into the text that is passed on."""

    def __init__(self, custom: bool, put: Put) -> None:
        super().__init__()
        self._put = put
        self._main: Generator[None, str, None] | None = self._custom() if custom else self._json()
        next(self._main)

    def push(self, text: str) -> None:
        for char in text:
            if self._main is None:
                return
            try:
                self._main.send(char)
            except (StopIteration, Broken):
                self._main = None

    def _json(self) -> Steps[None]:
        char = yield from self.char()
        if char == '"':
            yield from string(self, self._put)
        elif char != "n":  # null means no arguments
            while True:
                self._put(char)
                char = yield from self.char()

    def _custom(self) -> Steps[None]:
        char = yield from self.char()
        if char == '"':
            yield from string(self, self._put)
        elif char == "{":
            yield from members(self, self._member)
        else:
            yield from value(self, char, self._put)

    def _member(self, key: str, first: str) -> Steps[None]:
        if key == "input" and first == '"':
            yield from string(self, self._put)
        else:
            yield from value(self, first, _ignore)


def _ignore(_: str) -> None:
    pass


def members(source: Characters, member: Callable[[str, str], Steps[None]]) -> Steps[None]:
    """Read the members of an object, after its ``{``. ``member`` reads each value, given its key and first
    character."""
    char = yield from skip_space(source)
    while char != "}":
        if char != '"':
            raise Broken
        key: list[str] = []
        yield from string(source, key.append)
        if (yield from skip_space(source)) != ":":
            raise Broken
        yield from member("".join(key), (yield from skip_space(source)))
        char = yield from skip_space(source)
        if char == ",":
            char = yield from skip_space(source)
        elif char != "}":
            raise Broken


class _Call:
    """Parser of one call's object. After a mark, a name makes it a call. Without a mark (``bare``), it must be the name
    of an offered tool, with arguments."""

    def __init__(self, reader: Reader, bare: bool) -> None:
        self._reader = reader
        self._bare = bare
        self._name = ""
        self._early: list[str] | None = None  # arguments that came before the name
        self._begun = False
        self._has_arguments = False

    def read(self) -> Steps[None]:
        yield from members(self._reader, self._member)
        if not self._begun:
            raise Broken
        end(self._reader, self._name)

    def _member(self, key: str, first: str) -> Steps[None]:
        if key == "function" and first == "{":  # the form in which clients write calls
            yield from members(self._reader, self._member)
        elif key in _NAMES and first == '"' and not self._name:
            name: list[str] = []
            yield from string(self._reader, name.append)
            self._set_name("".join(name))
        elif key in _ARGUMENTS and not self._name:
            self._early = []
            yield from value(self._reader, first, self._early.append)
        elif key in _ARGUMENTS and not self._has_arguments:
            self._begin()
            self._has_arguments = True
            yield from value(self._reader, first, sink(self._reader, self._name))
        else:
            yield from value(self._reader, first, _ignore)

    def _set_name(self, name: str) -> None:
        self._name = name
        if self._bare and self._reader.tool(name) is None:
            raise Broken
        if not self._bare or self._early is not None:
            self._begin()
        if self._early is not None:
            self._has_arguments = True
            sink(self._reader, name)("".join(self._early))

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._reader.begin(self._name)


def sink(reader: Reader, name: str) -> Put:
    """Return the function that receives the JSON of a call's arguments."""
    tool = reader.tool(name.strip(SPACE))
    return Arguments(tool is not None and tool.custom, reader.argue).push


def end(reader: Reader, name: str) -> None:
    """End a tool call. A function's arguments are an object even if the model wrote none."""
    tool = reader.tool(name.strip(SPACE))
    if not reader.has_argued and not (tool is not None and tool.custom):
        reader.argue("{}")
    reader.over()


def call_object(reader: Reader, *, bare: bool = False) -> Steps[None]:
    """Read one call, after its ``{``."""
    yield from _Call(reader, bare).read()


def call_or_list(reader: Reader) -> Steps[None]:
    """Read one call, or several in brackets."""
    first = yield from skip_space(reader)
    if first == "{":
        yield from call_object(reader)
    elif first == "[":
        yield from _call_list(reader)
    else:
        raise Broken


def _call_list(reader: Reader) -> Steps[None]:
    before = reader.num_calls
    char = yield from skip_space(reader)
    while char == "{":
        yield from call_object(reader)
        char = yield from skip_space(reader)
        if char == ",":
            reader.forget()
            char = yield from skip_space(reader)
    if char != "]" or reader.num_calls == before:
        raise Broken
    reader.forget()

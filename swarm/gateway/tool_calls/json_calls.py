"""Parses calls written as JSON: ``{"name": …, "arguments": {…}}``, one object or a list.

Arguments are passed on in their original spelling as they arrive. A custom tool's text, ``{"input": "…"}``, is decoded
and passed on as text; so is JSON that a model has put into a string.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from swarm.gateway.tool_calls.parser import SPACE, BaseToolCallParser, CharacterSource, NotACall, ParseSteps, skip_space

TextSink = Callable[[str], None]

_CLOSE = {"{": "}", "[": "]"}
# characters of numbers and words
_SCALAR = frozenset("0123456789+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BETWEEN = _SCALAR | frozenset(SPACE + ",:")  # characters between brackets, outside strings
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "input")


def pass_value(source: CharacterSource, first: str, put: TextSink) -> ParseSteps[None]:
    """Pass on a JSON value in its original spelling. Checks only that brackets match."""
    if first in _CLOSE:
        yield from _pass_container(source, first, put)
    elif first == '"':
        put(first)
        yield from _pass_string(source, put)
    elif first in _SCALAR:
        char = first
        while char in _SCALAR:
            put(char)
            char = yield from source.next_char()
        source.unread()
    else:
        raise NotACall


def _pass_container(source: CharacterSource, first: str, put: TextSink) -> ParseSteps[None]:
    put(first)
    closers = [_CLOSE[first]]
    while closers:
        char = yield from source.next_char()
        if char in _CLOSE:
            closers.append(_CLOSE[char])
        elif char in "}]":
            if char != closers.pop():
                raise NotACall
        elif char != '"' and char not in _BETWEEN:
            raise NotACall
        put(char)
        if char == '"':
            yield from _pass_string(source, put)


def _pass_string(source: CharacterSource, put: TextSink) -> ParseSteps[None]:
    """Pass on the rest of a string in its original spelling, with its closing quote."""
    char = ""
    while char != '"':
        char = yield from source.next_char()
        put(char)
        if char == "\\":
            put((yield from source.next_char()))


def decode_string(source: CharacterSource, put: TextSink) -> ParseSteps[None]:
    """Decode the text of a JSON string, after its opening quote."""
    high = ""  # first half of a surrogate pair
    while True:
        char = yield from source.next_char()
        code = (yield from _read_escape(source)) if char == "\\" else char
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


def _read_escape(source: CharacterSource) -> ParseSteps[str]:
    char = yield from source.next_char()
    if char != "u":
        return _ESCAPES.get(char, char)
    digits = ""
    while len(digits) < 4:
        digit = yield from source.next_char()
        if digit not in "0123456789abcdefABCDEF":
            raise NotACall
        digits += digit
    return chr(int(digits, 16))


class ArgumentDecoder(CharacterSource):
    """Converts the JSON of a call's arguments, character by character, into the text that is passed on."""

    def __init__(self, custom: bool, put: TextSink) -> None:
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
            except (StopIteration, NotACall):
                self._main = None

    def _json(self) -> ParseSteps[None]:
        char = yield from self.next_char()
        if char == '"':
            yield from decode_string(self, self._put)
        elif char != "n":  # null means no arguments
            while True:
                self._put(char)
                char = yield from self.next_char()

    def _custom(self) -> ParseSteps[None]:
        char = yield from self.next_char()
        if char == '"':
            yield from decode_string(self, self._put)
        elif char == "{":
            yield from read_members(self, self._member)
        else:
            yield from pass_value(self, char, self._put)

    def _member(self, key: str, first: str) -> ParseSteps[None]:
        if key == "input" and first == '"':
            yield from decode_string(self, self._put)
        else:
            yield from pass_value(self, first, _ignore)


def _ignore(_: str) -> None:
    pass


def read_members(source: CharacterSource, member: Callable[[str, str], ParseSteps[None]]) -> ParseSteps[None]:
    """Read the members of an object, after its ``{``. ``member`` reads each value, given its key and first
    character."""
    char = yield from skip_space(source)
    while char != "}":
        if char != '"':
            raise NotACall
        key: list[str] = []
        yield from decode_string(source, key.append)
        if (yield from skip_space(source)) != ":":
            raise NotACall
        yield from member("".join(key), (yield from skip_space(source)))
        char = yield from skip_space(source)
        if char == ",":
            char = yield from skip_space(source)
        elif char != "}":
            raise NotACall


class _CallParser:
    """Parser of one call's object. After a mark, a name makes it a call. Without a mark (``bare``), it must be the name
    of an offered tool, with arguments."""

    def __init__(self, reader: BaseToolCallParser, bare: bool) -> None:
        self._reader = reader
        self._bare = bare
        self._name = ""
        self._early_arguments: list[str] | None = None  # arguments that came before the name
        self._has_begun = False
        self._has_arguments = False

    def parse(self) -> ParseSteps[None]:
        yield from read_members(self._reader, self._member)
        if not self._has_begun:
            raise NotACall
        finish_call(self._reader, self._name)

    def _member(self, key: str, first: str) -> ParseSteps[None]:
        if key == "function" and first == "{":  # the form in which clients write calls
            yield from read_members(self._reader, self._member)
        elif key in _NAMES and first == '"' and not self._name:
            name: list[str] = []
            yield from decode_string(self._reader, name.append)
            self._set_name("".join(name))
        elif key in _ARGUMENTS and not self._name:
            self._early_arguments = []
            yield from pass_value(self._reader, first, self._early_arguments.append)
        elif key in _ARGUMENTS and not self._has_arguments:
            self._begin()
            self._has_arguments = True
            yield from pass_value(self._reader, first, argument_sink(self._reader, self._name))
        else:
            yield from pass_value(self._reader, first, _ignore)

    def _set_name(self, name: str) -> None:
        self._name = name
        if self._bare and self._reader.find_tool(name) is None:
            raise NotACall
        if not self._bare or self._early_arguments is not None:
            self._begin()
        if self._early_arguments is not None:
            self._has_arguments = True
            argument_sink(self._reader, name)("".join(self._early_arguments))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._reader.begin_call(self._name)


def argument_sink(reader: BaseToolCallParser, name: str) -> TextSink:
    """Return the function that receives the JSON of a call's arguments."""
    tool = reader.find_tool(name.strip(SPACE))
    return ArgumentDecoder(tool is not None and tool.custom, reader.add_arguments).push


def finish_call(reader: BaseToolCallParser, name: str) -> None:
    """End a tool call. If the model wrote no arguments for a function, its arguments become an empty object."""
    tool = reader.find_tool(name.strip(SPACE))
    if not reader.has_arguments and not (tool is not None and tool.custom):
        reader.add_arguments("{}")
    reader.end_call()


def read_call(reader: BaseToolCallParser, *, bare: bool = False) -> ParseSteps[None]:
    """Read one call, after its ``{``."""
    yield from _CallParser(reader, bare).parse()


def read_call_or_list(reader: BaseToolCallParser) -> ParseSteps[None]:
    """Read one call, or several in brackets."""
    first = yield from skip_space(reader)
    if first == "{":
        yield from read_call(reader)
    elif first == "[":
        yield from _read_call_list(reader)
    else:
        raise NotACall


def _read_call_list(reader: BaseToolCallParser) -> ParseSteps[None]:
    before = reader.num_calls_ended
    char = yield from skip_space(reader)
    while char == "{":
        yield from read_call(reader)
        char = yield from skip_space(reader)
        if char == ",":
            reader.drop_held()
            char = yield from skip_space(reader)
    if char != "]" or reader.num_calls_ended == before:
        raise NotACall
    reader.drop_held()

"""Parses calls written as Python, ``[f(a=1, b="x"), g()]``, and converts their arguments to JSON as they arrive."""

from __future__ import annotations

import json

from swarm.gateway.tool_calls.json_calls import TextSink, argument_sink, finish_call
from swarm.gateway.tool_calls.parser import (
    SPACE,
    BaseToolCallParser,
    CharacterSource,
    NotACall,
    ParseSteps,
    skip_space,
    word_until,
)

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}  # escapes, and the number of hexadecimal digits after them
_NUMBER = "0123456789+-.eE_"
_CLOSE = {"[": "]", "(": ")"}


def read_python_calls(reader: BaseToolCallParser) -> ParseSteps[None]:
    """Read calls of offered tools, after the ``[``."""
    before = reader.num_calls_ended
    char = yield from skip_space(reader)
    while char not in "]":
        reader.unread()
        yield from _read_call(reader)
        char = yield from skip_space(reader)
        if char == ",":
            reader.drop_held()
            char = yield from skip_space(reader)
        elif char != "]":
            raise NotACall
    if reader.num_calls_ended == before:
        raise NotACall
    reader.drop_held()


def _read_call(reader: BaseToolCallParser) -> ParseSteps[None]:
    name, _ = yield from word_until(reader, "(")
    name = name.strip(SPACE)
    if reader.find_tool(name) is None:
        raise NotACall
    reader.begin_call(name)
    put = argument_sink(reader, name)
    put("{")
    separator = ""
    char = yield from skip_space(reader)
    while char != ")":
        reader.unread()
        key, _ = yield from word_until(reader, "=")
        if not key.strip(SPACE).isidentifier():
            raise NotACall
        put(f"{separator}{json.dumps(key.strip(SPACE), ensure_ascii=False)}: ")
        yield from _convert_value(reader, (yield from skip_space(reader)), put)
        separator = ", "
        char = yield from _next_item(reader, ")")
    put("}")
    finish_call(reader, name)


def _next_item(source: CharacterSource, close: str) -> ParseSteps[str]:
    """Return the first character of the next item, or the closing bracket."""
    char = yield from skip_space(source)
    if char == ",":
        char = yield from skip_space(source)
    elif char != close:
        raise NotACall
    return char


def _convert_value(source: CharacterSource, first: str, put: TextSink) -> ParseSteps[None]:
    """Convert a Python literal to JSON."""
    if first in "\"'":
        yield from _convert_string(source, first, put)
    elif first in _CLOSE:
        yield from _convert_list(source, _CLOSE[first], put)
    elif first == "{":
        yield from _convert_dict(source, put)
    elif first in _NUMBER[:13]:
        yield from _convert_number(source, first, put)
    else:
        yield from _convert_word(source, first, put)


def _convert_string(source: CharacterSource, quote: str, put: TextSink) -> ParseSteps[None]:
    put('"')
    char = yield from source.next_char()
    while char != quote:
        text = (yield from _read_escape(source)) if char == "\\" else char
        put(json.dumps(text, ensure_ascii=False)[1:-1])
        char = yield from source.next_char()
    put('"')


def _read_escape(source: CharacterSource) -> ParseSteps[str]:
    char = yield from source.next_char()
    if char not in _CODES:
        return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
    digits = ""
    for _ in range(_CODES[char]):
        digits += yield from source.next_char()
    try:
        return chr(int(digits, 16)).encode("utf-8", "replace").decode()
    except (ValueError, OverflowError):
        raise NotACall from None


def _convert_list(source: CharacterSource, close: str, put: TextSink) -> ParseSteps[None]:
    put("[")
    separator = ""
    char = yield from skip_space(source)
    while char != close:
        put(separator)
        yield from _convert_value(source, char, put)
        separator = ", "
        char = yield from _next_item(source, close)
    put("]")


def _convert_dict(source: CharacterSource, put: TextSink) -> ParseSteps[None]:
    put("{")
    separator = ""
    char = yield from skip_space(source)
    while char != "}":
        if char not in "\"'":
            raise NotACall
        put(separator)
        yield from _convert_string(source, char, put)
        if (yield from skip_space(source)) != ":":
            raise NotACall
        put(": ")
        yield from _convert_value(source, (yield from skip_space(source)), put)
        separator = ", "
        char = yield from _next_item(source, "}")
    put("}")


def _convert_number(source: CharacterSource, first: str, put: TextSink) -> ParseSteps[None]:
    digits = first
    char = yield from source.next_char()
    while char in _NUMBER and len(digits) < 64:
        digits += char
        char = yield from source.next_char()
    source.unread()
    text = digits.replace("_", "").removeprefix("+")
    try:
        json.loads(text)
    except ValueError:
        text = _to_json_float(text)
    put(text)


def _to_json_float(text: str) -> str:
    """Return a number that is valid in Python but not in JSON, such as ``.5``, in JSON's form."""
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        raise NotACall from None


def _convert_word(source: CharacterSource, first: str, put: TextSink) -> ParseSteps[None]:
    word = ""
    char = first
    while char.isalpha() and len(word) < 8:
        word += char
        char = yield from source.next_char()
    source.unread()
    if word not in _WORDS:
        raise NotACall
    put(_WORDS[word])

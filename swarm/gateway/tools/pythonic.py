"""Parses calls written as Python, ``[f(a=1, b="x"), g()]``, and converts their arguments to JSON as they arrive."""

from __future__ import annotations

import json

from swarm.gateway.tools.objects import Put, end, sink
from swarm.gateway.tools.reading import SPACE, Broken, Characters, Reader, Steps, skip_space, word_until

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}  # escapes, and the number of hexadecimal digits after them
_NUMBER = "0123456789+-.eE_"
_CLOSE = {"[": "]", "(": ")"}


def python_calls(reader: Reader) -> Steps[None]:
    """Read calls of offered tools, after the ``[``."""
    before = reader.num_calls
    char = yield from skip_space(reader)
    while char not in "]":
        reader.unread()
        yield from _call(reader)
        char = yield from skip_space(reader)
        if char == ",":
            reader.forget()
            char = yield from skip_space(reader)
        elif char != "]":
            raise Broken
    if reader.num_calls == before:
        raise Broken
    reader.forget()


def _call(reader: Reader) -> Steps[None]:
    name, _ = yield from word_until(reader, "(")
    name = name.strip(SPACE)
    if reader.tool(name) is None:
        raise Broken
    reader.begin(name)
    put = sink(reader, name)
    put("{")
    separator = ""
    char = yield from skip_space(reader)
    while char != ")":
        reader.unread()
        key, _ = yield from word_until(reader, "=")
        if not key.strip(SPACE).isidentifier():
            raise Broken
        put(f"{separator}{json.dumps(key.strip(SPACE), ensure_ascii=False)}: ")
        yield from _value(reader, (yield from skip_space(reader)), put)
        separator = ", "
        char = yield from _next_item(reader, ")")
    put("}")
    end(reader, name)


def _next_item(source: Characters, close: str) -> Steps[str]:
    """Return the first character of the next item, or the closing bracket."""
    char = yield from skip_space(source)
    if char == ",":
        char = yield from skip_space(source)
    elif char != close:
        raise Broken
    return char


def _value(source: Characters, first: str, put: Put) -> Steps[None]:
    """Convert a Python literal to JSON."""
    if first in "\"'":
        yield from _string(source, first, put)
    elif first in _CLOSE:
        yield from _list(source, _CLOSE[first], put)
    elif first == "{":
        yield from _dict(source, put)
    elif first in _NUMBER[:13]:
        yield from _number(source, first, put)
    else:
        yield from _word(source, first, put)


def _string(source: Characters, quote: str, put: Put) -> Steps[None]:
    put('"')
    char = yield from source.char()
    while char != quote:
        text = (yield from _escaped(source)) if char == "\\" else char
        put(json.dumps(text, ensure_ascii=False)[1:-1])
        char = yield from source.char()
    put('"')


def _escaped(source: Characters) -> Steps[str]:
    char = yield from source.char()
    if char not in _CODES:
        return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
    digits = ""
    for _ in range(_CODES[char]):
        digits += yield from source.char()
    try:
        return chr(int(digits, 16)).encode("utf-8", "replace").decode()
    except (ValueError, OverflowError):
        raise Broken from None


def _list(source: Characters, close: str, put: Put) -> Steps[None]:
    put("[")
    separator = ""
    char = yield from skip_space(source)
    while char != close:
        put(separator)
        yield from _value(source, char, put)
        separator = ", "
        char = yield from _next_item(source, close)
    put("]")


def _dict(source: Characters, put: Put) -> Steps[None]:
    put("{")
    separator = ""
    char = yield from skip_space(source)
    while char != "}":
        if char not in "\"'":
            raise Broken
        put(separator)
        yield from _string(source, char, put)
        if (yield from skip_space(source)) != ":":
            raise Broken
        put(": ")
        yield from _value(source, (yield from skip_space(source)), put)
        separator = ", "
        char = yield from _next_item(source, "}")
    put("}")


def _number(source: Characters, first: str, put: Put) -> Steps[None]:
    digits = first
    char = yield from source.char()
    while char in _NUMBER and len(digits) < 64:
        digits += char
        char = yield from source.char()
    source.unread()
    text = digits.replace("_", "").removeprefix("+")
    try:
        json.loads(text)
    except ValueError:
        text = _as_float(text)
    put(text)


def _as_float(text: str) -> str:
    """Return a number that is valid in Python but not in JSON, such as ``.5``, in JSON's form."""
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        raise Broken from None


def _word(source: Characters, first: str, put: Put) -> Steps[None]:
    word = ""
    char = first
    while char.isalpha() and len(word) < 8:
        word += char
        char = yield from source.char()
    source.unread()
    if word not in _WORDS:
        raise Broken
    put(_WORDS[word])

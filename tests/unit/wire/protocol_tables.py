"""Generate the tables of docs/reference/protocol.md from the messages of the client interface.

python -m tests.unit.wire.protocol_tables       # all of them, without meanings: to begin a page, or a new message
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from swarm.params import _RANGES, SamplingParams
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.schema import published_name

_SHARED = ("v", "epoch", "lineage", "cause")  # of every message; told once
NAMED_TYPES = {  # The page defines these names once.
    "text (1 to 128)": "id",
    "text like `^[0-9a-f]{64}$`": "key",
    "int 0 to 2^31−1": "token",
    "int 0 to 1,048,576": "position",
    "int 0 to 2^63−1": "whole",
}


def kinds() -> dict[str, type[msgspec.Struct]]:
    """The messages of the door, either way, by the names that they have on the wire."""
    return {str(struct.__struct_config__.tag): struct for struct in (*CLIENT.structs, *SERVER.structs)}


def records() -> dict[str, type[msgspec.Struct]]:
    """What stands inside messages, by the names that the page gives them."""
    found: dict[str, type[msgspec.Struct]] = {}
    for kind in kinds().values():
        _collect(inspect.type_info(kind), found, is_record=False)
    return dict(sorted(found.items()))


def table(struct: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Type and default (empty: it must be given) of each field, in the order of arrays."""
    shape = inspect.type_info(struct)
    assert isinstance(shape, inspect.StructType)
    shared = _SHARED if struct in kinds().values() else ()
    return {
        field.encode_name: (_type_of(struct, field), _default(field))
        for field in shape.fields
        if field.name not in shared
    }


def is_array(struct: type[msgspec.Struct]) -> bool:
    return struct.__struct_config__.array_like


def _collect(shape: inspect.Type, found: dict[str, type[msgspec.Struct]], *, is_record: bool = True) -> None:
    if isinstance(shape, inspect.StructType):
        if is_record and shape.cls not in kinds().values():
            found[_snake(shape.cls)] = shape.cls
        for field in shape.fields:
            _collect(field.type, found)
    for inner in _inside(shape):
        _collect(inner, found)


def _inside(shape: inspect.Type) -> Iterator[inspect.Type]:
    for name in ("item_type", "key_type", "value_type"):
        if isinstance(inner := getattr(shape, name, None), inspect.Type):
            yield inner
    yield from getattr(shape, "types", ())


def _snake(struct: type) -> str:
    name = published_name(struct.__name__)
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")


def _type_of(struct: type[msgspec.Struct], field: inspect.Field) -> str:
    """Of sampling parameters, some bounds are not in the annotations, for a better error."""
    for name, low, high in _RANGES:
        if struct is SamplingParams and name == field.name:
            kind = inspect.FloatType if "float" in str(SamplingParams.__annotations__[name]) else inspect.IntType
            shown = _written(kind(ge=low, le=high))
            return shown + (" or nil" if isinstance(field.type, inspect.UnionType) else "")
    return _written(field.type)


def _written(shape: inspect.Type) -> str:
    text = _spelled_out(shape)
    return NAMED_TYPES.get(text, text)


def _spelled_out(shape: inspect.Type) -> str:  # noqa: PLR0911 (one line per kind of type)
    match shape:
        case inspect.IntType() | inspect.FloatType():
            return f"{'int' if isinstance(shape, inspect.IntType) else 'float'}{_bounds(shape)}"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "nil"
        case inspect.StrType(pattern=str(pattern)):
            return f"text like `{pattern}`"
        case inspect.StrType():
            return "text" + _lengths(shape)
        case inspect.BytesType():
            return "bytes" + _lengths(shape)
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" if value != "" else '`""`' for value in values)
        case inspect.VarTupleType(item_type=item):
            return f"array{_lengths(shape)} of {_written(item)}"
        case inspect.DictType(key_type=key, value_type=value):
            return "map" if isinstance(value, inspect.CustomType) else f"map of {_written(key)} to {_written(value)}"
        case inspect.UnionType(types=types):
            return " or ".join(map(_written, sorted(types, key=lambda each: isinstance(each, inspect.NoneType))))
        case inspect.StructType(cls=cls):
            return f"[{_name(cls)}](#{_name(cls)})"
    raise TypeError(f"{shape} has no words yet: add them here")


def _name(struct: type[Any]) -> str:
    tag = struct.__struct_config__.tag
    return str(tag) if tag else _snake(struct)


def _bounds(shape: inspect.IntType | inspect.FloatType) -> str:
    low, high = shape.ge, shape.le
    if isinstance(shape, inspect.IntType) and shape.lt is not None:
        high = shape.lt - 1
    if shape.gt is not None:
        return f" above {_number(shape.gt)}" + (f", to {_number(high)}" if high is not None else "")
    if high is not None:
        return f" {_number(low)} to {_number(high)}"
    return "" if low is None else f" from {_number(low)}"


def _lengths(shape: inspect.StrType | inspect.BytesType | inspect.VarTupleType) -> str:
    if shape.max_length is None:
        return ""
    low = f"{shape.min_length} to" if shape.min_length else "at most"
    return f" ({low} {_number(shape.max_length)})"


def _number(value: float | None) -> str:
    """A large power of two as such: nobody reads nineteen digits."""
    assert value is not None
    whole = int(value)
    if whole == value and whole > 1 << 21:
        for offset, shown in ((0, ""), (1, "−1")):
            if (power := whole + offset).bit_count() == 1:
                return f"2^{power.bit_length() - 1}{shown}"
    return f"{whole:,}" if whole == value else f"{value:g}"


def _default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{_literal(field.default_factory())}`"
    return "" if field.default is msgspec.NODEFAULT else f"`{_literal(field.default)}`"


def _literal(value: object) -> str:
    """As JSON would write it."""
    return msgspec.json.encode(value).decode().replace(",", ", ").replace("null", "nil")


def main() -> None:
    for name, struct in (*kinds().items(), *records().items()):
        print(f"\n#### {name}\n\n|field|type|default||\n|---|---|---|---|")
        for field, (kind, default) in table(struct).items():
            print(f"|`{field}`|{kind}|{default}||")


if __name__ == "__main__":
    main()

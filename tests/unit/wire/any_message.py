"""Hypothesis strategies for every message, made from the messages' own annotations."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec import inspect

from swarm.wire import codec, tensors
from swarm.wire.messages import Message, Step

DOORS = (codec.CLIENT, codec.SERVER, codec.WORKER, codec.ORDER, codec.HEARTBEAT, codec.DATA)
KINDS = [(door, struct) for door in DOORS for struct in door.structs]

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def messages_of(struct: type[Message]) -> st.SearchStrategy[tuple[Any, bytes | None]]:
    """Messages of one kind, each with the payload that fits it."""
    return st.builds(_fitted, _values(inspect.type_info(struct)), st.booleans(), st.integers(1, 3))


any_message = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind[0]), messages_of(kind[1])))


def _fitted(message: Any, checked: bool, width: int) -> tuple[Any, bytes | None]:
    """Make the parts agree that the annotations can't tie together: rows and tokens, specs and payloads."""
    if isinstance(message, Step):
        rows = tuple(msgspec.structs.replace(row, count=row.count % 4 + 1) for row in message.rows)
        num_tokens = sum(row.count for row in rows)
        message = msgspec.structs.replace(message, rows=rows, tokens=tuple(range(num_tokens)))
    else:
        num_tokens = 2
    field = next((name for name in ("tensor", "payload") if getattr(message, name, None) is not None), None)
    if field is None:
        return message, None
    if field == "payload":
        data = b"abc" * width
        return msgspec.structs.replace(message, payload=tensors.pack_bytes(data, checked=checked)), data
    array = np.arange(num_tokens * width, dtype=np.float32).reshape(num_tokens, width)
    spec, view = tensors.pack(array, message.tensor.dtype, checked=checked)
    return msgspec.structs.replace(message, tensor=spec), bytes(view)


def _values(shape: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911, PLR0912 (one line per kind of type)
    match shape:
        case inspect.IntType():
            low = shape.ge if shape.ge is not None else -(2**63)
            high = shape.le if shape.le is not None else (shape.lt or 2**64) - 1
            return st.integers(low, high)
        case inspect.FloatType():
            low_float = shape.gt if shape.gt is not None else shape.ge
            return st.floats(low_float, shape.le, allow_nan=False, exclude_min=shape.gt is not None)
        case inspect.StrType():
            if shape.pattern is not None:
                return st.from_regex(shape.pattern, fullmatch=True)
            return st.text(min_size=shape.min_length or 0, max_size=min(8, shape.max_length or 8))
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.VarTupleType():
            return st.lists(_values(shape.item_type), min_size=shape.min_length or 0, max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_values(shape.key_type), _values(shape.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(shape.values)
        case inspect.UnionType():
            return st.one_of([_values(kind) for kind in shape.types])
        case inspect.StructType():
            return st.builds(shape.cls, **{field.name: _values(field.type) for field in shape.fields})
        case inspect.CustomType(cls=cls) if cls is object:
            return _json
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise NotImplementedError(f"no strategy for {shape}")

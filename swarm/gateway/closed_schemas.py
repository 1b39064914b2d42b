"""Closes JSON schemas: an object of an answer has the properties that its schema names, and no others. Pure.

JSON Schema allows any further property unless a schema forbids it, so a model that follows the grammar of an open
schema may never end. A schema that allows further properties itself stays as it is, and so does one that combines
schemas of the same object, where each part names only some of the properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# keywords of an object that allow or restrict further properties
_OWN_RULES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
# keywords that apply further schemas to the same object
_COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")  # keywords whose value is a schema
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def close_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with ``additionalProperties: false`` in each object that names its properties. A schema that is
    nested too deep stays as it is."""
    try:
        return dict(schema) if any(map(_combines, _subschemas(schema))) else _close(schema)
    except RecursionError:
        return dict(schema)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and every schema inside it."""
    pending = [schema]
    while pending:
        current = pending.pop()
        yield current
        for key in _SCHEMA_MAPS:
            pending += _only_schemas(dict(current[key]).values() if isinstance(current.get(key), Mapping) else ())
        for key in _SCHEMA_LISTS:
            pending += _only_schemas(current[key] if isinstance(current.get(key), list) else ())
        pending += _only_schemas(current.get(key) for key in _SCHEMAS)


def _only_schemas(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)]


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas apply to the same object."""
    num_parts = len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    has_properties = bool(schema.get("properties"))
    return num_parts > 1 or (has_properties and any(key in schema for key in _COMBINING))


def _close(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = dict(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(closed.get(key), Mapping):
            closed[key] = {name: _close_value(value) for name, value in closed[key].items()}
    for key in _SCHEMA_LISTS:
        if isinstance(closed.get(key), list):
            closed[key] = [_close_value(value) for value in closed[key]]
    for key in _SCHEMAS:
        if key in closed:
            closed[key] = _close_value(closed[key])
    if _names_all(closed):
        closed["additionalProperties"] = False
    return closed


def _close_value(value: Any) -> Any:
    return _close(value) if isinstance(value, Mapping) else value


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether the schema is of an object and names all properties that it has rules for."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties or any(key in schema for key in _OWN_RULES):
        return False
    required = schema.get("required", ())
    return isinstance(required, list | tuple) and all(name in properties for name in required)

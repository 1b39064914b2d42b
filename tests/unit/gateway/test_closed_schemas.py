"""Objects of an answer have the properties that their schema names, unless it allows others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.demo import model_path
from swarm.gateway.apis.bodies import json_grammar
from swarm.gateway.closed_schemas import close_schema
from swarm.grammar import compile_grammar, grammar_vocabulary

Json = dict[str, Any]
A: Json = {"properties": {"a": {"type": "integer"}}}
CLOSED_A: Json = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        (A | {"required": ["a"]}, CLOSED_A | {"required": ["a"]}),
        ({"properties": {"b": A}}, {"properties": {"b": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A], "items": False}, {"prefixItems": [CLOSED_A], "items": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}}),
        ({"allOf": [{"$ref": "#"}], "$defs": {"A": A}}, {"allOf": [{"$ref": "#"}], "$defs": {"A": CLOSED_A}}),
        (A | {"additionalProperties": A}, A | {"additionalProperties": CLOSED_A}),
    ],
)  # fmt: skip
def test_objects_are_closed(schema: Json, closed: Json) -> None:
    before = json.dumps(schema)
    assert close_schema(schema) == closed
    assert close_schema(closed) == closed
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        A | {"additionalProperties": True},
        A | {"patternProperties": {"^b": {}}},
        A | {"required": ["a", "b"]},
        A | {"allOf": [{"required": ["b"]}]},
        A | {"$ref": "#/$defs/B", "$defs": {"B": A}},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}], "$defs": {"A": A}},
        {"const": A},
        {"enum": [A]},
        {"default": A, "examples": [A]},
        {"items": 5, "properties": 7, "anyOf": "x", "required": "a"},
    ],
)
def test_an_object_that_may_have_others_stays_open(schema: Json) -> None:
    """So does one whose properties are named by several schemas together, and what is no schema stays as it is."""
    assert close_schema(schema) == schema


def test_a_schema_that_is_nested_too_deep_stays_as_it_is() -> None:
    deep: Json = A
    for _ in range(5000):
        deep = {"items": deep}
    assert close_schema(deep) == {"items": deep["items"]}


def test_an_answer_has_no_property_that_its_schema_does_not_name() -> None:
    words = grammar_vocabulary((model_path() / "tokenizer.json").read_text(), ())
    for schema, may in ((A, False), (A | {"additionalProperties": True}, True)):
        state = compile_grammar(json_grammar(schema), words)
        assert state.consume_tokens(words.tokenize_str('{"')) is True
        taken = state.try_consume_tokens(words.tokenize_str("b"))
        assert bool(taken) is may

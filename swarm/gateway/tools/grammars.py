"""The grammars by which a model is made to call: Lark rules in llguidance's dialect.

A mark that is a token of the model beside its vocabulary (a special one, or one that was added) is written as that
token; any other as text. Arguments follow the tool's
JSON schema, with at most one space where JSON takes any whitespace, so that nothing grows without bound but what the
schema leaves open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.errors import InvalidRequest
from swarm.gateway.ask import Tool, ToolUse
from swarm.params import MAX_GRAMMAR, Grammar

MAX_CALLS = 16  # that a forced answer may have: a model that sees no end must not go on for ever

_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_OPEN = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")

Added = Mapping[str, int]  # the model's special and added tokens by their texts


def literal(text: str) -> str:
    """This text, in a rule."""
    return json.dumps(text, ensure_ascii=False)


def mark(text: str, added: Added) -> str:
    """A mark in a rule: the token if it is one."""
    return f"<[{added[text]}]>" if text in added else literal(text)


def json_of(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A value by this schema, in a rule. ``lenient``: keywords that can't be enforced are passed over."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_SPACING, "lenient": lenient}}, ensure_ascii=False)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments as they stand in JSON: always an object."""
    if tool.custom:
        return {
            "type": "object",
            "properties": {"input": _text_schema(tool)},
            "required": ["input"],
            "additionalProperties": False,
        }
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"the parameters of the tool {tool.name!r} must be a schema of type object", code="tools")
    schema = {**tool.parameters, "type": "object"}
    if _is_closed(schema):
        schema["additionalProperties"] = False
    return schema


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """Are all properties named right here? Then a forced call keeps to them, unless the schema says otherwise."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or any(key in schema for key in _OPEN):
        return False
    return set(schema.get("required", ())) <= set(properties)


def arguments_rule(tool: Tool) -> str:
    """The arguments of a call, as JSON, in a rule."""
    return json_of(arguments_schema(tool), lenient=not tool.strict)


def _text_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a custom tool's text, which stands in JSON as a string."""
    grammar = tool.grammar
    if grammar is None:
        return {"type": "string"}
    if grammar.kind == "regex":
        return {"type": "string", "pattern": f"^(?:{grammar.text})$"}
    if grammar.kind == "choice":
        return {"enum": json.loads(grammar.text)}
    raise InvalidRequest(
        f"the model writes the text of the tool {tool.name!r} as a JSON string, for which a grammar of kind "
        f"{grammar.kind} can't be forced: use a regular expression, or tool_choice auto",
        code="tools",
    )


def callable_tools(use: ToolUse) -> tuple[Tool, ...]:
    """The tools that a forced answer may call. Raises InvalidRequest if there are none."""
    tools = use.tools
    if use.choice == "named":
        tools = tuple(tool for tool in use.tools if tool.name == use.named)
    if not tools:
        raise InvalidRequest(f"tool_choice names {use.named!r}, which is not in tools", code="tool_choice")
    return tools


def several(use: ToolUse) -> bool:
    """May a forced answer have several calls? A named tool is called once."""
    return use.parallel and use.choice != "named"


def one_of(use: ToolUse, body: Callable[[Tool, str], Sequence[str]]) -> list[str]:
    """Rules by which ``call`` is a call of any tool that may be called. ``body`` writes the rules of one tool, of which
    the first begins with the given name."""
    tools = callable_tools(use)
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        rules += body(tool, f"call_{number}")
    return rules


def grammar(start: str, rules: Sequence[str], use: ToolUse, between: str = "") -> Grammar:
    """The grammar with these rules. ``start`` has ``{calls}`` where calls stand, ``between`` is what parts them."""
    again = f"({between} call)" if between else "call"
    calls = f"call {again}{{0,{MAX_CALLS - 1}}}" if several(use) else "call"
    text = "\n".join(["%llguidance {}", "start: " + start.replace("{calls}", calls), *rules])
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"the tools' schemas make a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are taken: offer "
            "fewer tools, or name one in tool_choice",
            code="tools",
        )
    return Grammar(kind="ebnf", text=text)


def json_call(name_key: str, arguments_key: str) -> Callable[[Tool, str], Sequence[str]]:
    """Rules of a call that is written as a JSON object."""

    def body(tool: Tool, rule: str) -> Sequence[str]:
        head = "{" + json.dumps(name_key) + ": " + json.dumps(tool.name) + ", " + json.dumps(arguments_key) + ": "
        return [f"{rule}: {literal(head)} {rule}_arguments {literal('}')}", f"{rule}_arguments: {arguments_rule(tool)}"]

    return body

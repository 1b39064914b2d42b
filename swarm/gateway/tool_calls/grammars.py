"""Grammars that force a model to call: Lark rules in llguidance's dialect.

A mark that is a special or added token of the model is written as that token; any other mark as text. Arguments follow
the tool's JSON schema, with at most one space where JSON allows any whitespace, so that only what the schema leaves
open can grow without bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import InvalidRequest
from swarm.gateway.closed_schemas import close_schema
from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.params import MAX_GRAMMAR, Grammar

MAX_FORCED_CALLS = 16  # calls in a forced answer; prevents a model that never ends from running forever

# tokens around thoughts, which are no text to a grammar
THOUGHT_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")

_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

Loosen = Callable[[Tool], Tool]
AddedTokens = Mapping[str, int]  # the model's special and added tokens: ids by text


def literal_rule(text: str) -> str:
    """Return this text as a literal of a rule."""
    return json.dumps(text, ensure_ascii=False)


def mark_rule(text: str, added: AddedTokens) -> str:
    """Return a mark for a rule: as a token if it is one, otherwise as a literal."""
    return f"<[{added[text]}]>" if text in added else literal_rule(text)


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return the rule for a value of this schema. ``lenient``: ignore keywords that cannot be enforced."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_SPACING, "lenient": lenient}}, ensure_ascii=False)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a call's arguments as JSON: always an object."""
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
    return close_schema({**tool.parameters, "type": "object"})


def arguments_rule(tool: Tool) -> str:
    """Return the rule for a call's arguments as JSON."""
    return json_rule(arguments_schema(tool), lenient=not tool.strict)


def _text_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a custom tool's text, written as a string in JSON."""
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


def loosen_tool(tool: Tool) -> Tool:
    """Return the tool with any object as its arguments."""
    return replace(tool, parameters={"type": "object"}, grammar=None)


def callable_tools(use: ToolOptions) -> tuple[Tool, ...]:
    """Return the tools that a forced answer may call. Raises InvalidRequest if there are none."""
    tools = use.tools
    if use.choice == "named":
        tools = tuple(tool for tool in use.tools if tool.name == use.required_name)
    if not tools:
        raise InvalidRequest(f"tool_choice names {use.required_name!r}, which is not in tools", code="tool_choice")
    return tools


def allows_several(use: ToolOptions) -> bool:
    """Whether a forced answer may have several calls. A named tool is called once."""
    return use.parallel and use.choice != "named"


def call_rules(use: ToolOptions, body: Callable[[Tool, str], Sequence[str]]) -> list[str]:
    """Return rules in which ``call`` is a call of any allowed tool. ``body`` returns the rules of one tool, the first
    of which has the given name."""
    tools = callable_tools(use)
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        rules += body(tool, f"call_{number}")
    return rules


def make_call_grammar(start: str, rules: Sequence[str], use: ToolOptions, between: str = "") -> Grammar:
    """Return the grammar with these rules. ``start`` has ``{calls}`` in place of the calls; ``between`` separates
    them."""
    next_call = f"({between} call)" if between else "call"
    calls = f"call {next_call}{{0,{MAX_FORCED_CALLS - 1}}}" if allows_several(use) else "call"
    return check_size(
        Grammar("ebnf", "\n".join(["%llguidance {}", "start: " + start.replace("{calls}", calls), *rules]))
    )


def check_size(grammar: Grammar) -> Grammar:
    """Return the grammar. Raises InvalidRequest if it is too long."""
    if len(grammar.text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"the tools' schemas make a grammar of {len(grammar.text)} characters; at most {MAX_GRAMMAR} are taken: "
            "offer fewer tools, or name one in tool_choice",
            code="tools",
        )
    return grammar


def make_optional_call_grammar(
    use: ToolOptions,
    added: AddedTokens,
    mark: str,
    forced: Callable[[ToolOptions], Grammar],
    loosen: Loosen = loosen_tool,
) -> Grammar | None:
    """Return the grammar of an answer that is any text, or any text and then calls that begin with ``mark``. ``forced``
    makes the grammar of the calls alone. Returns None if it can't be told where text ends."""
    calls = call_part(use, forced, loosen)
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*){escape_regex(mark)}(?s:.*)/"
    marks = " | ".join(mark_rule(each, added) for each in THOUGHT_MARKS if each in added)
    thoughts = f"(TEXT ({marks}))* " if marks else ""
    if mark in added:
        return optional_grammar([f"start: {thoughts}TEXT calls | {thoughts}TEXT", text], calls)
    before, is_literal, after = calls.partition(f"\ncalls: {literal_rule(mark)}")
    if not is_literal:
        return None
    rules = [f"begun[suffix={literal_rule(mark)}]: BEFORE", "BEFORE: /(?s:.*)/", text]
    return optional_grammar([f"start: {thoughts}calls | {thoughts}TEXT", *rules], f"{before}\ncalls: begun{after}")


def call_part(use: ToolOptions, forced: Callable[[ToolOptions], Grammar], loosen: Loosen = loosen_tool) -> str:
    """Return the rules of calls, of which ``calls`` is the first. Tools that are not strict are loosened."""
    tools = tuple(tool if tool.strict else loosen(tool) for tool in use.tools)
    text = forced(replace(use, choice="required", tools=tools)).text
    return "\n" + text.removeprefix("%llguidance {}\n").replace("start: ", "calls: ", 1)


def optional_grammar(rules: Sequence[str], calls: str) -> Grammar:
    """Return the grammar with these rules, the first of which is ``start``, and the rules of calls."""
    return check_size(Grammar("ebnf", "\n".join(["%llguidance {}", *rules]) + calls))


def escape_regex(text: str) -> str:
    """Escape a text for an expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def json_call_rules(name_key: str, arguments_key: str) -> Callable[[Tool, str], Sequence[str]]:
    """Return a function that makes the rules of a call written as a JSON object."""

    def body(tool: Tool, rule: str) -> Sequence[str]:
        head = "{" + json.dumps(name_key) + ": " + json.dumps(tool.name) + ", " + json.dumps(arguments_key) + ": "
        return [
            f"{rule}: {literal_rule(head)} {rule}_arguments {literal_rule('}')}",
            f"{rule}_arguments: {arguments_rule(tool)}",
        ]

    return body

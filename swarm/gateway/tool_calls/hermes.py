"""Format of Hermes, Qwen 2.5 and 3, Granite 4 and many more: ``<tool_call>`` around a JSON object. ``plain`` is the
same format for models whose chat template does not support tools: a system message describes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    call_rules,
    json_call_rules,
    literal_rule,
    make_call_grammar,
    make_optional_call_grammar,
    mark_rule,
)
from swarm.gateway.tool_calls.json_calls import read_call_or_list
from swarm.gateway.tool_calls.parser import BaseToolCallParser, ParseSteps
from swarm.params import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NEWLINE = "\n"


class HermesParser(BaseToolCallParser):
    starts = (OPEN,)
    ends = (CLOSE,)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        yield from read_call_or_list(self)


def hermes(added: AddedTokens) -> ToolCallFormat:
    return _compose("hermes", lambda template: OPEN in template, added)


def plain(added: AddedTokens) -> ToolCallFormat:
    """Return the format for templates without support for tools."""
    return replace(_compose("plain", lambda _: True, added), instructions=_instructions)


def _compose(name: str, fits: Callable[[str], bool], added: AddedTokens) -> ComposedFormat:
    forced = _make_forcer(added)
    return ComposedFormat(
        name,
        (OPEN, CLOSE),
        fits,
        HermesParser,
        forced,
        optional_call_grammar=lambda use: make_optional_call_grammar(use, added, OPEN, forced),
    )


def _instructions(use: ToolOptions) -> str:
    if not use.are_offered:
        return ""
    return "\n".join([_HEAD, *map(_tool_line, use.tools), _TAIL, *_call_demand(use)])


def _make_forcer(added: AddedTokens) -> Callable[[ToolOptions], Grammar]:
    opening = f"{mark_rule(OPEN, added)} {literal_rule(NEWLINE)}"
    closing = f"{literal_rule(NEWLINE)} {mark_rule(CLOSE, added)}"

    def make_grammar(use: ToolOptions) -> Grammar:
        rules = call_rules(use, json_call_rules("name", "arguments"))
        return make_call_grammar(
            f"{opening} {{calls}} {closing}", rules, use, f"{closing} {literal_rule(NEWLINE)} {opening}"
        )

    return make_grammar


_HEAD = "You can call functions. Each line between <tools> and </tools> describes one:\n<tools>"
_TAIL = (
    "</tools>\nTo call a function, write its name and arguments as JSON between these marks, and nothing after them:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {…}}\n</tool_call>\n'
    "The results come between <tool_response> and </tool_response>. If no function helps, just answer."
)


def _tool_line(tool: Tool) -> str:
    """Return the line that describes a tool."""
    return json.dumps(describe_tool(tool)["function"], ensure_ascii=False)


def _call_demand(use: ToolOptions) -> list[str]:
    if use.choice == "named":
        return [f"Now call {use.required_name}."]
    return ["Now call a function."] if use.choice == "required" else []


def describe_tool(tool: Tool) -> dict[str, object]:
    """Return a tool in the form that chat templates take. A custom tool becomes a function with one text."""
    parameters: object = dict(tool.parameters) or {"type": "object", "properties": {}}
    description = tool.description
    if tool.custom:
        text = {"type": "string", "description": "The text that the tool takes, as it is."}
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        if tool.grammar is not None and tool.grammar.text:
            description += f"\nThe input must follow this grammar ({tool.grammar.kind}):\n{tool.grammar.text}"
    function = {"name": tool.name, "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}

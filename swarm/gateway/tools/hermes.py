"""Format of Hermes, Qwen 2.5 and 3, Granite 4 and many more: ``<tool_call>`` around a JSON object. ``plain`` is the
same format for models whose chat template does not support tools: a system message describes it."""

from __future__ import annotations

import json
from collections.abc import Callable

from swarm.gateway.ask import Tool, ToolUse
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added, grammar, json_call, literal, mark, one_of
from swarm.gateway.tools.objects import call_or_list
from swarm.gateway.tools.reading import Reader, Steps
from swarm.params import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NEWLINE = "\n"


class HermesReader(Reader):
    starts = (OPEN,)
    ends = (CLOSE,)

    def calls(self, mark: str) -> Steps[None]:
        yield from call_or_list(self)


def hermes(added: Added) -> Family:
    return Way("hermes", (OPEN, CLOSE), lambda template: OPEN in template, HermesReader, _forcer(added))


def plain(added: Added) -> Family:
    """Return the format for templates without support for tools."""
    return Way("plain", (OPEN, CLOSE), lambda _: True, HermesReader, _forcer(added), _instructions)


def _instructions(use: ToolUse) -> str:
    if not use.offered:
        return ""
    return "\n".join([_HEAD, *map(_told, use.tools), _TAIL, *_urged(use)])


def _forcer(added: Added) -> Callable[[ToolUse], Grammar]:
    opening = f"{mark(OPEN, added)} {literal(NEWLINE)}"
    closing = f"{literal(NEWLINE)} {mark(CLOSE, added)}"

    def forced(use: ToolUse) -> Grammar:
        rules = one_of(use, json_call("name", "arguments"))
        return grammar(f"{opening} {{calls}} {closing}", rules, use, f"{closing} {literal(NEWLINE)} {opening}")

    return forced


_HEAD = "You can call functions. Each line between <tools> and </tools> describes one:\n<tools>"
_TAIL = (
    "</tools>\nTo call a function, write its name and arguments as JSON between these marks, and nothing after them:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {…}}\n</tool_call>\n'
    "The results come between <tool_response> and </tool_response>. If no function helps, just answer."
)


def _told(tool: Tool) -> str:
    """Return the line that describes a tool."""
    return json.dumps(described(tool)["function"], ensure_ascii=False)


def _urged(use: ToolUse) -> list[str]:
    if use.choice == "named":
        return [f"Now call {use.named}."]
    return ["Now call a function."] if use.choice == "required" else []


def described(tool: Tool) -> dict[str, object]:
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

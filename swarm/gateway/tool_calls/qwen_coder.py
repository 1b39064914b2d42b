"""Format of Qwen 3 Coder: ``<function=name>`` and ``<parameter=x>`` around bare text, which is converted to JSON by the
tool's schema. A custom tool's text is the content of ``<parameter=input>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import InvalidRequest
from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    arguments_schema,
    call_rules,
    json_rule,
    literal_rule,
    make_call_grammar,
    make_optional_call_grammar,
    mark_rule,
)
from swarm.gateway.tool_calls.json_calls import TextSink
from swarm.gateway.tool_calls.parser import (
    BaseToolCallParser,
    CharacterSource,
    NotACall,
    ParseSteps,
    expect,
    skip_space,
    word_until,
)
from swarm.params import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class CoderParser(BaseToolCallParser):
    starts = (OPEN, _FUNCTION)  # models often omit the outer mark
    ends = (CLOSE, _FUNCTION_END)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        if mark == OPEN:
            char = yield from skip_space(self)
            self.unread()
            if char != "<":
                raise NotACall
            yield from expect(self, _FUNCTION)
        name, _ = yield from word_until(self, ">")
        self.begin_call(name)
        yield from self._parameters(self.find_tool(name.strip()))
        self.end_call()

    def _parameters(self, tool: Tool | None) -> ParseSteps[None]:
        custom = tool is not None and tool.custom
        if not custom:
            self.add_arguments("{")
        separator = ""
        while (yield from self._has_next_parameter()):
            name, _ = yield from word_until(self, ">")
            if custom:
                yield from _read_text(self, self.add_arguments)
                continue
            self.add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value({} if tool is None else _property(tool.parameters, name))
        if not custom:
            self.add_arguments("}")

    def _has_next_parameter(self) -> ParseSteps[bool]:
        """Whether another parameter follows, rather than the function's end."""
        if (yield from skip_space(self)) != "<":
            raise NotACall
        char = yield from self.next_char()
        if char == "/":
            yield from expect(self, _FUNCTION_END[2:])
            return False
        self.unread()
        yield from expect(self, _PARAMETER[1:])
        return True

    def _value(self, schema: Mapping[str, Any]) -> ParseSteps[None]:
        """Convert a parameter's value. Text is passed on as it arrives. Any other value is held until its end, which
        shows whether it is JSON."""
        if is_bare_text(schema):
            self.add_arguments('"')
            yield from _read_text(self, lambda text: self.add_arguments(_quote(text)))
            self.add_arguments('"')
        else:
            parts: list[str] = []
            yield from _read_text(self, parts.append)
            self.add_arguments(_to_json("".join(parts)))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _to_json(text: str) -> str:
    text = text.strip()
    if text in ("True", "False", "None"):
        return {"True": "true", "False": "false"}.get(text, "null")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _read_text(source: CharacterSource, put: TextSink) -> ParseSteps[None]:
    """Read a parameter's text, without the line breaks next to its marks."""
    char = yield from source.next_char()
    if char == "\n":
        char = yield from source.next_char()
    while True:
        held = char
        while any(end.startswith(held) for end in _ENDS):
            if held in _ENDS:
                return
            char = yield from source.next_char()
            held += char
        if len(held) == 1:
            put(held)
            char = yield from source.next_char()
        else:
            put(held[:-1])


_ENDS = (_PARAMETER_END, "\n" + _PARAMETER_END)


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of this property, with a reference resolved."""
    schema_found = schema.get("properties", {}).get(name, {})
    reference = schema_found.get("$ref") if isinstance(schema_found, dict) else None
    for key in ("$defs", "definitions"):
        if isinstance(reference, str) and reference.startswith(f"#/{key}/"):
            schema_found = schema.get(key, {}).get(reference.rpartition("/")[2], schema_found)
    return schema_found if isinstance(schema_found, dict) else {}


def is_bare_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema is written as bare text."""
    kinds = schema.get("type")
    if kinds is None and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kinds in ("string", ["string"]) or not schema


def coder(added: AddedTokens) -> ToolCallFormat:
    def fits(template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    opening = f"{mark_rule(OPEN, added)} {literal_rule(chr(10))}"
    closing = f"{literal_rule(chr(10))} {mark_rule(CLOSE, added)}"

    def make_grammar(use: ToolOptions) -> Grammar:
        rules = call_rules(use, _call)
        return make_call_grammar(
            f"{opening} {{calls}} {closing}", rules, use, f"{closing} {literal_rule(chr(10))} {opening}"
        )

    marks = (OPEN, CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END)

    def make_optional(use: ToolOptions) -> Grammar | None:
        # parameters are written by name, so those of a loosened tool keep their names and types
        return make_optional_call_grammar(use, added, OPEN, make_grammar, lambda tool: replace(tool, grammar=None))

    return ComposedFormat("qwen3-coder", marks, fits, CoderParser, make_grammar, optional_call_grammar=make_optional)


def _call(tool: Tool, rule: str) -> Sequence[str]:
    schema = arguments_schema(tool) if not tool.custom else {"properties": {"input": {}}, "required": ["input"]}
    required = schema.get("required", ())
    parts, rules = [], []
    for number, name in enumerate(schema.get("properties", {})):
        part = f"{rule}_{number}"
        parts.append(part if name in required else f"{part}?")
        body, more = _value_rules(tool, schema, name, f"{part}_value")
        rules += [f"{part}: {literal_rule(f'{_PARAMETER}{name}>{chr(10)}')} {body} {literal_rule(chr(10))}", *more]
    head = f"{literal_rule(f'{_FUNCTION}{tool.name}>{chr(10)}')}"
    return [f"{rule}: {head} {' '.join(parts)} {literal_rule(_FUNCTION_END)}", *rules]


def _value_rules(tool: Tool, root: Mapping[str, Any], name: str, rule: str) -> tuple[str, list[str]]:
    """Return the rule for the text between a parameter's line and its closing mark, including the mark; and the rules
    that it uses."""
    close = literal_rule("\n" + _PARAMETER_END)
    schema = _property(root, name)
    if tool.custom and tool.grammar is not None:
        return f"{rule} {close}", [f"{rule}: {_custom_rule(tool)}"]
    if not is_bare_text(schema):
        return f"{rule} {close}", [f"{rule}: {json_rule({**_definitions(root), **schema}, lenient=not tool.strict)}"]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"{rule} {close}", [f"{rule}: " + " | ".join(literal_rule(value) for value in values)]
    text = rule.upper()
    return rule, [f"{rule}[suffix={literal_rule(_PARAMETER_END)}]: {text}", f"{text}: {_free_text(schema)}"]


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _free_text(schema: Mapping[str, Any]) -> str:
    """Return an expression for bare text up to the closing mark, which the text cannot contain."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if "pattern" in schema:
        body = _containing(str(schema["pattern"]))
    elif low or high != "":
        body = f"(?s:.{{{low},{high}}})"
    else:
        return "/(?s:.*)/"
    return f"/{body}\\n/ & ~/(?s:.*){_escape_slashes(_PARAMETER_END)}(?s:.*)/"


def _containing(pattern: str) -> str:
    """Return an expression for a text that contains the pattern."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner if after else inner[:-1]
    return f"{before}(?:{_escape_slashes(inner)}){after}"


def _escape_slashes(expression: str) -> str:
    """Escape an expression for use between slashes."""
    return expression.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")


def _custom_rule(tool: Tool) -> str:
    grammar = tool.grammar
    assert grammar is not None  # callers check this
    if grammar.kind == "regex":
        return f"/{_escape_slashes(grammar.text)}/"
    if grammar.kind == "choice":
        return " | ".join(literal_rule(choice) for choice in json.loads(grammar.text))
    if grammar.kind == "ebnf" and "::=" not in grammar.text:
        return "%lark {\n" + grammar.text + "\n}"
    if grammar.kind == "json_schema":
        return json_rule(json.loads(grammar.text), lenient=False)
    if grammar.kind == "json_object":
        return json_rule({"type": "object"}, lenient=False)
    raise InvalidRequest(
        f"the grammar of the tool {tool.name!r} can't be forced: write it in Lark's form, not llama.cpp's", code="tools"
    )

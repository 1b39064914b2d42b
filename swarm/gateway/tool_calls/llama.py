"""Format of Llama 3 and 4. Calls are one of: a JSON object at the beginning of the answer, ``{"name": …, "parameters":
{…}}``, or several separated by ``;``; the same after ``<|python_tag|>``; Python calls in brackets, ``[f(a=1), g()]``;
and ``<function=f>{…}</function>``.

Without a mark, only the name of an offered tool makes a call: an ordinary answer may be JSON, or begin with a bracket.
"""

from __future__ import annotations

from swarm.gateway.completion_request import ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    call_part,
    call_rules,
    escape_regex,
    json_call_rules,
    literal_rule,
    make_call_grammar,
    mark_rule,
    optional_grammar,
)
from swarm.gateway.tool_calls.json_calls import argument_sink, finish_call, pass_value, read_call
from swarm.gateway.tool_calls.parser import BaseToolCallParser, NotACall, ParseSteps, skip_space, word_until
from swarm.gateway.tool_calls.python_calls import read_python_calls
from swarm.params import Grammar

TAG, BEGIN, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class LlamaParser(BaseToolCallParser):
    starts = (TAG, BEGIN, _FUNCTION)
    ends = (END, _FUNCTION_END)

    def parse_opening(self) -> ParseSteps[None]:
        char = yield from skip_space(self)
        self.unread()
        if char in "{[":
            yield from self._parse_objects_or_python(bare=True)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        if mark == _FUNCTION:
            yield from self._parse_function()
        else:
            yield from self._parse_objects_or_python(bare=False)

    def _parse_objects_or_python(self, *, bare: bool) -> ParseSteps[None]:
        """Read JSON objects or Python calls."""
        before = self.num_calls_ended
        char = yield from skip_space(self)
        if char == "[":
            yield from read_python_calls(self)
            return
        while char == "{":
            yield from read_call(self, bare=bare)
            char = yield from skip_space(self)
            if char == ";":
                self.drop_held()
                char = yield from skip_space(self)
        self.unread()
        if self.num_calls_ended == before:
            raise NotACall

    def _parse_function(self) -> ParseSteps[None]:
        name, _ = yield from word_until(self, ">")
        if (yield from skip_space(self)) != "{":
            raise NotACall
        self.begin_call(name)
        yield from pass_value(self, "{", argument_sink(self, name))
        finish_call(self, name)


def llama3(added: AddedTokens) -> ToolCallFormat:
    def fits(template: str) -> bool:
        return TAG in template or BEGIN in template or ("<|start_header_id|>" in template and "tools" in template)

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar(
            "{calls}", call_rules(use, json_call_rules("name", "parameters")), use, literal_rule("; ")
        )

    def make_optional(use: ToolOptions) -> Grammar:
        tagged = f"TEXT {mark_rule(TAG, added)} calls | " if TAG in added else ""
        text = " & ~".join(f"/{each}/" for each in ("(?s:.*)", *_call_beginnings(use)))
        return optional_grammar([f"start: calls | {tagged}TEXT", f"TEXT: {text}"], call_part(use, make_grammar))

    marks = (TAG, BEGIN, END)
    return ComposedFormat("llama3", marks, fits, LlamaParser, make_grammar, optional_call_grammar=make_optional)


def _call_beginnings(use: ToolOptions) -> tuple[str, ...]:
    """Return expressions for all texts that the parser reads as calls."""
    names = "|".join(escape_regex(tool.name) for tool in use.tools)
    return (
        rf'\s*\{{\s*"name"\s*:\s*"({names})"(?s:.*)',
        r'\s*\{\s*("(parameters|arguments|input|function)"|"type"\s*:\s*"function")(?s:.*)',
        rf"\s*\[\s*({names})\s*\((?s:.*)",
        r"(?s:.*)<function=(?s:.*)",
        rf"(?s:.*)({escape_regex(TAG)}|{escape_regex(BEGIN)})(?s:.*)",
    )

"""Formats of Mistral: ``[TOOL_CALLS]`` before a list of JSON objects; newer models write ``[TOOL_CALLS]name[ARGS]{…}``
for each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    arguments_rule,
    call_rules,
    json_call_rules,
    literal_rule,
    make_call_grammar,
    make_optional_call_grammar,
    mark_rule,
)
from swarm.gateway.tool_calls.json_calls import argument_sink, finish_call, pass_value, read_call_or_list
from swarm.gateway.tool_calls.parser import BaseToolCallParser, NotACall, ParseSteps, expect, skip_space, word_until
from swarm.params import Grammar

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(BaseToolCallParser):
    starts = (CALLS,)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        char = yield from skip_space(self)
        self.unread()
        if char in "[{":
            yield from read_call_or_list(self)
        else:
            yield from self._parse_named()

    def _parse_named(self) -> ParseSteps[None]:
        """Read a name, an optional call id, and the arguments."""
        name, stop = yield from word_until(self, "[{")
        if stop == "[" and (yield from self.next_char()) == "C":
            yield from expect(self, CALL_ID[2:])
            yield from word_until(self, "[")
            yield from expect(self, ARGS[1:])
        elif stop == "[":
            self.unread()
            yield from expect(self, ARGS[1:])
        if stop == "[" and (yield from skip_space(self)) != "{":
            raise NotACall
        self.begin_call(name)
        yield from pass_value(self, "{", argument_sink(self, name))
        finish_call(self, name)


def mistral(added: AddedTokens) -> ToolCallFormat:
    start = f"{mark_rule(CALLS, added)} {literal_rule('[')} {{calls}} {literal_rule(']')}"

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar(start, call_rules(use, json_call_rules("name", "arguments")), use, literal_rule(", "))

    return _compose("mistral", lambda template: CALLS in template, added, make_grammar)


def mistral_args(added: AddedTokens) -> ToolCallFormat:
    """Return the newer format."""

    def call(tool: Tool, rule: str) -> Sequence[str]:
        head = f"{mark_rule(CALLS, added)} {literal_rule(tool.name)} {mark_rule(ARGS, added)}"
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {arguments_rule(tool)}"]

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar("{calls}", call_rules(use, call), use)

    def fits(template: str) -> bool:
        return CALLS in template and ARGS in template

    return _compose("mistral-args", fits, added, make_grammar)


def _compose(
    name: str, fits: Callable[[str], bool], added: AddedTokens, forced: Callable[[ToolOptions], Grammar]
) -> ComposedFormat:
    return ComposedFormat(
        name,
        (CALLS, ARGS, CALL_ID),
        fits,
        MistralParser,
        forced,
        optional_call_grammar=lambda use: make_optional_call_grammar(use, added, CALLS, forced),
    )

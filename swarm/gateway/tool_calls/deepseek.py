"""Formats of DeepSeek V3 and R1: each call has its own marks. V3.1 omits the type of tool and the fence around the
JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    arguments_rule,
    call_rules,
    literal_rule,
    make_call_grammar,
    make_optional_call_grammar,
    mark_rule,
)
from swarm.gateway.tool_calls.json_calls import argument_sink, finish_call, pass_value
from swarm.gateway.tool_calls.parser import BaseToolCallParser, NotACall, ParseSteps, expect, skip_space, word_until
from swarm.params import Grammar

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
NEWLINE = "\n"
_FENCE = "```json\n"


class DeepSeekParser(BaseToolCallParser):
    starts = (ALL_BEGIN, BEGIN)
    ends = (END, ALL_END)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        if mark == ALL_BEGIN:
            char = yield from skip_space(self)
            self.unread()
            if char != BEGIN[0]:
                raise NotACall
            yield from expect(self, BEGIN)
        name, _ = yield from word_until(self, SEP[0])
        yield from expect(self, SEP[1:])
        if name.strip() == "function":
            name, _ = yield from word_until(self, "\n")
            yield from expect(self, _FENCE)
        char = yield from skip_space(self)
        self.begin_call(name)
        yield from pass_value(self, char, argument_sink(self, name))
        finish_call(self, name)
        if (yield from skip_space(self)) == "`":
            yield from expect(self, "``")
            self.drop_held()
        else:
            self.unread()


_MARKS = (ALL_BEGIN, ALL_END, BEGIN, SEP, END)


def deepseek(added: AddedTokens) -> ToolCallFormat:
    begin, sep, end = (mark_rule(text, added) for text in (BEGIN, SEP, END))

    def call(tool: Tool, rule: str) -> Sequence[str]:
        head = f"{begin} {literal_rule('function')} {sep} {literal_rule(f'{tool.name}{NEWLINE}{_FENCE}')}"
        return [
            f"{rule}: {head} {rule}_arguments {literal_rule(NEWLINE + '```')} {end}",
            f"{rule}_arguments: {arguments_rule(tool)}",
        ]

    def fits(template: str) -> bool:
        return BEGIN in template and "```json" in template

    return _compose("deepseek", fits, added, _make_forcer(added, call, literal_rule(NEWLINE)))


def deepseek_unfenced(added: AddedTokens) -> ToolCallFormat:
    """Return the format of V3.1 and later."""
    begin, sep, end = (mark_rule(text, added) for text in (BEGIN, SEP, END))

    def call(tool: Tool, rule: str) -> Sequence[str]:
        return [
            f"{rule}: {begin} {literal_rule(tool.name)} {sep} {rule}_arguments {end}",
            f"{rule}_arguments: {arguments_rule(tool)}",
        ]

    def fits(template: str) -> bool:
        return BEGIN in template

    return _compose("deepseek-v3.1", fits, added, _make_forcer(added, call, ""))


def _compose(
    name: str, fits: Callable[[str], bool], added: AddedTokens, forced: Callable[[ToolOptions], Grammar]
) -> ComposedFormat:
    return ComposedFormat(
        name,
        _MARKS,
        fits,
        DeepSeekParser,
        forced,
        optional_call_grammar=lambda use: make_optional_call_grammar(use, added, ALL_BEGIN, forced),
    )


def _make_forcer(
    added: AddedTokens, call: Callable[[Tool, str], Sequence[str]], between: str
) -> Callable[[ToolOptions], Grammar]:
    start = f"{mark_rule(ALL_BEGIN, added)} {{calls}} {mark_rule(ALL_END, added)}"

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar(start, call_rules(use, call), use, between)

    return make_grammar

"""Format of Granite 3, Phi 4 mini and others: a list of JSON objects after a mark, ``<|tool_call|>[{"name": …}]``."""

from __future__ import annotations

from collections.abc import Callable

from swarm.gateway.completion_request import ToolOptions
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

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"  # Granite has no closing mark
_TEXT_OPEN, _TEXT_CLOSE = "<tool_call>", "</tool_call>"  # a form that Granite's smaller models use just as often


class ListParser(BaseToolCallParser):
    starts = (OPEN, _TEXT_OPEN)
    ends = (CLOSE, _TEXT_CLOSE)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        yield from read_call_or_list(self)


def granite(added: AddedTokens) -> ToolCallFormat:
    marks = (OPEN, _TEXT_OPEN, _TEXT_CLOSE)
    return _compose("granite", marks, lambda template: OPEN in template, added, "")


def phi(added: AddedTokens) -> ToolCallFormat:
    return _compose("phi", (OPEN, CLOSE), lambda template: CLOSE in template, added, mark_rule(CLOSE, added))


def _compose(
    name: str, marks: tuple[str, ...], fits: Callable[[str], bool], added: AddedTokens, close: str
) -> ComposedFormat:
    forced = _make_forcer(added, close)
    return ComposedFormat(
        name,
        marks,
        fits,
        ListParser,
        forced,
        optional_call_grammar=lambda use: make_optional_call_grammar(use, added, OPEN, forced),
    )


def _make_forcer(added: AddedTokens, close: str) -> Callable[[ToolOptions], Grammar]:
    start = f"{mark_rule(OPEN, added)} {literal_rule('[')} {{calls}} {literal_rule(']')} {close}"

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar(start, call_rules(use, json_call_rules("name", "arguments")), use, literal_rule(", "))

    return make_grammar

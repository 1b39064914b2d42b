"""Format of Granite 3, Phi 4 mini and others: a list of JSON objects after a mark, ``<|tool_call|>[{"name": …}]``."""

from __future__ import annotations

from collections.abc import Callable

from swarm.gateway.ask import ToolUse
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added, grammar, json_call, literal, mark, one_of
from swarm.gateway.tools.objects import call_or_list
from swarm.gateway.tools.reading import Reader, Steps
from swarm.params import Grammar

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"  # Granite has no closing mark
_TEXT_OPEN, _TEXT_CLOSE = "<tool_call>", "</tool_call>"  # a form that Granite's smaller models use just as often


class ListReader(Reader):
    starts = (OPEN, _TEXT_OPEN)
    ends = (CLOSE, _TEXT_CLOSE)

    def calls(self, mark: str) -> Steps[None]:
        yield from call_or_list(self)


def granite(added: Added) -> Family:
    marks = (OPEN, _TEXT_OPEN, _TEXT_CLOSE)
    return Way("granite", marks, lambda template: OPEN in template, ListReader, _forcer(added, ""))


def phi(added: Added) -> Family:
    forced = _forcer(added, mark(CLOSE, added))
    return Way("phi", (OPEN, CLOSE), lambda template: CLOSE in template, ListReader, forced)


def _forcer(added: Added, close: str) -> Callable[[ToolUse], Grammar]:
    start = f"{mark(OPEN, added)} {literal('[')} {{calls}} {literal(']')} {close}"

    def forced(use: ToolUse) -> Grammar:
        return grammar(start, one_of(use, json_call("name", "arguments")), use, literal(", "))

    return forced

"""Formats of DeepSeek V3 and R1: each call has its own marks. V3.1 omits the type of tool and the fence around the
JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.gateway.ask import Tool, ToolUse
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added, arguments_rule, grammar, literal, mark, one_of
from swarm.gateway.tools.objects import end, sink, value
from swarm.gateway.tools.reading import Broken, Reader, Steps, expect, skip_space, word_until
from swarm.params import Grammar

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
NEWLINE = "\n"
_FENCE = "```json\n"


class DeepSeekReader(Reader):
    starts = (ALL_BEGIN, BEGIN)
    ends = (END, ALL_END)

    def calls(self, mark: str) -> Steps[None]:
        if mark == ALL_BEGIN:
            char = yield from skip_space(self)
            self.unread()
            if char != BEGIN[0]:
                raise Broken
            yield from expect(self, BEGIN)
        name, _ = yield from word_until(self, SEP[0])
        yield from expect(self, SEP[1:])
        if name.strip() == "function":
            name, _ = yield from word_until(self, "\n")
            yield from expect(self, _FENCE)
        char = yield from skip_space(self)
        self.begin(name)
        yield from value(self, char, sink(self, name))
        end(self, name)
        if (yield from skip_space(self)) == "`":
            yield from expect(self, "``")
            self.forget()
        else:
            self.unread()


_MARKS = (ALL_BEGIN, ALL_END, BEGIN, SEP, END)


def deepseek(added: Added) -> Family:
    begin, sep, end = (mark(text, added) for text in (BEGIN, SEP, END))

    def call(tool: Tool, rule: str) -> Sequence[str]:
        head = f"{begin} {literal('function')} {sep} {literal(f'{tool.name}{NEWLINE}{_FENCE}')}"
        return [
            f"{rule}: {head} {rule}_arguments {literal(NEWLINE + '```')} {end}",
            f"{rule}_arguments: {arguments_rule(tool)}",
        ]

    def fits(template: str) -> bool:
        return BEGIN in template and "```json" in template

    return Way("deepseek", _MARKS, fits, DeepSeekReader, _forcer(added, call, literal(NEWLINE)))


def deepseek_unfenced(added: Added) -> Family:
    """Return the format of V3.1 and later."""
    begin, sep, end = (mark(text, added) for text in (BEGIN, SEP, END))

    def call(tool: Tool, rule: str) -> Sequence[str]:
        return [
            f"{rule}: {begin} {literal(tool.name)} {sep} {rule}_arguments {end}",
            f"{rule}_arguments: {arguments_rule(tool)}",
        ]

    def fits(template: str) -> bool:
        return BEGIN in template

    return Way("deepseek-v3.1", _MARKS, fits, DeepSeekReader, _forcer(added, call, ""))


def _forcer(added: Added, call: Callable[[Tool, str], Sequence[str]], between: str) -> Callable[[ToolUse], Grammar]:
    start = f"{mark(ALL_BEGIN, added)} {{calls}} {mark(ALL_END, added)}"

    def forced(use: ToolUse) -> Grammar:
        return grammar(start, one_of(use, call), use, between)

    return forced

"""Formats of Mistral: ``[TOOL_CALLS]`` before a list of JSON objects; newer models write ``[TOOL_CALLS]name[ARGS]{…}``
for each call."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.gateway.ask import Tool, ToolUse
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added, arguments_rule, grammar, json_call, literal, mark, one_of
from swarm.gateway.tools.objects import call_or_list, end, sink, value
from swarm.gateway.tools.reading import Broken, Reader, Steps, expect, skip_space, word_until
from swarm.params import Grammar

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralReader(Reader):
    starts = (CALLS,)

    def calls(self, mark: str) -> Steps[None]:
        char = yield from skip_space(self)
        self.unread()
        if char in "[{":
            yield from call_or_list(self)
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        """Read a name, an optional call id, and the arguments."""
        name, stop = yield from word_until(self, "[{")
        if stop == "[" and (yield from self.char()) == "C":
            yield from expect(self, CALL_ID[2:])
            yield from word_until(self, "[")
            yield from expect(self, ARGS[1:])
        elif stop == "[":
            self.unread()
            yield from expect(self, ARGS[1:])
        if stop == "[" and (yield from skip_space(self)) != "{":
            raise Broken
        self.begin(name)
        yield from value(self, "{", sink(self, name))
        end(self, name)


def mistral(added: Added) -> Family:
    start = f"{mark(CALLS, added)} {literal('[')} {{calls}} {literal(']')}"

    def forced(use: ToolUse) -> Grammar:
        return grammar(start, one_of(use, json_call("name", "arguments")), use, literal(", "))

    return Way("mistral", (CALLS, ARGS, CALL_ID), lambda template: CALLS in template, MistralReader, forced)


def mistral_args(added: Added) -> Family:
    """Return the newer format."""

    def call(tool: Tool, rule: str) -> Sequence[str]:
        head = f"{mark(CALLS, added)} {literal(tool.name)} {mark(ARGS, added)}"
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {arguments_rule(tool)}"]

    def forced(use: ToolUse) -> Grammar:
        return grammar("{calls}", one_of(use, call), use)

    def fits(template: str) -> bool:
        return CALLS in template and ARGS in template

    return Way("mistral-args", (CALLS, ARGS, CALL_ID), fits, MistralReader, forced)

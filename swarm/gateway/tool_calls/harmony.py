"""Format of gpt-oss ("harmony"): a message to a tool in the channel ``commentary``,
``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>``. One call ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.grammars import (
    AddedTokens,
    arguments_rule,
    call_rules,
    literal_rule,
    make_call_grammar,
    mark_rule,
)
from swarm.gateway.tool_calls.json_calls import argument_sink, finish_call, pass_value
from swarm.gateway.tool_calls.parser import BaseToolCallParser, NotACall, ParseSteps, skip_space, word_until
from swarm.params import Grammar

START, CHANNEL, CONSTRAIN, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"
_RECIPIENT = "to=functions."


class HarmonyParser(BaseToolCallParser):
    starts = (START, CHANNEL)
    ends = (CALL,)

    def parse_calls(self, mark: str) -> ParseSteps[None]:
        head = ""
        while not head.endswith(MESSAGE):
            word, _ = yield from word_until(self, "<")
            name, _ = yield from word_until(self, ">")
            head += f"{word}<{name}>"
        recipient = head.partition(_RECIPIENT)[2].replace("<", " ").split()
        if not recipient or (yield from skip_space(self)) != "{":
            raise NotACall
        self.begin_call(recipient[0])
        yield from pass_value(self, "{", argument_sink(self, recipient[0]))
        finish_call(self, recipient[0])


def harmony(added: AddedTokens) -> ToolCallFormat:
    start, channel, constrain, message = (mark_rule(mark, added) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE))

    def call(tool: Tool, rule: str) -> Sequence[str]:
        recipient = literal_rule(f"commentary {_RECIPIENT}{tool.name} ")
        head = f"{start} {literal_rule('assistant')} {channel} {recipient} {constrain} {literal_rule('json')} {message}"
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {arguments_rule(tool)}"]

    def make_grammar(use: ToolOptions) -> Grammar:
        return make_call_grammar("{calls}", call_rules(use, call), replace(use, parallel=False))

    def fits(template: str) -> bool:
        return CHANNEL in template and "commentary" in template

    return ComposedFormat("harmony", (START, CHANNEL, CONSTRAIN, MESSAGE, CALL), fits, HarmonyParser, make_grammar)

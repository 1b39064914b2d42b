"""Format of Llama 3 and 4. Calls are one of: a JSON object at the beginning of the answer, ``{"name": …, "parameters":
{…}}``, or several separated by ``;``; the same after ``<|python_tag|>``; Python calls in brackets, ``[f(a=1), g()]``;
and ``<function=f>{…}</function>``.

Without a mark, only the name of an offered tool makes a call: an ordinary answer may be JSON, or begin with a bracket.
"""

from __future__ import annotations

from swarm.gateway.ask import ToolUse
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added, grammar, json_call, literal, one_of
from swarm.gateway.tools.objects import call_object, end, sink, value
from swarm.gateway.tools.pythonic import python_calls
from swarm.gateway.tools.reading import Broken, Reader, Steps, skip_space, word_until
from swarm.params import Grammar

TAG, BEGIN, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class LlamaReader(Reader):
    starts = (TAG, BEGIN, _FUNCTION)
    ends = (END, _FUNCTION_END)

    def opening(self) -> Steps[None]:
        char = yield from skip_space(self)
        self.unread()
        if char in "{[":
            yield from self._calls(bare=True)

    def calls(self, mark: str) -> Steps[None]:
        if mark == _FUNCTION:
            yield from self._function()
        else:
            yield from self._calls(bare=False)

    def _calls(self, *, bare: bool) -> Steps[None]:
        """Read JSON objects or Python calls."""
        before = self.num_calls
        char = yield from skip_space(self)
        if char == "[":
            yield from python_calls(self)
            return
        while char == "{":
            yield from call_object(self, bare=bare)
            char = yield from skip_space(self)
            if char == ";":
                self.forget()
                char = yield from skip_space(self)
        self.unread()
        if self.num_calls == before:
            raise Broken

    def _function(self) -> Steps[None]:
        name, _ = yield from word_until(self, ">")
        if (yield from skip_space(self)) != "{":
            raise Broken
        self.begin(name)
        yield from value(self, "{", sink(self, name))
        end(self, name)


def llama3(added: Added) -> Family:
    def fits(template: str) -> bool:
        return TAG in template or BEGIN in template or ("<|start_header_id|>" in template and "tools" in template)

    def forced(use: ToolUse) -> Grammar:
        return grammar("{calls}", one_of(use, json_call("name", "parameters")), use, literal("; "))

    return Way("llama3", (TAG, BEGIN, END), fits, LlamaReader, forced)

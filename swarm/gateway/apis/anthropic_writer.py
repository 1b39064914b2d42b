"""Answers of Anthropic's /v1/messages, as a stream and as one object. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.gateway.answer import CallBegins, CallEnds, CallText, Counts, End, Part, Text
from swarm.gateway.apis.writer import Json, Sse
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem
from swarm.gateway.memo import Memo

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Encodes one answer in Anthropic's format, as blocks of text and calls, of which one is open at a time."""

    def __init__(self, memo: Memo, served: Served, request_id: str) -> None:
        self._served, self._request_id = served, request_id
        self._blocks: list[Json] = []
        self._texts: list[list[str]] = []  # text fragments of each block
        self._open = False  # the last block is open
        self._end: End | None = None

    def _event(self, kind: str, **fields: object) -> Sse:
        return Sse(msgspec.json.encode({"type": kind, **fields}), kind)

    def _of_block(self, kind: str, **fields: object) -> Sse:
        """Return an event about the last block."""
        return self._event(kind, index=len(self._blocks) - 1, **fields)

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": "msg_" + self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            **self._reason(),
            "usage": usage,
        }

    def _reason(self) -> Json:
        if self._end is None:
            return {"stop_reason": None, "stop_sequence": None}
        if self._end.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._end.stop}
        return {"stop_reason": _REASONS[self._end.reason], "stop_sequence": None}

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        start = self._message([], usage(Counts(num_prompt, 0)))
        return self._event("message_start", message=start), self._event("ping")

    def write(self, part: Part) -> Sequence[Sse]:
        if isinstance(part, Text):
            return self._say(part.text) if part.text else ()
        if isinstance(part, CallBegins):
            call_id = "toolu_" + part.call_id.removeprefix("call_")
            return self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if isinstance(part, CallText):
            self._texts[-1].append(part.text)
            delta = {"type": "input_json_delta", "partial_json": part.text}
            return (self._of_block("content_block_delta", delta=delta),)
        if isinstance(part, CallEnds):
            return self._close()
        self._end = part
        return self._close()

    def _say(self, text: str) -> list[Sse]:
        begun: list[Sse] = []
        if not self._open or self._blocks[-1]["type"] != "text":
            begun = self._begin({"type": "text", "text": ""})
        self._texts[-1].append(text)
        return [*begun, self._of_block("content_block_delta", delta={"type": "text_delta", "text": text})]

    def _begin(self, block: Json) -> list[Sse]:
        closed = self._close()
        self._blocks.append(block)
        self._texts.append([])
        self._open = True
        return [*closed, self._of_block("content_block_start", content_block=block)]

    def _close(self) -> list[Sse]:
        if not self._open:
            return []
        self._open = False
        return [self._of_block("content_block_stop")]

    def tail(self, counts: Counts) -> Sequence[Sse]:
        delta = self._event("message_delta", delta=self._reason(), usage=usage(counts))
        return delta, self._event("message_stop")

    def failed(self, problem: Problem) -> Sequence[Sse]:
        return (Sse(msgspec.json.encode(problem.anthropic()), "error"),)

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        for part in parts:
            self.write(part)
        content = [_finished(block, "".join(text)) for block, text in zip(self._blocks, self._texts, strict=True)]
        return self._message(content, usage(counts))


def _finished(block: Json, text: str) -> Json:
    if block["type"] == "text":
        return {**block, "text": text}
    return {**block, "input": _object(text)}


def _object(text: str) -> Json:
    """Return a call's arguments as an object. Arguments that were cut off become {}; the stop reason shows the cut."""
    try:
        return msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError:
        return {}


def usage(counts: Counts) -> Json:
    """Return token counts in Anthropic's format, which counts cached tokens separately."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.answer,
    }

"""Answers of Anthropic's /v1/messages, as a stream and as one object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2s

import msgspec

from swarm.gateway.answer import (
    AnswerPart,
    CallArgumentsPart,
    CallEndPart,
    CallStartPart,
    ChoiceEndPart,
    ReasoningPart,
    TextPart,
    TokenCounts,
)
from swarm.gateway.apis.writer import Json, SseEvent, parse_arguments
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Encodes one answer in Anthropic's format, as blocks of thinking, text and calls, of which one is open at a
    time."""

    def __init__(self, memo: ResumeState, served: ServedModel, request_id: str) -> None:
        self._served, self._request_id = served, request_id
        self._shows_thinking = memo.told.get("thinking_display") != "omitted"
        self._blocks: list[Json] = []
        self._texts: list[list[str]] = []  # text fragments of each block
        self._is_open = False  # the last block is open
        self._end: ChoiceEndPart | None = None

    def _event(self, kind: str, **fields: object) -> SseEvent:
        return SseEvent(msgspec.json.encode({"type": kind, **fields}), kind)

    def _block_event(self, kind: str, **fields: object) -> SseEvent:
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

    def start_events(self, num_prompt: int = 0) -> Sequence[SseEvent]:
        start = self._message([], usage(TokenCounts(num_prompt, 0)))
        return self._event("message_start", message=start), self._event("ping")

    def write(self, part: AnswerPart) -> Sequence[SseEvent]:
        if isinstance(part, TextPart):
            return self._text_events("text", part.text) if part.text else ()
        if isinstance(part, ReasoningPart):
            return self._text_events("thinking", part.text)
        if isinstance(part, CallStartPart):
            call_id = "toolu_" + part.call_id.removeprefix("call_")
            return self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if isinstance(part, CallArgumentsPart):
            self._texts[-1].append(part.text)
            delta = {"type": "input_json_delta", "partial_json": part.text}
            return (self._block_event("content_block_delta", delta=delta),)
        if isinstance(part, CallEndPart):
            return self._close()
        if isinstance(part, ChoiceEndPart):
            self._end = part
        return self._close()

    def _text_events(self, kind: str, text: str) -> list[SseEvent]:
        """Return the events of a text, in a block of the kind "text" or "thinking"."""
        events: list[SseEvent] = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._texts[-1].append(text)
        if kind == "thinking" and not self._shows_thinking:
            return events
        return [*events, self._block_event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Json) -> list[SseEvent]:
        closed = self._close()
        self._blocks.append(block)
        self._texts.append([])
        self._is_open = True
        return [*closed, self._block_event("content_block_start", content_block=block)]

    def _close(self) -> list[SseEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        stop = self._block_event("content_block_stop")
        if self._blocks[-1]["type"] != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": _sign("".join(self._texts[-1]))}
        return [self._block_event("content_block_delta", delta=delta), stop]

    def end_events(self, counts: TokenCounts) -> Sequence[SseEvent]:
        delta = self._event("message_delta", delta=self._reason(), usage=usage(counts))
        return delta, self._event("message_stop")

    def error_events(self, problem: ApiError) -> Sequence[SseEvent]:
        return (SseEvent(msgspec.json.encode(problem.to_anthropic()), "error"),)

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        for part in parts:
            self.write(part)
        content = [self._complete(block, "".join(text)) for block, text in zip(self._blocks, self._texts, strict=True)]
        return self._message(content, usage(counts))

    def _complete(self, block: Json, text: str) -> Json:
        """Return a block with its text."""
        if block["type"] == "text":
            return {**block, "text": text}
        if block["type"] == "thinking":
            return {**block, "thinking": text if self._shows_thinking else "", "signature": _sign(text)}
        return {**block, "input": parse_arguments(text)}


def _sign(thinking: str) -> str:
    """Return the signature of a thinking block. Clients require one and send it back; here it has no use."""
    return blake2s(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def usage(counts: TokenCounts) -> Json:
    """Return token counts in Anthropic's format, which counts cached tokens separately."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.answer,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }

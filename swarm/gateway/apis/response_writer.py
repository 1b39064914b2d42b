"""Answers of OpenAI's /v1/responses, as a stream and as one object. Pure.

An answer is a list of items: thinking, texts and calls. One item is open at a time. The next part closes it, because
only then is it certain whether the item was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.gateway.answer import (
    AnswerPart,
    CallArgumentsPart,
    CallStartPart,
    ChoiceEndPart,
    ReasoningPart,
    TextPart,
    TokenCounts,
)
from swarm.gateway.apis.tokens import chat_logprobs
from swarm.gateway.apis.writer import Json, SseEvent
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState

# Error codes of OpenAI's API, by status.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseWriter:
    """Encodes one answer in the format of OpenAI's /v1/responses."""

    def __init__(self, memo: ResumeState, served: ServedModel, request_id: str) -> None:
        self._memo, self._served, self._request_id = memo, served, request_id
        self._custom = {tool.name for tool in memo.tools if tool.custom}
        self._items: list[Json] = []  # the finished items, and at the end the open one
        self._open = False  # the last item is open
        # thinking is sent as a summary to clients that ask for one: they show nothing else
        self._summarizes = bool((memo.told.get("reasoning") or {}).get("summary"))
        self._end: ChoiceEndPart | None = None
        self._next_number = 0  # number of the next event

    def _response(self, status: str, **more: object) -> Json:
        return {
            "id": "resp_" + self._request_id,
            "object": "response",
            "created_at": self._memo.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._served.name,
            "output": [],
            "usage": None,
            **self._memo.told,
            **more,
        }

    def _event(self, kind: str, **fields: object) -> SseEvent:
        body = {"type": kind, "sequence_number": self._next_number, **fields}
        self._next_number += 1
        return SseEvent(msgspec.json.encode(body), kind)

    def _item_event(self, kind: str, **fields: object) -> SseEvent:
        """Return an event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _text_event(self, kind: str, **fields: object) -> SseEvent:
        """Return an event about the text of the last item."""
        return self._item_event(kind, content_index=0, **fields)

    def start_events(self, num_prompt: int = 0) -> Sequence[SseEvent]:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created, self._event("response.in_progress", response=response)

    def write(self, part: AnswerPart) -> Sequence[SseEvent]:
        if isinstance(part, TextPart):
            return self._text_events(part)
        if isinstance(part, ReasoningPart):
            return self._reasoning_events(part.text)
        if isinstance(part, CallStartPart):
            return [*self._close("completed"), *self._begin_call(part)]
        if isinstance(part, CallArgumentsPart):
            return self._argument_events(part.text)
        if isinstance(part, ChoiceEndPart):
            return self._finish(part)
        return ()

    # --- text

    def _text_events(self, part: TextPart) -> list[SseEvent]:
        logprobs = chat_logprobs(self._served, part.pieces) if self._memo.logprobs else []
        events: list[SseEvent] = []
        if not part.text and not logprobs:
            return events
        if not self._is_open("message"):
            events += [*self._close("completed"), *self._begin_message()]
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        content["logprobs"] += logprobs
        events.append(self._text_event("response.output_text.delta", delta=part.text, logprobs=logprobs))
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _begin_message(self) -> list[SseEvent]:
        item = {"type": "message", "role": "assistant", "content": []}
        added = self._begin("msg", item)
        content: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        event = self._text_event("response.content_part.added", part=content)
        self._items[-1]["content"].append(content)
        return [added, event]

    def _begin(self, prefix: str, item: Json) -> SseEvent:
        item = {"id": f"{prefix}_{self._request_id}_{len(self._items)}", "status": "in_progress", **item}
        self._items.append(item)
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    # --- thinking

    def _reasoning_events(self, text: str) -> list[SseEvent]:
        events = [] if self._is_open("reasoning") else [*self._close("completed"), *self._begin_reasoning()]
        self._reasoning_part["text"] += text
        kind = "response.reasoning_summary_text.delta" if self._summarizes else "response.reasoning_text.delta"
        return [*events, self._reasoning_event(kind, delta=text)]

    @property
    def _reasoning_part(self) -> Json:
        """The text of the last item, which is thinking."""
        part: Json = self._items[-1]["summary" if self._summarizes else "content"][0]
        return part

    def _reasoning_event(self, kind: str, **fields: object) -> SseEvent:
        """Return an event about the text of the last item, which is thinking."""
        return self._item_event(kind, **{"summary_index" if self._summarizes else "content_index": 0}, **fields)

    def _begin_reasoning(self) -> list[SseEvent]:
        added = self._begin("rs", {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None})
        part = {"type": "summary_text" if self._summarizes else "reasoning_text", "text": ""}
        kind = "response.reasoning_summary_part.added" if self._summarizes else "response.content_part.added"
        event = self._reasoning_event(kind, part=part)
        self._items[-1]["summary" if self._summarizes else "content"].append(part)
        return [added, event]

    def _reasoning_done_events(self) -> list[SseEvent]:
        part = self._reasoning_part
        if self._summarizes:
            done = self._reasoning_event("response.reasoning_summary_text.done", text=part["text"])
            return [done, self._reasoning_event("response.reasoning_summary_part.done", part=part)]
        done = self._reasoning_event("response.reasoning_text.done", text=part["text"])
        return [done, self._reasoning_event("response.content_part.done", part=part)]

    # --- calls

    def _begin_call(self, part: CallStartPart) -> list[SseEvent]:
        named = {"call_id": part.call_id, "name": part.name}
        if part.name in self._custom:
            return [self._begin("ctc", {"type": "custom_tool_call", **named, "input": ""})]
        return [self._begin("fc", {"type": "function_call", **named, "arguments": ""})]

    def _argument_events(self, text: str) -> list[SseEvent]:
        item = self._items[-1]
        is_custom = item["type"] == "custom_tool_call"
        item["input" if is_custom else "arguments"] += text
        kind = "response.custom_tool_call_input.delta" if is_custom else "response.function_call_arguments.delta"
        return [self._item_event(kind, delta=text)]

    # --- ends

    def _close(self, status: str) -> list[SseEvent]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        events = self._done_events(item)
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _done_events(self, item: Json) -> list[SseEvent]:
        if item["type"] == "custom_tool_call":
            return [self._item_event("response.custom_tool_call_input.done", input=item["input"])]
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            return [self._item_event("response.function_call_arguments.done", **fields)]
        if item["type"] == "reasoning":
            return self._reasoning_done_events()
        content = item["content"][0]
        text = self._text_event("response.output_text.done", text=content["text"], logprobs=content["logprobs"])
        return [text, self._text_event("response.content_part.done", part=content)]

    def _finish(self, end: ChoiceEndPart) -> list[SseEvent]:
        self._end = end
        events = [] if self._items else self._begin_message()  # an empty answer is an empty message
        return [*events, *self._close("incomplete" if end.reason == "length" else "completed")]

    def _final_response(self, counts: TokenCounts) -> Json:
        is_cut = self._end is not None and self._end.reason == "length"
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._items,
            usage=usage(counts),
        )

    def end_events(self, counts: TokenCounts) -> Sequence[SseEvent]:
        response = self._final_response(counts)
        return (self._event(f"response.{response['status']}", response=response),)

    def error_events(self, problem: ApiError) -> Sequence[SseEvent]:
        events = [] if self._next_number else [*self.start_events()]
        error = {"code": _code(problem), "message": problem.message}
        response = self._response("failed", error=error, output=self._items)
        return [*events, self._event("response.failed", response=response)]

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        for part in parts:
            self.write(part)
        if self._end is None:  # the answer was looked up while in progress
            return self._response("in_progress", output=self._items)
        return self._final_response(counts)


def _code(problem: ApiError) -> str:
    if problem.code == "context_length_exceeded":
        return problem.code
    return _CODES.get(problem.status, "server_error")


def usage(counts: TokenCounts) -> Json:
    """Return token counts in the format of /v1/responses."""
    return {
        "input_tokens": counts.prompt,
        # cache writes cost nothing here
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.answer,
    }

"""Answers of OpenAI's /v1/responses, as a stream and as one object. Pure.

An answer is a list of items: texts and calls. One item is open at a time. The next part closes it, because only then is
it certain whether the item was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.gateway.answer import CallBegins, CallText, Counts, End, Part, Text
from swarm.gateway.apis.tokens import chat_logprobs
from swarm.gateway.apis.writer import Json, Sse
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem
from swarm.gateway.memo import Memo

# Error codes of OpenAI's API, by status.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseWriter:
    """Encodes one answer in the format of OpenAI's /v1/responses."""

    def __init__(self, memo: Memo, served: Served, request_id: str) -> None:
        self._memo, self._served, self._request_id = memo, served, request_id
        self._custom = {tool.name for tool in memo.tools if tool.custom}
        self._items: list[Json] = []  # the finished items, and at the end the open one
        self._open = False  # the last item is open
        self._end: End | None = None
        self._sequence = 0  # number of the next event

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

    def _event(self, kind: str, **fields: object) -> Sse:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return Sse(msgspec.json.encode(body), kind)

    def _of_item(self, kind: str, **fields: object) -> Sse:
        """Return an event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_text(self, kind: str, **fields: object) -> Sse:
        """Return an event about the text of the last item."""
        return self._of_item(kind, content_index=0, **fields)

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created, self._event("response.in_progress", response=response)

    def write(self, part: Part) -> Sequence[Sse]:
        if isinstance(part, Text):
            return self._say(part)
        if isinstance(part, CallBegins):
            return [*self._close("completed"), *self._begin_call(part)]
        if isinstance(part, CallText):
            return self._argue(part.text)
        if isinstance(part, End):
            return self._finish(part)
        return ()

    # --- text

    def _say(self, part: Text) -> list[Sse]:
        logprobs = chat_logprobs(self._served, part.pieces) if self._memo.logprobs else []
        events: list[Sse] = []
        if not part.text and not logprobs:
            return events
        if not self._is_open("message"):
            events += [*self._close("completed"), *self._begin_message()]
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        content["logprobs"] += logprobs
        events.append(self._of_text("response.output_text.delta", delta=part.text, logprobs=logprobs))
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _begin_message(self) -> list[Sse]:
        item = {"type": "message", "role": "assistant", "content": []}
        added = self._begin("msg", item)
        content: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        event = self._of_text("response.content_part.added", part=content)
        self._items[-1]["content"].append(content)
        return [added, event]

    def _begin(self, prefix: str, item: Json) -> Sse:
        item = {"id": f"{prefix}_{self._request_id}_{len(self._items)}", "status": "in_progress", **item}
        self._items.append(item)
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    # --- calls

    def _begin_call(self, part: CallBegins) -> list[Sse]:
        named = {"call_id": part.call_id, "name": part.name}
        if part.name in self._custom:
            return [self._begin("ctc", {"type": "custom_tool_call", **named, "input": ""})]
        return [self._begin("fc", {"type": "function_call", **named, "arguments": ""})]

    def _argue(self, text: str) -> list[Sse]:
        item = self._items[-1]
        is_custom = item["type"] == "custom_tool_call"
        item["input" if is_custom else "arguments"] += text
        kind = "response.custom_tool_call_input.delta" if is_custom else "response.function_call_arguments.delta"
        return [self._of_item(kind, delta=text)]

    # --- ends

    def _close(self, status: str) -> list[Sse]:
        """End the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        events = self._done(item)
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _done(self, item: Json) -> list[Sse]:
        if item["type"] == "custom_tool_call":
            return [self._of_item("response.custom_tool_call_input.done", input=item["input"])]
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            return [self._of_item("response.function_call_arguments.done", **fields)]
        content = item["content"][0]
        text = self._of_text("response.output_text.done", text=content["text"], logprobs=content["logprobs"])
        return [text, self._of_text("response.content_part.done", part=content)]

    def _finish(self, end: End) -> list[Sse]:
        self._end = end
        begun = [] if self._items else self._begin_message()  # an empty answer is an empty message
        return [*begun, *self._close("incomplete" if end.reason == "length" else "completed")]

    def _ended(self, counts: Counts) -> Json:
        is_cut = self._end is not None and self._end.reason == "length"
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._items,
            usage=usage(counts),
        )

    def tail(self, counts: Counts) -> Sequence[Sse]:
        response = self._ended(counts)
        return (self._event(f"response.{response['status']}", response=response),)

    def failed(self, problem: Problem) -> Sequence[Sse]:
        events = [] if self._sequence else [*self.head()]
        error = {"code": _code(problem), "message": problem.message}
        response = self._response("failed", error=error, output=self._items)
        return [*events, self._event("response.failed", response=response)]

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        for part in parts:
            self.write(part)
        if self._end is None:  # the answer was looked up while in progress
            return self._response("in_progress", output=self._items)
        return self._ended(counts)


def _code(problem: Problem) -> str:
    if problem.code == "context_length_exceeded":
        return problem.code
    return _CODES.get(problem.status, "server_error")


def usage(counts: Counts) -> Json:
    """Return token counts in the format of /v1/responses."""
    return {
        "input_tokens": counts.prompt,
        # cache writes cost nothing here
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.answer,
    }

"""Answers of Ollama's /api/chat and /api/generate, as lines of JSON and as one object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

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
from swarm.gateway.apis.tokens import chat_logprobs
from swarm.gateway.apis.writer import EventTemplate, Json, JsonLine, parse_arguments
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.errors import ApiError
from swarm.gateway.resume_state import ResumeState

NS_PER_S = 1_000_000_000


class OllamaWriter:
    """Encodes one answer in Ollama's format. A call is one line, since its arguments are an object."""

    def __init__(self, memo: ResumeState, served: ServedModel, request_id: str) -> None:
        self._memo, self._served = memo, served
        self._is_chat = not memo.told.get("generate")
        self._templates: dict[str, EventTemplate] = {}  # by field
        self._call: CallStartPart | None = None  # the call whose arguments are being assembled
        self._num_calls = 0
        self._arguments: list[str] = []
        self._end: ChoiceEndPart | None = None

    def _line(self, message: Json, **fields: object) -> Json:
        return line(self._served.name, self._memo.created, message, is_chat=self._is_chat, **fields)

    def _text_line(self, field: str, text: str) -> JsonLine:
        """Return the line of a text, which make up most of a stream."""
        template = self._templates.get(field)
        if template is None:
            body = self._line({field: EventTemplate.PLACEHOLDER}, done=False)
            template = self._templates[field] = EventTemplate(body)
        return JsonLine(template.render(text).data)

    def _encode(self, message: Json, **fields: object) -> JsonLine:
        return JsonLine(msgspec.json.encode(self._line(message, **fields)))

    def start_events(self, num_prompt: int = 0) -> Sequence[JsonLine]:
        return ()

    def write(self, part: AnswerPart) -> Sequence[JsonLine]:
        if isinstance(part, TextPart | ReasoningPart):
            field = "content" if isinstance(part, TextPart) else "thinking"
            if not self._memo.logprobs:
                return (self._text_line(field, part.text),) if part.text else ()
            return (self._encode({field: part.text}, done=False, logprobs=chat_logprobs(self._served, part.pieces)),)
        if isinstance(part, CallEndPart):
            return (self._encode({"tool_calls": [self._take_call()]}, done=False),)
        self._collect(part)
        return ()

    def _collect(self, part: AnswerPart) -> None:
        if isinstance(part, CallStartPart):
            self._call, self._arguments = part, []
        elif isinstance(part, CallArgumentsPart):
            self._arguments.append(part.text)
        elif isinstance(part, ChoiceEndPart):
            self._end = part

    def _take_call(self) -> Json:
        """Return the call that has just ended."""
        assert self._call is not None  # a call starts before it ends
        arguments = parse_arguments("".join(self._arguments))
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return {
            "id": self._call.call_id,
            "function": {"index": index, "name": self._call.name, "arguments": arguments},
        }

    def _end_fields(self, counts: TokenCounts) -> Json:
        is_cut = self._end is not None and self._end.reason == "length"
        return {"done": True, "done_reason": "length" if is_cut else "stop", **_durations(counts)}

    def end_events(self, counts: TokenCounts) -> Sequence[JsonLine]:
        return (self._encode({}, **self._end_fields(counts)),)

    def error_events(self, problem: ApiError) -> Sequence[JsonLine]:
        return (JsonLine(msgspec.json.encode(problem.to_ollama())),)

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        texts: dict[str, list[str]] = {"content": [], "thinking": []}
        calls: list[Json] = []
        logprobs: list[Json] = []
        for part in parts:
            if isinstance(part, TextPart | ReasoningPart):
                texts["content" if isinstance(part, TextPart) else "thinking"].append(part.text)
                logprobs += chat_logprobs(self._served, part.pieces) if self._memo.logprobs else []
            elif isinstance(part, CallEndPart):
                calls.append(self._take_call())
            else:
                self._collect(part)
        message: Json = {name: "".join(given) for name, given in texts.items() if given}
        if calls:
            message["tool_calls"] = calls
        more = {"logprobs": logprobs} if self._memo.logprobs else {}
        return self._line(message, **more, **self._end_fields(counts))


def line(model: str, created: int, message: Json, *, is_chat: bool, **fields: object) -> Json:
    """Return an object of an answer. ``message``: its content, thinking and calls, as far as it has them."""
    base = {"model": model, "created_at": timestamp(created)}
    if is_chat:
        return {**base, "message": {"role": "assistant", "content": "", **message}, **fields}
    rest = {name: value for name, value in message.items() if name != "content"}
    return {**base, "response": message.get("content", ""), **rest, **fields}


def timestamp(seconds: int) -> str:
    """Return a time in the form that Ollama's clients parse."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _durations(counts: TokenCounts) -> Json:
    """Return token counts and durations in nanoseconds: the broker's, from the request's arrival. Clients divide by the
    duration of the answer, so it is at least 1."""
    timing = counts.timing
    queued_s, first_s, total_s = (timing.queued_s, timing.first_token_s, timing.total_s) if timing else (0.0, 0.0, 0.0)
    return {
        "total_duration": int(total_s * NS_PER_S),
        "load_duration": int(queued_s * NS_PER_S),
        "prompt_eval_count": counts.prompt,
        "prompt_eval_duration": int(max(0.0, first_s - queued_s) * NS_PER_S),
        "eval_count": counts.answer,
        "eval_duration": max(1, int((total_s - first_s) * NS_PER_S)),
    }

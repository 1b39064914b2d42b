"""Request bodies, and decoding of answers. Pure.

A token counts only if the server reports that it generated one: in its usage figures or, without them, as a chunk with
text; the report then mentions that.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from swarm.bench.plan import BenchTarget
from swarm.bench.prompts import BenchRequest
from swarm.bench.sse import BadStream

PATHS = {"chat": "/chat/completions", "completions": "/completions"}


class _Delta(msgspec.Struct):
    content: object = None
    reasoning_content: object = None
    reasoning: object = None
    refusal: object = None
    tool_calls: object = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: object = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _AnswerBody(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_decoder = msgspec.json.Decoder(_AnswerBody)


def encode_request(target: BenchTarget, job: BenchRequest) -> bytes:
    """Encode a request. Fields of ``extra`` override this tool's own."""
    fields: dict[str, object] = {"model": target.model, "max_tokens": job.output_tokens, "stream": target.stream}
    if target.api == "chat":
        fields["messages"] = [{"role": "user", "content": job.prompt}]
    else:
        fields["prompt"] = job.prompt
    if target.stream and target.asks_usage:
        fields["stream_options"] = {"include_usage": True}
    if "max_completion_tokens" in target.extra:
        del fields["max_tokens"]
        fields["max_completion_tokens"] = job.output_tokens
        return msgspec.json.encode(fields | {k: v for k, v in target.extra.items() if k != "max_completion_tokens"})
    return msgspec.json.encode(fields | target.extra)


EventKind = Literal["token", "other", "done"]


class AnswerReader:
    """State of one answer while it is read. Feed it the data of each event, or the whole body of an answer that is not
    streamed."""

    __slots__ = ("completion_tokens", "done", "finished", "num_pieces", "prompt_tokens")

    def __init__(self) -> None:
        self.num_pieces = 0
        self.finished = False
        self.done = False
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def read_event(self, data: bytes) -> EventKind:
        """Decode one event. Raises BadStream for an error in the stream, or data that is no chunk of an answer."""
        if data == b"[DONE]":
            self.done = True
            return "done"
        return "token" if self._decode(data) else "other"

    def read_answer(self, data: bytes) -> None:
        """Decode an answer that is not streamed. Raises BadStream."""
        self._decode(data)
        if not self.finished:
            raise BadStream(f"an answer without an end: {_excerpt(data)}")

    def check_end(self) -> None:
        """Check the end of a stream. Raises BadStream if neither ``[DONE]`` nor a finish reason has arrived."""
        if not (self.done or self.finished):
            raise BadStream(f"cut after {self.num_pieces} pieces: no [DONE], no finish_reason")

    @property
    def num_tokens(self) -> int:
        return self.num_pieces if self.completion_tokens is None else self.completion_tokens

    def _decode(self, data: bytes) -> bool:
        try:
            answer = _decoder.decode(data)
        except msgspec.DecodeError:  # a ValidationError is one, too
            raise BadStream(f"no chunk of an answer: {_excerpt(data)}") from None
        if answer.error is not None:
            raise BadStream(f"the server reports: {_excerpt(data)}")
        if answer.usage is not None and answer.usage.completion_tokens is not None:
            self.completion_tokens = answer.usage.completion_tokens
            self.prompt_tokens = answer.usage.prompt_tokens
        if answer.choices is None and answer.usage is None:
            raise BadStream(f"no chunk of an answer: {_excerpt(data)}")
        has_text = False
        for choice in answer.choices or ():
            if choice.finish_reason is not None:
                self.finished = True
            message = choice.delta or choice.message
            if choice.text or (
                message is not None
                and (
                    message.content
                    or message.reasoning_content
                    or message.reasoning
                    or message.tool_calls
                    or message.refusal
                )
            ):
                has_text = True
        self.num_pieces += has_text
        return has_text


def _excerpt(data: bytes) -> str:
    return data[:160].decode("utf-8", "replace") + ("…" if len(data) > 160 else "")

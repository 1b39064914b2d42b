"""Answers and their accounts: what each took is written down, however it ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from swarm.client.results import Piece
from swarm.errors import Unavailable
from swarm.gateway.answer import ChoiceEndPart, TextPart, TokenCounts
from swarm.gateway.apis.chat import ChatWriter
from swarm.gateway.apis.completions import CompletionBody, CompletionWriter, to_requests, to_resume_state
from swarm.gateway.completion.answer_stream import AnswerStream
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion.service import SHORT_PROMPT, Caller, CompletionService, PreparedRequest
from swarm.gateway.completion_request import CompletionRequest, ToolOptions
from swarm.gateway.errors import ApiError
from swarm.gateway.http.handler import CompletionHandler, CompletionJob
from swarm.gateway.http.sse import COMMENT
from swarm.gateway.http.usage import UsageRecorder
from swarm.gateway.resume_state import ResumeState
from swarm.metrics.http import HttpMetrics
from swarm.params import SamplingParams
from swarm.wire.messages import MAX_MEMO
from tests.unit.gateway.apis.feeding import served

TOY = served()
ALICE = Caller("alice")
PROMPT = (1, 2, 3, 4, 5, 6, 7)


class Stream:
    """A request under way that says two tokens, and then ends, breaks, or goes on for ever."""

    def __init__(self, then: str) -> None:
        self._then, self._num, self.closed = then, 0, False
        self.completion: Any = None

    async def take_ready(self) -> list[Piece]:
        self._num += 1
        if self._num <= 2:
            return [Piece(self._num, "word ", self._num - 1)]
        if self._then == "broken":
            raise Unavailable("the swarm is gone")
        if self._then == "endless":
            await asyncio.Event().wait()
        if self.completion is not None:
            return []
        usage = SimpleNamespace(num_prompt=len(PROMPT), num_tokens=3, num_cached=2)
        self.completion = SimpleNamespace(usage=usage, choices=())
        return [Piece(9, "", 2, finish_reason="stop")]

    def cancel_when_left(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Swarm:
    """A desk whose requests all go as ``then`` says."""

    def __init__(self, then: str) -> None:
        self.stream = Stream(then)
        self.body_threads = None  # for long answers only

    async def prepare(self, request: CompletionRequest, served: Any) -> PreparedRequest:
        return PreparedRequest(request, PROMPT, request.params, served)

    def begin(
        self, prepared: PreparedRequest, caller: Caller, request_id: Any, memo: Any, *, detached: bool, on_tokens: Any
    ) -> AnswerStream:
        assert not detached  # only lines of batches are
        parts = AnswerAssembler("r", ToolOptions(), prepared.served.tool_format)
        return AnswerStream(cast("Any", self.stream), parts, num_prompt=len(prepared.ids), on_tokens=on_tokens)


class Book:
    """A ledger."""

    def __init__(self) -> None:
        self.written: list[tuple[str, TokenCounts]] = []

    def record_usage(self, caller: Caller, counts: TokenCounts) -> None:
        self.written.append((caller.tenant, counts))


async def answer(then: str, stream: bool, num_taken: int | None) -> tuple[Book, Stream]:
    """Ask, and hang up when so many messages were taken (None: never)."""
    swarm, book, gone = Swarm(then), Book(), asyncio.Event()
    counter = CompletionHandler(cast("CompletionService", swarm), {}, UsageRecorder(HttpMetrics(), book))
    sent: list[Message] = []

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == num_taken:
            gone.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    ask = CompletionRequest(params=SamplingParams(max_tokens=5), prompt="x")
    memo = ResumeState("chat", 7)
    job = CompletionJob("r", [ask], memo, ChatWriter(memo, TOY, "r"), stream)
    if num_taken == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    async with asyncio.timeout(20.0):
        response = await counter.serve(Request(scope, receive, send), TOY, ALICE, job)
        await response(scope, receive, send)
    return book, swarm.stream


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_read_on_is_not_kept(stream: bool) -> None:
    """An echo longer than what the broker notes of a request: ``keep_s`` is refused before a status is sent."""
    counter = CompletionHandler(cast("CompletionService", Swarm("")), {}, UsageRecorder(HttpMetrics(), Book()))
    memo = ResumeState("completions", 7, echoes=("x" * MAX_MEMO,))
    job = CompletionJob(
        "r",
        [CompletionRequest(params=SamplingParams(), prompt="x", keep_s=5.0)],
        memo,
        CompletionWriter(memo, TOY, "r"),
        stream,
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with pytest.raises(ApiError, match="can't be resumed") as caught:
        await counter.serve(Request(scope), TOY, ALICE, job)
    assert (caught.value.status, caught.value.param) == (400, "keep_s")


def test_an_echo_is_noted_once_for_all_choices() -> None:
    """So that its length alone counts, and each choice begins with it."""
    body = CompletionBody(model="toy", prompt="Once", n=3, echo=True)
    memo = to_resume_state(body, to_requests(body, TOY), TOY, 7)
    assert memo.echoes == ("Once",)
    ends = [ChoiceEndPart(choice, "stop", 1) for choice in range(3)]
    whole = CompletionWriter(memo, TOY, "r").full_response([TextPart(0, " upon"), *ends], TokenCounts(1, 3))
    assert [choice["text"] for choice in whole["choices"]] == ["Once upon", "Once", "Once"]
    writer = CompletionWriter(memo, TOY, "r")
    assert all(b'"Once"' in writer.write(end)[0].data for end in ends)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ended_is_written_to_its_owner(stream: bool) -> None:
    book, _ = await answer("ends", stream, None)
    assert book.written == [("alice", TokenCounts(7, 3, 2))]


@pytest.mark.parametrize(("stream", "num_taken"), [(True, 3), (False, 0)])
async def test_what_somebody_leaves_is_paid_as_far_as_it_came(stream: bool, num_taken: int) -> None:
    """Whoever hangs up has used the prompt and what was made of the answer; and the request is let go."""
    book, under_way = await answer("endless", stream, num_taken)
    assert book.written == [("alice", TokenCounts(7, 2))]
    assert under_way.closed


async def test_what_breaks_off_is_written_once() -> None:
    book, _ = await answer("broken", True, None)
    assert book.written == [("alice", TokenCounts(7, 2))]


async def test_an_idle_stream_tells_how_far_its_prompt_is() -> None:
    """A long one that is alone, before its first token; otherwise it says that it is still there."""

    class Progressing(Swarm):
        progress: tuple[int, int] | None = (2, 7)

        async def prompt_progress(self, request_id: str) -> tuple[int, int] | None:
            assert request_id == "r"
            return self.progress

    swarm = Progressing("ends")
    counter = CompletionHandler(cast("CompletionService", swarm), {}, UsageRecorder(HttpMetrics(), Book()))
    memo = ResumeState("chat", 7)

    async def comment(*prompts: str, has_begun: bool = False) -> bytes:
        asks = [CompletionRequest(params=SamplingParams(), prompt=prompt) for prompt in prompts]
        begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if has_begun:
            begun.set_result(None)
        return await counter._make_comment(begun, CompletionJob("r", asks, memo, ChatWriter(memo, TOY, "r"), True))

    long = "x" * SHORT_PROMPT
    assert await comment(long) == b": prompt 2/7\n"
    assert await comment(long, has_begun=True) == COMMENT
    assert await comment(long, long) == COMMENT
    assert await comment("x") == COMMENT
    swarm.progress = None
    assert await comment(long) == COMMENT

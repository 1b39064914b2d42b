"""Completion handler: submits completion requests and returns the answer over HTTP, as one response or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.answer import AnswerPart, PromptPart, TokenCounts
from swarm.gateway.apis.writer import AnswerWriter, Json
from swarm.gateway.completion.answer_stream import AnswerStream, MergedAnswers
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import (
    SHORT_PROMPT,
    AnswerSnapshot,
    Caller,
    CompletionService,
    PreparedRequest,
    prompt_size,
)
from swarm.gateway.completion_request import CompletionRequest
from swarm.gateway.errors import ApiError, invalid_field
from swarm.gateway.http.identity import RequestIdentity, identity_of
from swarm.gateway.http.json import JsonResponse, request_id_headers
from swarm.gateway.http.sse import (
    COMMENT,
    EVENT_STREAM,
    JSON_LINES,
    EventNumbering,
    EventStream,
    no_comment,
    parse_event_id,
    plain_comment,
    stream_events,
    wait_for_disconnect,
)
from swarm.gateway.http.usage import RequestUsage, UsageRecorder
from swarm.gateway.resume_state import ResumeState
from swarm.gateway.thread_pool import BoundedThreadPool
from swarm.params import MAX_SEED
from swarm.wire.messages import MAX_MEMO
from swarm.wire.prompt_logprobs import row_bytes

PATIENCE_S = 0.006  # seconds to wait for an error that can still become the status; then a stream's headers go out
LONG_PATIENCE_S = 0.25  # the same, while a prompt that may be too long is tokenized
SLOW_READER_S = 60.0  # seconds without reading a byte after which a stream is ended
MAX_SCORED_BYTES = 16 << 20  # of prompts' log probabilities in an answer, packed; as JSON some ten times as much
CLIENT_CLOSED_REQUEST = 499  # status of a response whose client has disconnected

WriterFactory = Callable[[ResumeState, ServedModel, str], AnswerWriter]


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A body as its API has interpreted it. Several requests are several prompts of one answer, each with ``n``
    choices."""

    request_id: str
    requests: Sequence[CompletionRequest]
    memo: ResumeState
    writer: AnswerWriter
    stream: bool

    @property
    def num_choices(self) -> int:
        return sum(ask.params.n for ask in self.requests)


class CompletionHandler:
    """Handler of a gateway's completion jobs. ``writers``: for each API, how resumed answers are encoded."""

    def __init__(self, service: CompletionService, writers: dict[str, WriterFactory], usage: UsageRecorder) -> None:
        self._service = service
        self._writers = writers
        self._usage = usage

    async def serve(self, request: Request, served: ServedModel, caller: Caller, job: CompletionJob) -> Response:
        """Answer a request. Raises ApiError for an error that occurs before a status is sent."""
        if job.requests[0].keep_s and not job.memo.can_be_stored:
            raise invalid_field("keep_s", f"this answer repeats more than {MAX_MEMO} characters and can't be resumed")
        account = self._usage.start(
            caller, job.memo.api, served.name, job.request_id, request.headers.get("traceparent")
        )
        prompts_ready, identity = asyncio.Event(), identity_of(request)
        begun = asyncio.ensure_future(
            _rename_error_field(self._submit(prompts_ready, served, caller, job, account, identity=identity), job)
        )

        def close(*, has_status: bool = True) -> None:
            outcome, counts = _cancel_or_close(begun)
            if outcome == "failed" and not has_status and not _has_begun(begun):
                account.discard()
            else:
                account.close(outcome, counts)

        try:
            if job.stream:
                ready = _wait_for_tokenizing(prompts_ready, served, job)
                return await self._respond_stream(begun, ready, job, close, request.scope.get("patience_s", PATIENCE_S))
            end, threads = partial(close, has_status=False), self._service.body_threads
            return await _respond_whole(request, begun, job, end, threads)
        except ApiError as problem:
            problem.is_counted = _has_begun(begun)
            raise

    async def resume(self, last_event_id: str, caller: Caller, num_seen: int = 0) -> Response:
        """Resume a stream after the event with this id, or after the first ``num_seen`` events."""
        request_id, seen = parse_event_id(last_event_id)
        memo, reading = await self._service.resume(request_id, caller)
        if seen and len(seen) != reading.num_choices + 1:
            reading.close()
            raise invalid_field("Last-Event-ID", f"{last_event_id!r} is not the id of an event of this answer")
        served = (await self._service.served_model()).named(memo.adapter)
        writer = self._writers[memo.api](memo, served, request_id)
        numbering = EventNumbering(request_id, reading.num_choices, seen, num_seen)
        close = self._record_resumed(caller, memo.api, served.name, request_id, reading, num_known=sum(seen) + num_seen)
        return EventStream(
            stream_events(reading, writer, numbering),
            close,
            _headers(request_id),
            SLOW_READER_S,
            **_form_of(memo, plain_comment),
        )

    def _record_resumed(
        self, caller: Caller, api: str, model: str, request_id: str, reading: AnswerStream, *, num_known: int
    ) -> Callable[[], None]:
        """Record the usage of a resumed answer. An event usually is one token, and events that the reader already had
        are not new."""
        account = self._usage.start(caller, api, model, request_id, None, traced=False)

        def close() -> None:
            reading.close()
            account.close(reading.outcome, TokenCounts(0, max(0, reading.counts_so_far().answer - num_known)))

        return close

    async def look_up(self, request_id: str, caller: Caller, is_allowed: Callable[[ResumeState], bool]) -> Response:
        """Return an answer's current state. The usage of an answer that has ended is recorded as if the answer had been
        read. Raises ApiError."""
        snapshot, body = await self.read_stored(request_id, caller, is_allowed)
        if snapshot.has_ended:
            account = self._usage.start(caller, snapshot.memo.api, body["model"], request_id, None, traced=False)
            account.close("done", TokenCounts(0, snapshot.counts.answer))
        return JsonResponse(body, headers=_headers(request_id))

    async def read_stored(
        self, request_id: str, caller: Caller, is_allowed: Callable[[ResumeState], bool]
    ) -> tuple[AnswerSnapshot, Json]:
        """Return an answer's current state, also as its API encodes it, without replacing its reader.

        ``is_allowed``: decides whether the caller may see the answer. Raises ApiError.
        """
        snapshot = await self._service.look_up(request_id, caller, is_allowed)
        served = (await self._service.served_model()).named(snapshot.memo.adapter)
        writer = self._writers[snapshot.memo.api](snapshot.memo, served, request_id)
        return snapshot, writer.full_response(snapshot.parts, snapshot.counts)

    async def _prepare(self, served: ServedModel, job: CompletionJob) -> list[PreparedRequest]:
        orders: list[PreparedRequest] = []
        for request in job.requests:
            if orders:
                await asyncio.sleep(0)  # other tasks get their turn between the prompts of a long list
            orders.append(await self._service.prepare(request, served))
        num_scored_bytes = sum(
            (len(order.ids) - 1) * order.params.n * row_bytes(alternatives, served.manifest.vocab_size)
            for order in orders
            if (alternatives := order.params.prompt_logprobs) is not None
        )
        if num_scored_bytes > MAX_SCORED_BYTES:
            text = "asks for too many log probabilities of prompts at a time: send fewer prompts, or smaller logprobs"
            raise invalid_field("logprobs", text)
        return orders

    async def _submit(
        self,
        prompts_ready: asyncio.Event,
        served: ServedModel,
        caller: Caller,
        job: CompletionJob,
        account: RequestUsage,
        *,
        identity: RequestIdentity | None,
    ) -> AnswerStream | MergedAnswers:
        """Submit the requests and wait for the first part or the first error. ``prompts_ready`` is set once the prompts
        have been made or have failed. ``identity``: of a request that continues without its reader."""
        try:
            prepared = await self._prepare(served, job)
        finally:
            prompts_ready.set()
        account.num_prompt = sum(len(order.ids) for order in prepared)
        memo: ResumeState | None = job.memo
        if identity is not None:
            memo = None  # its time differs between gateways; the answer is read by submitting the request again
            for place, order in enumerate(prepared):
                order.set_default_seed((identity.seed + place) & MAX_SEED)
        begin = partial(self._service.begin, detached=identity is not None, on_tokens=account.tokens)
        reading: AnswerStream | MergedAnswers
        if len(prepared) == 1:
            reading = begin(prepared[0], caller, job.request_id, memo)
        else:
            account.request_ids = tuple(f"{job.request_id}-{number}" for number in range(len(prepared)))
            reading = MergedAnswers(
                [
                    begin(order, caller, request_id, None)
                    for order, request_id in zip(prepared, account.request_ids, strict=True)
                ]
            )
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            await reading.prefetch()
            undo.pop_all()
        return reading

    async def _respond_stream(
        self,
        begun: asyncio.Future[AnswerStream | MergedAnswers],
        tokenized: Coroutine[Any, Any, None],
        job: CompletionJob,
        close: Callable[..., None],
        patience_s: float,
    ) -> Response:
        with contextlib.ExitStack() as undo:
            undo.callback(close, has_status=False)
            await tokenized
            await asyncio.wait({begun}, timeout=patience_s)
            if begun.done():
                begun.result()  # raises the error
            undo.pop_all()
        comment = partial(self._make_comment, begun, job)
        return EventStream(
            _stream_chunks(begun, job), close, _headers(job.request_id), SLOW_READER_S, **_form_of(job.memo, comment)
        )

    async def _make_comment(self, begun: asyncio.Future[AnswerStream | MergedAnswers], job: CompletionJob) -> bytes:
        """Return the comment of an idle stream: before its first token, how much of a long prompt is computed."""
        if begun.done() or len(job.requests) > 1 or prompt_size(job.requests[0], SHORT_PROMPT) < SHORT_PROMPT:
            return COMMENT
        progress = await self._service.prompt_progress(job.request_id)
        return COMMENT if progress is None else f": prompt {progress[0]}/{progress[1]}\n".encode()


async def _wait_for_tokenizing(prompts_ready: asyncio.Event, served: ServedModel, job: CompletionJob) -> None:
    """Wait until the prompt has been tokenized if it may be longer than the model's context: clients expect that error
    in the status."""
    context = served.manifest.context
    if any(prompt_size(ask, context) >= context for ask in job.requests):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONG_PATIENCE_S):
                await prompts_ready.wait()


async def _stream_chunks(
    begun: asyncio.Future[AnswerStream | MergedAnswers], job: CompletionJob
) -> AsyncIterator[bytes]:
    try:
        reading = await begun
    except ApiError as problem:
        yield b"".join(event.encode() for event in job.writer.error_events(problem))
        return
    async for chunk in stream_events(reading, job.writer, EventNumbering(job.request_id, job.num_choices)):
        yield chunk


async def _respond_whole(
    request: Request,
    begun: asyncio.Future[AnswerStream | MergedAnswers],
    job: CompletionJob,
    close: Callable[[], None],
    threads: BoundedThreadPool,
) -> Response:
    answer = asyncio.ensure_future(_collect(begun, job, threads))
    watcher = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        body, headers = answer.result(), _headers(job.request_id)
        if isinstance(body, bytes):
            return Response(body, headers=headers, media_type=JsonResponse.media_type)
        return JsonResponse(body, headers=headers)
    finally:
        for task in (answer, watcher):
            task.cancel()
        await asyncio.gather(answer, watcher, return_exceptions=True)
        close()


async def _collect(
    begun: asyncio.Future[AnswerStream | MergedAnswers], job: CompletionJob, threads: BoundedThreadPool
) -> Json | bytes:
    """Return the answer; one with log probabilities of prompts, which may be long, encoded in a thread."""
    reading = await begun
    parts: list[AnswerPart] = []
    while more := await reading.next():
        parts += more
    if any(isinstance(part, PromptPart) for part in parts):
        counts = reading.counts()
        return await threads.run(lambda: msgspec.json.encode(job.writer.full_response(parts, counts)))
    return job.writer.full_response(parts, reading.counts())


async def _rename_error_field(
    begun: Coroutine[Any, Any, AnswerStream | MergedAnswers], job: CompletionJob
) -> AnswerStream | MergedAnswers:
    """Await the answer; an error gets the client's own name for the wrong parameter."""
    try:
        return await begun
    except ApiError as problem:
        if problem.param is None:
            raise
        raise problem.set_param(job.requests[0].client_name_of(problem.param)) from None


def _has_begun(begun: asyncio.Future[AnswerStream | MergedAnswers]) -> bool:
    """Whether the answer has begun without an error."""
    return begun.done() and not begun.cancelled() and begun.exception() is None


def _cancel_or_close(begun: asyncio.Future[AnswerStream | MergedAnswers]) -> tuple[str, TokenCounts]:
    """Cancel the answer if it is in progress. Returns its outcome and the tokens computed."""
    if not begun.done():
        begun.cancel()
        return "left", TokenCounts(0, 0)
    if begun.cancelled():
        return "left", TokenCounts(0, 0)
    if begun.exception() is not None:
        return "failed", TokenCounts(0, 0)
    begun.result().close()
    return begun.result().outcome, begun.result().counts_so_far()


class _Form(TypedDict):
    make_comment: Callable[[], Awaitable[bytes]]
    media_type: str


def _form_of(memo: ResumeState, make_comment: Callable[[], Awaitable[bytes]]) -> _Form:
    """Return the comments and the media type of an API's streams."""
    if memo.api == "ollama":
        return {"make_comment": no_comment, "media_type": JSON_LINES}
    return {"make_comment": make_comment, "media_type": EVENT_STREAM}


def _headers(request_id: str) -> dict[str, str]:
    return request_id_headers(request_id)

"""Completion handler: submits completion requests and returns the answer over HTTP, as one response or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.answer import Counts, Part
from swarm.gateway.apis.writer import Writer
from swarm.gateway.ask import Ask
from swarm.gateway.desk.desk import Desk, Order, Owner, size_of
from swarm.gateway.desk.reading import Lot, Reading
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem, wrong
from swarm.gateway.http.accounts import Account, Accounts
from swarm.gateway.http.json import JsonResponse, identified
from swarm.gateway.http.sse import EventStream, Numbering, events_of, hang_up, read_event_id
from swarm.gateway.memo import Memo
from swarm.wire.messages import MAX_MEMO

PATIENCE_S = 0.006  # seconds to wait for an error that can still become the status; then a stream's headers go out
LONG_PATIENCE_S = 0.25  # the same, while a prompt that may be too long is tokenized
SLOW_READER_S = 60.0  # seconds without reading a byte after which a stream is ended
HUNG_UP = 499  # status of a response whose client has disconnected

MakeWriter = Callable[[Memo, Served, str], Writer]


@dataclass(frozen=True, slots=True)
class Job:
    """A body as its API has interpreted it. Several requests are several prompts of one answer, each with ``n``
    choices."""

    request_id: str
    asks: Sequence[Ask]
    memo: Memo
    writer: Writer
    stream: bool

    @property
    def num_choices(self) -> int:
        return sum(ask.params.n for ask in self.asks)


class Counter:
    """Handler of a gateway's completion jobs. ``writers``: for each API, how resumed answers are encoded."""

    def __init__(self, desk: Desk, writers: dict[str, MakeWriter], accounts: Accounts) -> None:
        self._desk = desk
        self._writers = writers
        self._accounts = accounts

    async def serve(self, request: Request, served: Served, owner: Owner, job: Job) -> Response:
        """Answer a request. Raises ApiError for an error that occurs before a status is sent."""
        if job.asks[0].keep_s and not job.memo.is_kept:
            raise wrong("keep_s", f"this answer repeats more than {MAX_MEMO} characters and can't be resumed")
        account = self._accounts.open(
            owner, job.memo.api, served.name, job.request_id, request.headers.get("traceparent")
        )
        ordered = asyncio.Event()
        begun = asyncio.ensure_future(_named(self._begin(ordered, served, owner, job, account), job))

        def close(*, has_status: bool = True) -> None:
            outcome, counts = _let_go(begun)
            if outcome == "failed" and not has_status and not _has_begun(begun):
                account.refuse()
            else:
                account.close(outcome, counts)

        try:
            if job.stream:
                ready = _tokenized(ordered, served, job)
                return await self._streamed(begun, ready, job, close, request.scope.get("patience_s", PATIENCE_S))
            return await _whole(request, begun, job, partial(close, has_status=False))
        except Problem as problem:
            problem.is_counted = _has_begun(begun)
            raise

    async def resume(self, last_event_id: str, owner: Owner, num_seen: int = 0) -> Response:
        """Resume a stream after the event with this id, or after the first ``num_seen`` events."""
        request_id, seen = read_event_id(last_event_id)
        memo, reading = await self._desk.resume(request_id, owner)
        if seen and len(seen) != reading.num_choices + 1:
            reading.close()
            raise wrong("Last-Event-ID", f"{last_event_id!r} is not the id of an event of this answer")
        served = await self._desk.served()
        writer = self._writers[memo.api](memo, served, request_id)
        numbering = Numbering(request_id, reading.num_choices, seen, num_seen)
        close = self._resumed(owner, memo.api, served.name, request_id, reading, num_known=sum(seen) + num_seen)
        return EventStream(events_of(reading, writer, numbering), close, _headers(request_id), SLOW_READER_S)

    def _resumed(
        self, owner: Owner, api: str, model: str, request_id: str, reading: Reading, *, num_known: int
    ) -> Callable[[], None]:
        """Record the usage of a resumed answer. An event usually is one token, and events that the reader already had
        are not new."""
        account = self._accounts.open(owner, api, model, request_id, None, traced=False)

        def close() -> None:
            reading.close()
            account.close(reading.outcome, Counts(0, max(0, reading.so_far().answer - num_known)))

        return close

    async def look_up(self, request_id: str, owner: Owner, may: Callable[[Memo], bool]) -> Response:
        """Return an answer's current state if ``is_allowed`` allows it, without replacing its reader. Raises ApiError.
        An answer that has ended is recorded as if it had been read."""
        seen = await self._desk.look_up(request_id, owner, may)
        served = await self._desk.served()
        writer = self._writers[seen.memo.api](seen.memo, served, request_id)
        if seen.has_ended:
            account = self._accounts.open(owner, seen.memo.api, served.name, request_id, None, traced=False)
            account.close("done", Counts(0, seen.counts.answer))
        return JsonResponse(writer.whole(seen.parts, seen.counts), headers=_headers(request_id))

    async def _orders(self, served: Served, job: Job) -> list[Order]:
        orders: list[Order] = []
        for ask in job.asks:
            if orders:
                await asyncio.sleep(0)  # other tasks get their turn between the prompts of a long list
            orders.append(await self._desk.order(ask, served))
        return orders

    async def _begin(
        self, ordered: asyncio.Event, served: Served, owner: Owner, job: Job, account: Account
    ) -> Reading | Lot:
        """Submit the requests and wait for the first part or the first error. ``prompts_ready`` is set once the prompts
        have been made or have failed."""
        try:
            orders = await self._orders(served, job)
        finally:
            ordered.set()
        account.num_prompt = sum(len(order.ids) for order in orders)
        reading: Reading | Lot
        if len(orders) == 1:
            reading = self._desk.begin(orders[0], owner, job.request_id, job.memo, told=account.tokens)
        else:
            account.request_ids = tuple(f"{job.request_id}-{number}" for number in range(len(orders)))
            reading = Lot(
                [
                    self._desk.begin(order, owner, request_id, None, told=account.tokens)
                    for order, request_id in zip(orders, account.request_ids, strict=True)
                ]
            )
        with contextlib.ExitStack() as undo:
            undo.callback(reading.close)
            await reading.look()
            undo.pop_all()
        return reading

    async def _streamed(
        self,
        begun: asyncio.Future[Reading | Lot],
        tokenized: Coroutine[Any, Any, None],
        job: Job,
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
        return EventStream(_chunks(begun, job), close, _headers(job.request_id), SLOW_READER_S)


async def _tokenized(ordered: asyncio.Event, served: Served, job: Job) -> None:
    """Wait until the prompt has been tokenized if it may be longer than the model's context: clients expect that error
    in the status."""
    context = served.manifest.context
    if any(size_of(ask, context) >= context for ask in job.asks):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONG_PATIENCE_S):
                await ordered.wait()


async def _chunks(begun: asyncio.Future[Reading | Lot], job: Job) -> AsyncIterator[bytes]:
    try:
        reading = await begun
    except Problem as problem:
        yield b"".join(event.encode() for event in job.writer.failed(problem))
        return
    async for chunk in events_of(reading, job.writer, Numbering(job.request_id, job.num_choices)):
        yield chunk


async def _whole(
    request: Request, begun: asyncio.Future[Reading | Lot], job: Job, close: Callable[[], None]
) -> Response:
    answer = asyncio.ensure_future(_collect(begun, job))
    watcher = asyncio.ensure_future(hang_up(request.receive))
    try:
        await asyncio.wait({answer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=HUNG_UP)
        return JsonResponse(answer.result(), headers=_headers(job.request_id))
    finally:
        for task in (answer, watcher):
            task.cancel()
        await asyncio.gather(answer, watcher, return_exceptions=True)
        close()


async def _collect(begun: asyncio.Future[Reading | Lot], job: Job) -> dict[str, object]:
    reading = await begun
    parts: list[Part] = []
    while more := await reading.next():
        parts += more
    return job.writer.whole(parts, reading.counts())


async def _named(begun: Coroutine[Any, Any, Reading | Lot], job: Job) -> Reading | Lot:
    """Await the answer; an error gets the client's own name for the wrong parameter."""
    try:
        return await begun
    except Problem as problem:
        if problem.param is None:
            raise
        raise problem.named(job.asks[0].name_of(problem.param)) from None


def _has_begun(begun: asyncio.Future[Reading | Lot]) -> bool:
    """Whether the answer has begun without an error."""
    return begun.done() and not begun.cancelled() and begun.exception() is None


def _let_go(begun: asyncio.Future[Reading | Lot]) -> tuple[str, Counts]:
    """Cancel the answer if it is in progress. Returns its outcome and the tokens computed."""
    if not begun.done():
        begun.cancel()
        return "left", Counts(0, 0)
    if begun.cancelled():
        return "left", Counts(0, 0)
    if begun.exception() is not None:
        return "failed", Counts(0, 0)
    begun.result().close()
    return begun.result().outcome, begun.result().so_far()


def _headers(request_id: str) -> dict[str, str]:
    return identified(request_id)

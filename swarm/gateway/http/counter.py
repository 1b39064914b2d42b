"""The counter: takes asks to the desk, and brings the answer back over HTTP, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.answer import Part
from swarm.gateway.apis.writer import Writer
from swarm.gateway.ask import Ask
from swarm.gateway.desk.desk import Desk, Owner
from swarm.gateway.desk.reading import Lot, Reading
from swarm.gateway.desk.served import Served
from swarm.gateway.errors import Problem
from swarm.gateway.http.json import JsonResponse
from swarm.gateway.http.sse import EventStream, Numbering, events_of, hang_up, read_event_id
from swarm.gateway.memo import Memo

PATIENCE_S = 0.008  # for an error that still fits into the status; then a stream's headers go out
SLOW_READER_S = 60.0  # without taking a byte, until a stream is ended
HUNG_UP = 499  # a status that nobody reads

MakeWriter = Callable[[Memo, Served, str], Writer]


@dataclass(frozen=True, slots=True)
class Job:
    """What an API made of a body. Several asks are several prompts of one answer, each with ``n`` choices."""

    request_id: str
    asks: Sequence[Ask]
    memo: Memo
    writer: Writer
    stream: bool

    @property
    def num_choices(self) -> int:
        return sum(ask.params.n for ask in self.asks)


class Counter:
    """One for a gateway. ``writers``: how answers are written again that are read on, by API."""

    def __init__(self, desk: Desk, writers: dict[str, MakeWriter]) -> None:
        self._desk = desk
        self._writers = writers

    async def serve(self, request: Request, served: Served, owner: Owner, job: Job) -> Response:
        """Answer a request. Raises Problem for what goes wrong before a status is sent."""
        begun = asyncio.ensure_future(self._begin(served, owner, job))
        if job.stream:
            return await self._streamed(begun, job)
        return await _whole(request, begun, job)

    async def resume(self, last_event_id: str, owner: Owner) -> Response:
        """Go on with a stream behind the event of this id."""
        request_id, seen = read_event_id(last_event_id)
        memo, reading = await self._desk.resume(request_id, owner)
        writer = self._writers[memo.api](memo, await self._desk.served(), request_id)
        numbering = Numbering(request_id, reading.num_choices, seen)
        return EventStream(events_of(reading, writer, numbering), reading.close, _headers(request_id), SLOW_READER_S)

    async def again(self, request: Request, request_id: str, owner: Owner, may: Callable[[Memo], bool]) -> Response:
        """Give an answer once more, whole, once it has ended, if ``may`` says so. Raises Problem."""
        memo, reading = await self._desk.resume(request_id, owner)
        if not may(memo):
            reading.close()
            raise Problem(404, f"the answer {request_id!r} was not stored: ask with store", code="not_found")
        writer = self._writers[memo.api](memo, await self._desk.served(), request_id)
        begun: asyncio.Future[Reading | Lot] = asyncio.get_running_loop().create_future()
        begun.set_result(reading)
        return await _whole(request, begun, Job(request_id, (), memo, writer, stream=False))

    async def _begin(self, served: Served, owner: Owner, job: Job) -> Reading | Lot:
        """Hand the asks in and wait for the first part, or for what is wrong with them."""
        orders = [await self._desk.order(ask, served) for ask in job.asks]
        reading: Reading | Lot
        if len(orders) == 1:
            reading = self._desk.begin(orders[0], owner, job.request_id, job.memo)
        else:
            reading = Lot([self._desk.begin(order, owner, None, None) for order in orders])
        try:
            await reading.look()
        except BaseException:
            reading.close()
            raise
        return reading

    async def _streamed(self, begun: asyncio.Future[Reading | Lot], job: Job) -> Response:
        try:
            await asyncio.wait({begun}, timeout=PATIENCE_S)
        except asyncio.CancelledError:
            begun.cancel()
            raise
        if begun.done():
            begun.result()  # raises what is wrong
        return EventStream(_chunks(begun, job), lambda: _let_go(begun), _headers(job.request_id), SLOW_READER_S)


async def _chunks(begun: asyncio.Future[Reading | Lot], job: Job) -> AsyncIterator[bytes]:
    try:
        reading = await begun
    except Problem as problem:
        yield b"".join(event.encode() for event in job.writer.failed(problem))
        return
    async for chunk in events_of(reading, job.writer, Numbering(job.request_id, job.num_choices)):
        yield chunk


async def _whole(request: Request, begun: asyncio.Future[Reading | Lot], job: Job) -> Response:
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
        _let_go(begun)


async def _collect(begun: asyncio.Future[Reading | Lot], job: Job) -> dict[str, object]:
    reading = await begun
    parts: list[Part] = []
    while more := await reading.next():
        parts += more
    return job.writer.whole(parts, reading.counts())


def _let_go(begun: asyncio.Future[Reading | Lot]) -> None:
    """Cancel what is under way; nothing, if it has ended."""
    if not begun.done():
        begun.cancel()
    elif not begun.cancelled() and begun.exception() is None:
        begun.result().close()


def _headers(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id}

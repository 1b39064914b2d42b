"""Server-sent event streams of answers. Each event is sent once; while there is none, a comment is sent every second.

Every event has an id: the request's id, and how many events of each choice have been sent up to it (the last number
counts the events after all choices). The interleaving of choices depends on timing, but the sequence of each choice's
events does not. So a reader that sends the last id it has seen gets exactly the missing events, from any gateway.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarm.gateway.answer import AnswerPart
from swarm.gateway.apis.writer import AnswerWriter, SseEvent
from swarm.gateway.completion.answer_stream import AnswerStream, MergedAnswers
from swarm.gateway.errors import ApiError

EVENT_STREAM, JSON_LINES = "text/event-stream", "application/x-ndjson"
QUIET_S = 1.0  # seconds without a byte after which a comment is sent
# A single line: after an event with an id, OpenAI's Python client takes an empty line for another event, and breaks.
COMMENT = b": still here\n"
# Paths where a POST with Last-Event-ID resumes a stream. Its body is not read.
RESUMABLE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_ID = re.compile(r"([0-9A-Za-z_-]{1,128})(?::([0-9]{1,9}(?:\.[0-9]{1,9}){1,64}))?")


class EventNumbering:
    """Numbers the events of a stream, and leaves out those that the reader already has."""

    def __init__(self, request_id: str, num_choices: int, seen: Sequence[int] = (), num_seen: int = 0) -> None:
        """Start at the beginning of the answer. ``seen``: number of events that the reader has of each choice, and of
        those after all choices. ``num_seen``: number of the stream's first events that it has, for streams with a
        single order."""
        self._request_id, self._num_left_out = request_id, num_seen
        self._counts = [0] * (num_choices + 1)
        self._seen = list(seen) if len(seen) == len(self._counts) else list(self._counts)
        self._starts_at_beginning = not any(self._seen)

    def encode(self, events: Sequence[SseEvent], choice: int) -> bytes:
        """Encode events of a choice; choice -1 stands for events after all choices."""
        encoded = bytearray()
        for event in events:
            self._counts[choice] += 1
            if self._counts[choice] <= self._seen[choice]:
                continue
            if self._num_left_out:
                self._num_left_out -= 1
                continue
            at = ".".join(map(str, self._counts if self._starts_at_beginning else map(max, self._counts, self._seen)))
            encoded += event.encode(f"{self._request_id}:{at}")
        return bytes(encoded)


def resume_event_id(scope: Scope) -> str:
    """Return the event id with which a POST resumes a stream; "" for a request for a new answer."""
    if scope["method"] != "POST" or scope["path"] not in RESUMABLE:
        return ""
    ids = [value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"]
    return ids[-1] if ids else ""


def parse_event_id(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse an event id into the request's id and the event counts. A request's id alone has no counts: the stream
    starts from the beginning. Raises ApiError."""
    match = _ID.fullmatch(text)
    if match is None:
        raise ApiError(400, f"{text[:80]!r} is not the id of an event of this server", param="Last-Event-ID")
    return match[1], tuple(int(number) for number in match[2].split(".")) if match[2] else ()


async def stream_events(
    reading: AnswerStream | MergedAnswers, writer: AnswerWriter, numbering: EventNumbering
) -> AsyncIterator[bytes]:
    """Yield the stream's bytes as they come. An error during the stream becomes an event, since the status has been
    sent."""
    try:
        first_chunk = numbering.encode(writer.start_events(reading.num_prompt), 0)
        while parts := await reading.next():
            if chunk := first_chunk + b"".join(_encode_part(part, writer, numbering) for part in parts):
                yield chunk
            first_chunk = b""
        yield first_chunk + numbering.encode(writer.end_events(reading.counts()), -1)
    except ApiError as problem:
        yield b"".join(event.encode() for event in writer.error_events(problem))


def _encode_part(part: AnswerPart, writer: AnswerWriter, numbering: EventNumbering) -> bytes:
    return numbering.encode(writer.write(part), part.choice)


async def plain_comment() -> bytes:
    """Return the comment of a stream without further news."""
    return COMMENT


async def no_comment() -> bytes:
    """Return nothing: JSON lines have no comments."""
    return b""


class EventStream(Response):
    """Streaming response that sends ``chunks``. ``close`` is called once at the end: when everything is sent, when the
    reader disconnects, or when it has read nothing for ``patience_s``. ``make_comment`` returns the comment for an idle
    stream, within a moment; empty if it has none."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        headers: dict[str, str],
        patience_s: float,
        *,
        make_comment: Callable[[], Awaitable[bytes]] = plain_comment,
        media_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}, media_type=media_type
        )
        del self.headers["content-length"]
        self._chunks, self._close, self._patience_s = chunks, close, patience_s
        self._make_comment = make_comment
        self._sent_at = 0.0  # time at which the last write completed
        self._is_sending = False  # a write is waiting for the reader
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        keeper = asyncio.ensure_future(self._keep_alive(send, sender))
        tasks = (sender, watcher, keeper)
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._end()
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _send_all(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        self._end()  # before the last write, so that usage is recorded before the reader can send its next request
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._close()

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        self._is_sending = True
        await send(message)
        self._is_sending, self._sent_at = False, asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send, sender: asyncio.Future[None]) -> None:
        """Send a comment when the stream is idle, and end a stream that its reader does not read."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            quiet_s = loop.time() - self._sent_at
            if self._is_sending and quiet_s > self._patience_s:
                sender.cancel()
            elif not self._is_sending and quiet_s >= QUIET_S:
                comment = await self._make_comment()
                if self._is_sending:  # an event came meanwhile
                    continue
                if not comment:
                    self._sent_at = loop.time()
                    continue
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._send(send, {"type": "http.response.body", "body": comment, "more_body": True})
                except TimeoutError:
                    sender.cancel()
                    return
            await asyncio.sleep(QUIET_S if self._is_sending else max(0.01, self._sent_at + QUIET_S - loop.time()))


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass

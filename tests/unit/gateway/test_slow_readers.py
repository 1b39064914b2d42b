"""Streams whose readers don't read, hang up, or are patient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from swarm.gateway.http.sse import COMMENT, EventStream

PATIENCE_S = 20.0


class Reader:
    """Takes so many messages, and then nothing."""

    def __init__(self, num_taken: int) -> None:
        self.left = num_taken
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def send(self, message: Message) -> None:
        if self.left == 0:
            await asyncio.Event().wait()
        self.left -= 1
        self.sent.append(message)

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0)


async def silent() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def run(chunks: AsyncIterator[bytes], reader: Reader, patience_s: float) -> int:
    """How often it was closed, when it has ended."""
    closed: list[None] = []
    stream = EventStream(chunks, lambda: closed.append(None), {}, patience_s)
    async with asyncio.timeout(PATIENCE_S):
        await stream({"type": "http"}, reader.receive, reader.send)
    return len(closed)


@pytest.mark.slow
async def test_a_reader_who_takes_nothing_ends_the_stream() -> None:
    """In the middle of it, or before its head was taken."""
    assert await run(endless(), Reader(5), 0.1) == 1
    assert await run(endless(), Reader(0), 0.1) == 1


async def test_a_reader_who_hangs_up_ends_the_stream() -> None:
    reader = Reader(1 << 30)
    asyncio.get_running_loop().call_later(0.1, reader.gone.set)
    assert await run(endless(), reader, 60.0) == 1


@pytest.mark.slow
async def test_a_quiet_stream_comments_and_is_not_taken_for_a_slow_reader() -> None:
    """Its head is there at once, however long its first event takes."""
    reader = Reader(1 << 30)
    asyncio.get_running_loop().call_later(2.5, reader.gone.set)
    assert await run(silent(), reader, 0.1) == 1
    assert reader.sent[0]["type"] == "http.response.start"
    assert [message["body"] for message in reader.sent[1:3]] == [COMMENT, COMMENT]


async def test_an_idle_stream_sends_the_comment_that_is_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gateway.http.sse.QUIET_S", 0.01)
    reader = Reader(1 << 30)
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        if made == 3:
            reader.gone.set()
        return f": prompt {made}/3\n".encode()

    stream = EventStream(silent(), lambda: None, {}, 60.0, make_comment=make)
    async with asyncio.timeout(PATIENCE_S):
        await stream({"type": "http"}, reader.receive, reader.send)
    assert [message["body"] for message in reader.sent[1:3]] == [b": prompt 1/3\n", b": prompt 2/3\n"]

"""A server that closes connections it promised to keep: its answers count, and one that never answers is an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.bench.plan import BenchTarget
from swarm.bench.processes.exchange import ChunkMeter, HttpExchange
from swarm.bench.prompts import BenchRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
EVENTS = b"data: " + json.dumps(CHUNK).encode() + b"\n\ndata: [DONE]\n\n"
ANSWER = HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)


@asynccontextmanager
async def serving(num_answers: int) -> AsyncIterator[str]:
    """So many answers on each connection; then the next request is read, and the connection ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(num_answers + 1):
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
            await reader.readexactly(int(fields["Content-Length"]))
            if at < num_answers:
                writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def outcomes(url: str, count: int) -> list[str]:
    now = time.monotonic()
    target = BenchTarget(url, "m", "completions", timeout_s=10.0)
    async with HttpExchange(target, ChunkMeter(now, 60.0, 1.0)) as exchange:
        jobs = [BenchRequest(index, [5, 6], 2, 1) for index in range(count)]
        return [(await exchange.send_request(job, time.monotonic()))[0].outcome for job in jobs]


async def test_a_kept_connection_that_was_closed_is_no_error() -> None:
    async with serving(2) as url:
        assert await outcomes(url, 5) == ["ok"] * 5


async def test_a_new_connection_that_ends_without_an_answer_is_one() -> None:
    async with serving(0) as url:
        assert await outcomes(url, 2) == ["connection"] * 2

"""Connections that mean no good, by raw sockets: heads and bodies that never end, garbage, too many, no reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from swarm.api_keys.file import ReloadingKeyFile
from swarm.config import GatewaySettings
from swarm.gateway.middleware.auth import AuthMiddleware
from swarm.gateway.middleware.connection import MAX_HEAD_BYTES, bounded_protocol

SETTINGS = GatewaySettings(head_timeout_s=0.4, body_timeout_s=0.4, write_timeout_s=0.5, max_connections=8)
PATIENCE_S = 20.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Routes:
    """Answers shortly, or (``/long``) without end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        try:
            while scope["path"] == "/long":
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
                if scope["path"] == "/long" and await _is_gone(receive):
                    return
        finally:
            if scope["path"] == "/long":
                self.ended.set()
        await send({"type": "http.response.body", "body": b"ok"})


async def _is_gone(receive: Receive) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    return False


class Running:
    def __init__(self, server: uvicorn.Server, port: int, routes: Routes, refused: list[int]) -> None:
        self.server, self.port, self.routes, self.refused = server, port, routes, refused

    async def say(self, *texts: bytes, pause_s: float = 0.0) -> bytes:
        """All that comes back to these words, until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = asyncio.ensure_future(reader.read())
        try:
            for text in texts:
                if not answer.done():  # else what was answered would be lost with the connection
                    writer.write(text)
                await asyncio.sleep(pause_s)
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.02)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    routes, refused = Routes(), list[int]()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        AuthMiddleware(routes, ReloadingKeyFile(None), SETTINGS),
        http=bounded_protocol(SETTINGS, refused.append),
        ws="none",
        lifespan="off",
        log_config=None,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    one = Running(server, listener.getsockname()[1], routes, refused)
    await one.until(lambda: server.started)
    loop = asyncio.get_running_loop()
    wrong: list[object] = []
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    yield one
    server.should_exit = server.force_exit = True
    await serving
    assert not wrong


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    return error


async def test_a_head_that_never_ends_is_408(server: Running) -> None:
    """In its own time, however slowly more of it comes; and so is one of which nothing comes."""
    assert status_of(await server.say(b"GET / HT")) == 408
    slowly = [b"GET /health HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 40]
    assert b"408 Request Timeout" in await server.say(*slowly, pause_s=0.05)
    assert status_of(await server.say()) == 408
    second = await server.say(GET + b"\r\n", b"GET /hea", pause_s=0.1)  # on a connection that was used before
    assert second.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in second
    assert server.refused == [408] * 4  # and counted, each once


async def test_a_body_that_never_ends_is_408(server: Running) -> None:
    answer = await server.say(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert (status_of(answer), error_of(answer)["code"]) == (408, "timeout")
    assert status_of(await server.say(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")) == 408


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody who thinks that this is TLS
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: \x00\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Content-Length: 1\r\n\r\n{",
    ],
)
async def test_malformed_requests_are_refused_with_4xx(server: Running, garbage: bytes) -> None:
    """In OpenAI's form, and the connection is closed."""
    answer = await server.say(garbage + (b"" if b"\r\n\r\n" in garbage else b"\r\n\r\n"))
    first = answer.split(b"HTTP/1.1 ")[1]
    assert 200 <= int(first[:3]) < 500
    assert first.startswith(b"4")
    assert error_of(answer)["message"]


async def test_a_request_with_two_lengths_is_refused(server: Running) -> None:
    """A proxy that believes the other one takes what is left for the next request."""
    two = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = await server.say(GET + b"\r\n" + HEAD + two + GET + b"\r\n")
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
    assert "not both" in str(error_of(answer)["message"])


@pytest.mark.parametrize(
    "fields",
    [
        b"X: " + b"a" * (2 * MAX_HEAD_BYTES),
        b"X: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"a:\r\n" * 48_000 + b"\r\n",
    ],
    ids=["without end", "whole", "of many fields"],
)
async def test_a_long_head_is_431(server: Running, fields: bytes) -> None:
    """Also one that comes in one piece, and behind another request."""
    answers = [await server.say(GET + fields), await server.say(GET + b"\r\n" + GET + fields)]
    assert server.refused == [431, 431]
    for answer in filter(None, answers):  # the system drops an answer where more comes than is read
        assert error_of(answer)["code"] == "too_large"


async def test_a_head_that_is_just_short_enough_is_read(server: Running) -> None:
    """With a long body behind it in the same piece."""
    rest = b"Content-Length: 40000\r\nX: " + b"a" * (MAX_HEAD_BYTES - 150) + b"\r\n\r\n" + b'"' + b"7" * 39_998 + b'"'
    assert (await server.say(HEAD + rest + GET + b"Connection: close\r\n\r\n")).count(b"HTTP/1.1 200") == 2


async def test_garbage_behind_a_request_does_not_spoil_its_answer(server: Running) -> None:
    """Pipelined requests are answered in their order, and what is no request afterwards."""
    answer = await server.say(GET + b"\r\n" + GET + b"\r\n" + b"\x00\x01garbage\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d{3}) ", answer) == [b"200", b"200", b"400"]


async def test_garbage_in_a_body_while_its_answer_is_sent_ends_the_connection(server: Running) -> None:
    answer = await server.say(
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n\r\n", pause_s=0.1
    )
    assert answer.startswith(b"HTTP/1.1 200")
    await server.until(lambda: not server.server.server_state.connections)


async def test_connections_are_bounded(server: Running) -> None:
    """One more than so many is told so at once; when others have gone, there is room again."""
    others = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(SETTINGS.max_connections)]
    await server.until(lambda: len(server.server.server_state.connections) == SETTINGS.max_connections)
    answer = await server.say(GET + b"\r\n")
    assert (status_of(answer), error_of(answer)["code"]) == (503, "overloaded")
    assert b"retry-after: 1\r\n" in answer
    for _, writer in others:
        writer.close()
    await server.until(lambda: not server.server.server_state.connections)
    assert status_of(await server.say(GET + b"Connection: close\r\n\r\n")) == 200


async def test_who_takes_nothing_is_let_go(server: Running) -> None:
    """An answer that nobody reads doesn't stay in memory, nor its connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as deaf:
        deaf.sendall(b"GET /long HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await server.routes.ended.wait()
        await server.until(lambda: not server.server.server_state.connections)

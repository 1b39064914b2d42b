"""The short way past the routes: what it takes, and that its answers are those of the ordinary way."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import Unavailable
from swarm.gateway.app import make_app
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.http.sse import RESUMABLE
from swarm.gateway.middleware.fast_path import BODY, JSON, ROUTES, FastPath
from swarm.gateway.swarms import Swarms
from swarm.gateway.thread_pool import LONG_BODY

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/v1/rerank": {"model": "m", "query": "hi", "documents": ["a"]},
    "/api/embed": {"model": "m", "input": "hi"},
    "/api/embeddings": {"model": "m", "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "m", "prompt": "a"},
}


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[bytes, bytes]


class Client:
    """A client library that fails whenever it is asked."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def describe(self) -> None:
        raise self._error

    async def recall(self, request_id: str) -> None:
        assert request_id == "abc"
        raise self._error


class Ordinary:
    """Stands for the routes; counts what comes that way."""

    def __init__(self, error: Exception) -> None:
        self.app: FastAPI = make_app(Swarms([CompletionService(Client(error))]))  # type: ignore[arg-type]
        self.num = 0
        self.state = self.app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num += 1
        await self.app(scope, receive, send)


def make(error: Exception) -> tuple[FastPath, Ordinary]:
    ordinary = Ordinary(error)
    return FastPath(ordinary), ordinary  # type: ignore[arg-type]


async def ask(
    app: ASGIApp,
    path: str,
    body: bytes,
    method: str = "POST",
    *,
    error: type[Exception] | None = None,
    last_event_id: str = "",
) -> Answer:
    """``error`` is what the application raises behind its answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    headers += [(b"last-event-id", last_event_id.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", BODY: body}
    with suppress(msgspec.DecodeError, RecursionError):
        scope[JSON] = msgspec.json.decode(body)
    with pytest.raises(error) if error else nullcontext():
        await app(scope, receive, send)
    kinds = {name: value for name, value in sent[0]["headers"] if name not in (b"x-request-id", b"request-id")}
    return Answer(sent[0]["status"], sent[1]["body"], kinds)


def test_it_has_all_routes_that_answer() -> None:
    assert set(ROUTES) == set(GOOD)
    assert set(ROUTES) >= RESUMABLE


@pytest.mark.parametrize("path", sorted(RESUMABLE))
@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'{"model": 3}', b"not json", b"\xff"])
async def test_a_stream_goes_on_whatever_the_body_is(path: str, body: bytes) -> None:
    """Where Last-Event-ID names an event."""
    lane, ordinary = make(Unavailable("nobody is there"))
    answer = await ask(lane, path, body, last_event_id="abc:1.0")
    assert (answer.status, ordinary.num) == (503, 0)
    assert b"nobody is there" in answer.body


@pytest.mark.parametrize("path", GOOD)
async def test_what_is_right_takes_the_short_way_and_fails_in_the_same_words(path: str) -> None:
    lane, ordinary = make(Unavailable("nobody is there"))
    body = json.dumps(GOOD[path]).encode()
    short = await ask(lane, path, body)
    assert ordinary.num == 0
    assert short == await ask(ordinary, path, body)
    assert short.status == 503
    assert b"nobody is there" in short.body


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("change", [{"model": 3}, {"messages": 3, "prompt": 3, "input": 3, "tokens": ["x"]}])
async def test_a_wrong_field_is_told_by_the_ordinary_way(path: str, change: dict[str, Any]) -> None:
    """But for long bodies, which it would decode again: they are told in the same words."""
    lane, ordinary = make(Unavailable("nobody is there"))
    body = GOOD[path] | {name: value for name, value in change.items() if name == "model" or name in GOOD[path]}
    if path == "/v1/completions":
        body |= {"temperature": "warm"}  # prompts are looked at later
    if path == "/v1/embeddings":
        body |= {"dimensions": "few"}  # so are inputs
    if path == "/api/embed":
        body |= {"truncate": "perhaps"}
    if path == "/v1/rerank":
        body |= {"query": 3}
    answer = await ask(lane, path, json.dumps(body).encode())
    assert (answer.status, ordinary.num) == (400, 1)
    long = await ask(lane, path, json.dumps(body | {"user": "x" * LONG_BODY}).encode())
    assert (long.status, ordinary.num) == (400, 1)
    assert long.body == answer.body


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/completions", b"", "POST"),
        ("/v1/completions", b"[" * 100_000, "POST"),
        ("/v1/completions", b"3", "POST"),
        ("/v1/completions", json.dumps(GOOD["/v1/completions"]).encode(), "GET"),
    ],
)
async def test_whatever_else_goes_the_ordinary_way(path: str, body: bytes, method: str) -> None:
    lane, ordinary = make(Unavailable("nobody is there"))
    with_lane = await ask(lane, path, body, method)
    assert ordinary.num == 1
    assert with_lane == await ask(ordinary, path, body, method)


async def test_a_fault_of_ours_is_500_and_is_raised_for_the_log() -> None:
    lane, ordinary = make(ZeroDivisionError("a bug"))
    body = json.dumps(GOOD["/v1/completions"]).encode()
    short = await ask(lane, "/v1/completions", body, error=ZeroDivisionError)
    assert (short.status, ordinary.num) == (500, 0)
    assert short == await ask(ordinary, "/v1/completions", body, error=ZeroDivisionError)

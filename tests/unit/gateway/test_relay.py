"""Requests on their way to other servers: one answer for each, and one that broke off says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
import pytest
from starlette.types import Message, Receive, Scope, Send

from swarm.config import UpstreamSettings
from swarm.gateway.completion.served_model import ServedModel
from swarm.gateway.completion.service import Caller
from swarm.gateway.upstream.pool import UpstreamTarget
from swarm.gateway.upstream.proxy import UpstreamProxy
from tests.unit.gateway.apis.feeding import served


class Answer:
    """Another server's answer: an event stream of these parts, which may break off."""

    status, content_type = 200, "text/event-stream"

    def __init__(self, parts: list[bytes | Exception]) -> None:
        self._parts, self.content, self.closed = parts, self, False

    async def iter_any(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def close(self) -> None:
        self.closed = True


class Relay(UpstreamProxy):
    """Upstreams whose servers are made up: each post takes the next of ``answers``."""

    def __init__(self, ours: int, when: Literal["never", "busy", "down"], answers: list[Answer | Exception]) -> None:
        self.ours, self.answers, self.asked = ours, answers, 0
        self.last: ServedModel | None = served()
        settings = [UpstreamSettings(url=f"http://127.0.0.1:{port}/v1", when=when) for port in (1, 2)]
        self.named, self.asked_for = "toy", list[str]()
        super().__init__(self._swarm, settings, own_name=self._own_name)

    def _own_name(self, model: str, _caller: Caller) -> str | None:
        if self.last is None:
            return ""
        return self.last.name if self.last.has_name(model) else None

    async def _swarm(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.ours, "headers": []})
        await send({"type": "http.response.body", "body": b"data: ours\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _post(self, target: UpstreamTarget, path: str, fields: dict[str, Any]) -> Any:
        self.asked += 1
        self.asked_for.append(target.model)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def answer(self) -> tuple[list[int], bytes]:
        """The statuses and the bytes that a client gets."""
        sent: list[Message] = []

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        body = {"model": self.named, "stream": True}
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "swarm.json": body}
        async with asyncio.timeout(20.0):
            await self(scope, receive, send)
        statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
        return statuses, b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("ours", [429, 503])
async def test_there_is_one_answer(ours: int) -> None:
    """Of the server that has taken it, or our refusal; never both."""
    statuses, content = await Relay(ours, "busy", [Answer([b"data: theirs\n\n"])]).answer()
    assert (statuses, content) == ([200], b"data: theirs\n\n")
    failed: list[Answer | Exception] = [OSError("gone"), OSError("gone")]
    assert await Relay(ours, "busy", failed).answer() == ([ours], b"data: ours\n\n")


async def test_what_our_swarm_answers_is_sent_as_it_is() -> None:
    relay = Relay(200, "busy", [])
    assert await relay.answer() == ([200], b"data: ours\n\n")
    assert relay.asked == 0


async def test_a_failure_falls_back_to_the_next() -> None:
    relay = Relay(503, "down", [aiohttp.ClientConnectionError("gone"), Answer([b"data: theirs\n\n"])])
    assert await relay.answer() == ([200], b"data: theirs\n\n")
    assert relay.asked == 2


async def test_nobody_else_is_asked_once_bytes_were_sent() -> None:
    """An answer that breaks off ends with an error, in the stream: another one's would begin anew."""
    broken = Answer([b"data: 1\n\nda", aiohttp.ClientPayloadError("cut")])
    relay = Relay(503, "busy", [broken, Answer([b"data: again\n\n"])])
    statuses, content = await relay.answer()
    assert (statuses, relay.asked) == ([200], 1)
    first, error, rest = content.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert b"upstream_failed" in error
    assert broken.closed


@pytest.mark.parametrize("named", ["gpt-5-pro", "toy-2", "o1/../../x", ""])
async def test_no_name_that_a_client_wrote_reaches_a_server_that_it_is_not_meant_for(named: str) -> None:
    """Whatever stands in ``model``, the operator pays for the model that our swarm serves, or for none."""
    relay = Relay(503, "busy", [Answer([b"data: theirs\n\n"])])
    relay.named = named
    assert await relay.answer() == ([503], b"data: ours\n\n")
    assert relay.asked == 0
    relay.last = None  # our swarm has not served yet: nobody knows which names are its own
    assert await relay.answer() == ([503], b"data: ours\n\n")
    relay.last = served(("*",))  # clients may call our model as they like
    assert await relay.answer() == ([200], b"data: theirs\n\n")
    assert relay.asked_for == ["toy"]

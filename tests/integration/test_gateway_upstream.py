"""Requests that go to other servers: by name, and because our swarm is down or full. The gateway is a real process; so
are the connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from starlette.types import Receive, Scope, Send

from swarm.config import UpstreamSettings
from swarm.gateway.upstream.pool import OUTCOMES
from swarm.gateway.upstream.proxy import UpstreamProxy
from swarm.metrics.http import HttpMetrics
from tests.integration.processes import free_ports

PATIENCE_S = 40.0
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


class Other:
    """A stand-in for another OpenAI-compatible server; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.status = 200
        self.pause_s = 0.0
        self.hung_up = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self.asked.append((request.path, request.headers.get("authorization", ""), fields))
        if self.status != 200:
            return web.json_response({"error": {"message": "theirs"}}, status=self.status)
        if not fields.get("stream"):
            return web.json_response({"from": "other", "model": fields["model"]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in EVENTS:
                await response.write(event[:5])
                await asyncio.sleep(self.pause_s)
                await response.write(event[5:])
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up.set()
            raise
        return response


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    one = Other()
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", one.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield one
    await runner.cleanup()


@contextlib.contextmanager
def gateway(folder: Path, upstream: list[dict[str, Any]]) -> Iterator[str]:
    """A gateway whose broker doesn't answer; its URL."""
    port = free_ports(2)
    environment = {
        **os.environ,
        "SWARM_UPSTREAM": json.dumps(upstream),
        "SWARM_URL": f"tcp://127.0.0.1:{port + 1}",
        "SWARM_CLIENT__CONNECT_TIMEOUT_S": "0.3",
        "SWARM_CLIENT__RECONNECT_TIMEOUT_S": "0.3",
        "OTHERS_KEY": "secret",
    }
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm", "gateway", "--http", str(port)], env=environment, stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
        assert code == 0


async def until_alive(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + "/health") as response:
                    assert response.status == 200
                    return
            await asyncio.sleep(0.1)


async def test_others_answer_by_name_and_for_a_swarm_that_is_down(other: Other, tmp_path: Path) -> None:
    """Each with its own name for the model and its own key; the first that can; and when none can, our own word."""
    upstream = [
        {"url": "http://127.0.0.1:9/v1", "when": "down"},  # nobody is there
        {
            "url": other.url,
            "when": "busy",
            "overflow_model": "big",
            "models": {"gpt": "gpt-large"},
            "key_env": "OTHERS_KEY",
        },
    ]
    with gateway(tmp_path, upstream) as url:
        async with aiohttp.ClientSession() as session:
            await until_alive(session, url)
            # by name: nobody asks our swarm
            async with session.post(url + "/v1/responses", json={"model": "gpt", "input": "x", "odd": 1}) as response:
                assert (response.status, await response.json()) == (200, {"from": "other", "model": "gpt-large"})
                assert response.headers["x-swarm-upstream"] in other.url
            assert other.asked == [("/v1/responses", "Bearer secret", {"model": "gpt-large", "input": "x", "odd": 1})]

            # our swarm is down: the first isn't there, the second answers
            body = {"model": "village", "messages": [{"role": "user", "content": "x"}]}
            async with session.post(url + "/v1/chat/completions", json=body) as response:
                assert (response.status, (await response.json())["model"]) == (200, "big")

            # a stream comes byte for byte, with comments between its events while it is quiet
            other.pause_s = 1.3
            async with session.post(url + "/v1/completions", json={"model": "gpt", "stream": True}) as response:
                content = await response.read()
            assert content.replace(b": still here\n", b"") == b"".join(EVENTS)
            assert content.count(b": still here\n") >= 2

            # whoever hangs up ends it there too
            other.pause_s = 30.0
            other.hung_up.clear()
            async with session.post(url + "/v1/completions", json={"model": "gpt", "stream": True}) as response:
                assert response.status == 200
                response.close()
            async with asyncio.timeout(PATIENCE_S):
                await other.hung_up.wait()

            # a wrong request is the client's fault, and the answer is passed on
            other.status = 400
            async with session.post(url + "/v1/completions", json={"model": "gpt"}) as response:
                assert (response.status, await response.json()) == (400, {"error": {"message": "theirs"}})
            # nobody can: our own 503 for ours, and one that says so for theirs
            other.status = 500
            async with session.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == 503
                assert "broker" in (await response.json())["error"]["message"]
                assert int(response.headers["retry-after"]) >= 1
            async with session.post(url + "/v1/completions", json={"model": "gpt"}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, "upstream_failed")
    log = (tmp_path / "gateway.log").read_text()
    assert "upstream_failed" in log
    assert "Traceback" not in log


async def test_a_swarm_that_never_served_passes_no_names_on(other: Other, tmp_path: Path) -> None:
    """They are a client's words: without ``overflow_model`` they would choose what the operator pays for."""
    with gateway(tmp_path, [{"url": other.url, "when": "busy", "key_env": "OTHERS_KEY"}]) as url:
        async with aiohttp.ClientSession() as session:
            await until_alive(session, url)
            for model in ("village", "gpt-5-pro-very-expensive", "o1/../../x"):
                body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
                async with session.post(url + "/v1/chat/completions", json=body) as response:
                    assert response.status == 503
    assert other.asked == []


async def _relayed(other: Other, status: int, when: str, *, hangs_up: bool = False) -> tuple[int, HttpMetrics]:
    """What comes of a request that our swarm answers with this status."""
    numbers = HttpMetrics()

    async def ours(scope: Scope, receive: Receive, send: Send) -> None:
        if status >= 400:
            scope.get("swarm.refused", numbers.count_refused)("completions", status)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"ours"})

    settings = UpstreamSettings(url=other.url, when=when, overflow_model="big")  # type: ignore[arg-type]
    upstreams = UpstreamProxy(ours, [settings], numbers)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not hangs_up:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "swarm.json": {"model": "village"},
    }
    await upstreams(scope, receive, send)
    await upstreams.aclose()
    return sent[0]["status"], numbers


def _outcomes(numbers: HttpMetrics) -> dict[str, int]:
    return {outcome: count for (_, outcome), count in numbers.upstream_counts.items() if count}


@pytest.mark.parametrize(
    ("ours", "when", "passed_on"),
    [
        (429, "busy", True),
        (429, "down", False),
        (503, "busy", True),
        (503, "down", True),
        (503, "never", False),
        (200, "busy", False),
        (400, "busy", False),
    ],
)
async def test_busy_and_down(other: Other, ours: int, when: str, passed_on: bool) -> None:
    """Who overflows when; an answer that our swarm has is never asked of others. What others answer is not counted
    among the refused."""
    status, numbers = await _relayed(other, ours, when)
    assert bool(other.asked) == passed_on
    assert status == (200 if passed_on else ours)
    assert _outcomes(numbers) == ({"answered": 1} if passed_on else {})
    is_refused = ours != 200 and not passed_on
    assert numbers.refused_counts == ({("completions", str(ours)): 1} if is_refused else {})


async def test_what_nobody_answers_is_refused_once(other: Other) -> None:
    """By our swarm's word; that the other one failed is counted beside, from a zero on."""
    other.status = 500
    status, numbers = await _relayed(other, 429, "busy")
    assert status == 429
    assert _outcomes(numbers) == {"failed": 1}
    assert {outcome for _, outcome in numbers.upstream_counts} == set(OUTCOMES)
    assert numbers.refused_counts == {("completions", "429"): 1}


async def test_who_hangs_up_makes_no_other_server_well_or_unwell(other: Other) -> None:
    _, numbers = await _relayed(other, 503, "down", hangs_up=True)
    assert _outcomes(numbers) == {"left": 1}

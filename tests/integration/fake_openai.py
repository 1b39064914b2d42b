"""A pretend OpenAI-compatible server, well-behaved or not, for those who ask it to be: the model's name says how."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import TracebackType
from typing import Any, Self

from aiohttp import web

PIECE_S = 0.002
CAPACITY = 8  # streams of ``crowded`` that go on at once at full speed


class FakeOpenAI:
    """Serves on a thread of its own, on a port of the system's choice. ``bodies``: what was asked, in order.

    Models: ``good``; ``plain-stream`` (no usage in streams, and 400 for stream_options); ``usage-lies-not`` (two tokens
    a piece, told by usage); ``broken`` (500); ``busy`` (each request is refused once with 429 and Retry-After: 0);
    ``always-busy``; ``cut`` (streams end in the middle); ``garbage``; ``silent`` (answers never); ``crowded`` (the more
    streams, the slower each); ``flaky`` (every third request fails)."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._num_streams = 0
        self._refused: set[str] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._answer),
                web.post("/v1/completions", self._answer),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "good", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.bodies.append(asked)
        self.headers.append(dict(request.headers))
        model = asked["model"]
        is_probe = asked["max_tokens"] <= 2  # calibration: whoever could not answer that would not be measured at all
        if model == "plain-stream" and "stream_options" in asked:
            return _error(400, "Unrecognized request argument: stream_options")
        if not is_probe and (refusal := self._refusal(asked)) is not None:
            return refusal
        if model == "silent" and not is_probe:
            await asyncio.sleep(60)
        if not asked["stream"]:
            return web.json_response(_whole(asked))
        self._num_streams += 1
        try:
            return await self._stream(request, asked, is_probe)
        finally:
            self._num_streams -= 1

    def _refusal(self, asked: dict[str, Any]) -> web.Response | None:
        model, key = asked["model"], json.dumps(asked)
        if model == "broken":
            return _error(500, "the model has burnt down")
        if model == "always-busy" or (model == "busy" and key not in self._refused):
            self._refused.add(key)
            return _error(429, "too many", {"Retry-After": "0"})
        if model == "flaky" and len(self.bodies) % 3 == 0:
            return _error(503 if len(self.bodies) % 2 else 500, "not today", {"Retry-After": "0"})
        return None

    async def _stream(self, request: web.Request, asked: dict[str, Any], is_probe: bool) -> web.StreamResponse:
        model, number = asked["model"], asked["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": hello\n\n")
        per_piece = 2 if model == "usage-lies-not" else 1
        for at in range(0, number, per_piece):
            slower = max(1.0, self._num_streams / CAPACITY) if model == "crowded" else 1.0
            await asyncio.sleep(PIECE_S * slower * (4 if at == 0 else 1))
            if not is_probe and at >= number // 2:
                if model == "cut":
                    return response
                if model == "garbage":
                    await response.write(b"data: <html>oops</html>\n\n")
                    return response
            await response.write(_event(_choice(asked, {"content": "word " * per_piece}, None)))
        await response.write(_event(_choice(asked, {}, "length")))
        if asked.get("stream_options", {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": _usage(asked)}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(asked: dict[str, Any], delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": delta} if "messages" in asked else {"text": delta.get("content", "")}
    return {"choices": [{"index": 0, "finish_reason": finish, **said}]}


def _whole(asked: dict[str, Any]) -> dict[str, Any]:
    text = "word " * asked["max_tokens"]
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
    )
    return {"choices": [{"index": 0, "finish_reason": "length", **said}], "usage": _usage(asked)}


def _usage(asked: dict[str, Any]) -> dict[str, int]:
    """Two tokens a word, and seven for the template: what a calibration must find."""
    prompt = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
    tokens = 2 * len(prompt.split()) + 7 if isinstance(prompt, str) else len(prompt)
    return {"prompt_tokens": tokens, "completion_tokens": asked["max_tokens"], "total_tokens": 0}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status, headers=headers)


if __name__ == "__main__":
    with FakeOpenAI() as server:
        print(server.url, flush=True)
        sys.stdin.read()

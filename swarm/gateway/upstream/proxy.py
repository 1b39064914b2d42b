"""Upstream proxy: forwards whole requests to other servers, and returns their answers unchanged."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.errors import ConfigError
from swarm.gateway.completion.service import Caller
from swarm.gateway.errors import ApiError
from swarm.gateway.http.sse import EventStream, resume_event_id, wait_for_disconnect
from swarm.gateway.upstream.pool import (
    OUTCOMES,
    UpstreamPool,
    UpstreamServer,
    UpstreamTarget,
    is_failure,
    overflow_reason,
)
from swarm.log import get_logger
from swarm.metrics.http import HttpMetrics

if TYPE_CHECKING:
    from swarm.config import UpstreamSettings

PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
MAX_ANSWER = 64 << 20  # bytes of an answer that is not streamed
MAX_CONNECTIONS = 1024  # to all other servers; further requests wait for connect_timeout_s
MAX_EVENT = 8 << 20  # bytes of one event of a stream
SLOW_READER_S = 60.0  # seconds without reading a byte after which a stream is ended
OVERFLOW_PATIENCE_S = 0.25  # seconds to wait for a refusal of our swarm before a stream's headers go out
CLIENT_CLOSED_REQUEST = 499  # status of a response whose client has disconnected
_NO_DECODING = {"accept-encoding": "identity"}  # answers are passed on without decompressing

log = get_logger(__name__)


class _UpstreamFailed(Exception):
    """This server cannot answer; another one may."""


class UpstreamProxy:
    """Middleware in front of the routes: forwards requests for other servers' models, and requests that our swarm
    cannot answer."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Sequence[UpstreamSettings],
        metrics: HttpMetrics | None = None,
        own_name: Callable[[str, Caller], str | None] = lambda _model, _caller: "",
    ) -> None:
        """Configure the servers. ``metrics``: where their outcomes are counted. ``own_name``: returns our name of
        a model that our swarm serves to a caller; None if it does not, "" while that is unknown. Raises ConfigError if
        a key cannot be read."""
        self._app, self._metrics, self._own_name = app, metrics or HttpMetrics(), own_name
        self.pool = UpstreamPool([make_server(one) for one in settings], self._metrics.upstream_counts)
        for server in self.pool.servers:  # initialise each counter: rates need a zero to begin with
            self.pool.counts.update(dict.fromkeys(((server.name, outcome) for outcome in OUTCOMES), 0))
        self._overflows = any(server.when != "never" for server in self.pool.servers)
        self._session: aiohttp.ClientSession | None = None

    @property
    def models(self) -> list[str]:
        """Names of models that only other servers have."""
        return sorted({name for server in self.pool.servers for name in server.models})

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = self._forwardable_body(scope)
        if fields is None:
            await self._app(scope, receive, send)
        elif targets := self._targets_for(str(fields.get("model")), scope):
            answer = await self._first_answer(targets, scope["path"], fields, receive)
            if answer is None:
                text = f"no server that has the model {str(fields.get('model'))[:80]!r} can be reached"
                raise ApiError(503, text, code="upstream_failed", retry_after_s=5.0)
            await answer(scope, receive, send)
        elif self._overflows:
            await self._try_own_swarm_first(fields, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _targets_for(self, model: str, scope: Scope) -> list[UpstreamTarget]:
        """Return the servers that have this model, if the caller may use it."""
        return self.pool.targets_for(model, time.monotonic()) if _may_use(scope, model) else []

    def _forwardable_body(self, scope: Scope) -> dict[str, Any] | None:
        """Return the decoded body if the request may be forwarded."""
        if scope["type"] != "http" or not self.pool.servers:
            return None
        if scope["method"] != "POST" or scope["path"] not in PATHS or "swarm.json" not in scope:
            return None
        if resume_event_id(scope):
            return None  # it resumes a stream of ours
        fields = scope["swarm.json"]
        return fields if isinstance(fields, dict) else None

    async def _try_own_swarm_first(self, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Let our swarm answer. If it refuses because it is full or down, try the other servers, and if they fail, pass
        on its refusal. A request that another server answers does not count as refused."""
        held_messages: list[Message] = []
        refusals: list[tuple[str, int]] = []

        async def hold_refusals(message: Message) -> None:
            is_refusal = message["type"] == "http.response.start" and overflow_reason(message["status"]) is not None
            if held_messages or is_refusal:
                held_messages.append(message)
            else:
                await send(message)

        scope["patience_s"] = OVERFLOW_PATIENCE_S
        scope["swarm.refused"] = lambda api, status: refusals.append((api, status))
        is_answered = False
        try:
            await self._app(scope, receive, hold_refusals)
            is_answered = bool(held_messages) and await self._overflow(
                held_messages[0]["status"], fields, scope, receive, send
            )
        finally:
            for refusal in () if is_answered else refusals:
                self._metrics.count_refused(*refusal)
        for message in () if is_answered else held_messages:
            await send(message)

    async def _overflow(self, status: int, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> bool:
        """Send the request to other servers after our swarm has refused it with this status. Returns whether one of
        them answered."""
        reason = overflow_reason(status)
        assert reason is not None  # it was held back for that status
        model = str(fields.get("model"))
        name = self._own_name(model, scope.get("owner") or Caller())
        if name is None or not _may_use(scope, name or model):
            return False  # our swarm would not have answered it in any case
        targets = self.pool.overflow_targets(name, reason, time.monotonic())
        answer = await self._first_answer(targets, scope["path"], fields, receive)
        if answer is not None:
            await answer(scope, receive, send)
        return answer is not None

    async def _first_answer(
        self, targets: Sequence[UpstreamTarget], path: str, fields: dict[str, Any], receive: Receive
    ) -> Response | None:
        """Return the first answer that a server gives; None if all fail."""
        for target in targets:
            try:
                answer = await self._ask(target, path, fields, receive)
            except (_UpstreamFailed, aiohttp.ClientError, OSError, TimeoutError) as error:
                self.pool.record_failed(target.server, time.monotonic())
                log.warning("upstream_failed", upstream=target.server.name, error=str(error) or type(error).__name__)
                continue
            if answer.status_code == CLIENT_CLOSED_REQUEST:
                self.pool.record_client_left(target.server)
            else:
                self.pool.record_answered(target.server)
            return answer
        return None

    async def _ask(self, target: UpstreamTarget, path: str, fields: dict[str, Any], receive: Receive) -> Response:
        server = target.server
        asking = asyncio.ensure_future(self._post(target, path, fields))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({asking, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            response = asking.result()
        finally:
            for task in (asking, watcher):
                task.cancel()
            await asyncio.gather(asking, watcher, return_exceptions=True)
        headers = {"x-swarm-upstream": server.name}
        if response.content_type == "text/event-stream":
            return EventStream(self._events(response, server), response.close, headers, SLOW_READER_S)
        return await _respond_whole(response, headers, receive)

    async def _events(self, response: aiohttp.ClientResponse, server: UpstreamServer) -> AsyncIterator[bytes]:
        """Yield the stream's bytes, cut only between events, since a comment may be inserted at each cut."""
        rest = b""
        try:
            async for part in response.content.iter_any():
                rest += part
                end = end_of_last_event(rest)
                if end:
                    yield rest[:end]
                    rest = rest[end:]
                elif len(rest) > MAX_EVENT:
                    raise _UpstreamFailed(f"an event of more than {MAX_EVENT} bytes")
            if rest:
                yield rest
        except (_UpstreamFailed, aiohttp.ClientError, OSError, TimeoutError) as error:
            self.pool.record_broke_off(server, time.monotonic())
            log.warning("upstream_broke_off", upstream=server.name, error=str(error) or type(error).__name__)
            problem = ApiError(503, f"the server {server.name} broke off its answer", code="upstream_failed")
            yield b"data: " + msgspec.json.encode(problem.to_openai()) + b"\n\n"
        finally:
            response.close()

    async def _post(self, target: UpstreamTarget, path: str, fields: dict[str, Any]) -> aiohttp.ClientResponse:
        """Send the request and wait for the response's head. Raises _UpstreamFailed, or what aiohttp raises."""
        server = target.server
        headers = {"content-type": "application/json", **_NO_DECODING}
        if server.key:
            headers["authorization"] = f"Bearer {server.key}"
        timeout = aiohttp.ClientTimeout(
            total=server.timeout_s, connect=server.connect_timeout_s, sock_read=server.quiet_timeout_s
        )
        body = msgspec.json.encode({**fields, "model": target.model})
        url = server.url + path.removeprefix("/v1")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            )
        response = await self._session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False)
        if is_failure(response.status) or response.status // 100 == 3:
            response.close()
            raise _UpstreamFailed(f"status {response.status}")
        return response


def _may_use(scope: Scope, model: str) -> bool:
    owner: Caller | None = scope.get("owner")
    return owner is None or owner.may_use(model)


async def _respond_whole(response: aiohttp.ClientResponse, headers: dict[str, str], receive: Receive) -> Response:
    reading = asyncio.ensure_future(_read_answer(response))
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({reading, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(reading.result(), response.status, headers, response.headers.get("content-type"))
    finally:
        for task in (reading, watcher):
            task.cancel()
        await asyncio.gather(reading, watcher, return_exceptions=True)
        response.close()


async def _read_answer(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise _UpstreamFailed(f"an answer of more than {MAX_ANSWER} bytes")
    return b"".join(parts)


def end_of_last_event(data: bytes) -> int:
    """Return the position after the last complete event; 0 if there is none."""
    ends = [data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if mark in data]
    return max(ends, default=0)


def make_server(
    settings: UpstreamSettings, environment: Callable[[str], str | None] = os.environ.get
) -> UpstreamServer:
    """Return the server with its key. Raises ConfigError if the key cannot be read."""
    key = ""
    if settings.key_env:
        key = environment(settings.key_env) or ""
        if not key:
            raise ConfigError(f"the environment variable {settings.key_env} with the key of {settings.url} is not set")
    elif settings.key_file is not None:
        key = _read_key(_credential_path(settings.key_file, environment), settings.url)
    return UpstreamServer(
        urlsplit(settings.url).netloc.rpartition("@")[2],
        settings.url,
        key,
        settings.models,
        settings.overflow_model,
        settings.when,
        settings.connect_timeout_s,
        settings.timeout_s,
        settings.quiet_timeout_s,
    )


def _credential_path(file: Path, environment: Callable[[str], str | None]) -> Path:
    """Resolve the key's path: a bare name is a credential that the service manager provides."""
    directory = environment("CREDENTIALS_DIRECTORY")
    return Path(directory) / file if directory and len(file.parts) == 1 else file


def _read_key(file: Path, url: str) -> str:
    try:
        if file.stat().st_mode & 0o007:
            raise ConfigError(f"everyone may read {file}, the key of {url}: chmod 600 {file}")
        key = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{file}, the key of {url}, can't be read ({error.strerror})") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{file} holds no key of {url}: one line of ASCII is expected")
    return key

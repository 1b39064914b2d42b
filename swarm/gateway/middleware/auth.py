"""Auth middleware: authenticates the caller, applies its limits, and reads the body. Pure ASGI, so streams pass through
unchanged."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.api_keys.file import ReloadingKeyFile
from swarm.api_keys.keys import KEYLESS_TENANT, ApiKey, KeyLimits
from swarm.client.text.vocabulary import release_memory
from swarm.gateway.answer import TokenCounts
from swarm.gateway.completion.service import Caller
from swarm.gateway.errors import ApiError
from swarm.gateway.http.json import request_id_headers
from swarm.gateway.http.sse import resume_event_id
from swarm.gateway.http.usage import api_of
from swarm.gateway.middleware.body import MAX_VALUES, ClientDisconnected, decode_body, read_body
from swarm.gateway.middleware.rate_limiter import RateLimiter
from swarm.gateway.thread_pool import LONG_BODY, BoundedThreadPool
from swarm.log import get_logger
from swarm.metrics.http import HttpMetrics

if TYPE_CHECKING:
    from swarm.config import GatewaySettings

OPEN_PATHS = frozenset({"/health", "/ready"})
UPLOAD_PATH = "/v1/files"  # its route reads the body as it arrives
KEYS_CHECK_S = 0.5  # seconds between two checks of the keys' file
# A key's limits at the console, apart from its limits for answers. An open page counts as one of the eight.
CONSOLE_LIMITS = KeyLimits(rate_per_min=600, concurrency=8)
_CACHE_SIZE = 64  # cached loopback checks of addresses and hosts; their length is bounded by that of a head

log = get_logger(__name__)


class AuthMiddleware:
    """Auth middleware of a gateway. Also a usage sink: the tokens of answers are charged to their keys."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ReloadingKeyFile,
        settings: GatewaySettings,
        clock: Callable[[], float] = time.time,
        *,
        metrics: HttpMetrics | None = None,
    ) -> None:
        # paths of the console's files, which reveal nothing and need no key
        self.public_paths: frozenset[str] = frozenset()
        self.context: Callable[[], int] = int  # returns the positions of the model's context; 0 if unknown
        self._threads = BoundedThreadPool("bodies", 1)
        self._app, self._keys, self._settings, self._clock = app, keys, settings, clock
        self._metrics = metrics or HttpMetrics()
        # separate limits for answers and for the console
        self._limiter, self._console_limiter = RateLimiter(), RateLimiter()
        self._keys_checked_at = 0.0  # time of the last check of the keys' file

    def close(self) -> None:
        self._threads.close()

    # --- usage sink

    def record_usage(self, caller: Caller, counts: TokenCounts) -> None:
        self._limiter.charge(caller.tenant, counts.prompt + counts.answer, self._clock())

    def check_owner(self, owner: str) -> ApiError | None:
        """Return why a line of this owner's batch may not run now: its key is gone or has used its tokens of today.
        Other limits are for requests that somebody waits for."""
        self._reload_keys()
        if self._keys.keys is None or owner == KEYLESS_TENANT:
            return None
        key = next((key for key in self._keys.keys.keys if key.id == owner), None)
        if key is None:
            return ApiError(401, "the key that created this batch is revoked", code="invalid_api_key")
        return self._limiter.check_day(key, self._clock())

    def usage(self, name: str) -> tuple[int, int]:
        """Return the tokens that a key has used today, and its answers in progress."""
        return self._limiter.usage(name, self._clock())

    # --- ASGI application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(("/v1/", "/api/")):
            scope["path"] = scope["path"].rstrip("/")  # not every client follows the redirect of a path with a slash
        try:
            await self._admit(scope, receive, send)
        except ApiError as problem:
            problem.drop_traceback()
            self._metrics.count_refused(api_of(scope["path"]), problem.status)
            await send_error(scope, send, problem)
        except ClientDisconnected:
            return

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = parse_headers(scope)
        self._reload_keys()
        if is_console(scope["path"]):
            check_same_origin(scope, headers)
        key = self._authenticate(scope, headers)
        if key is None:
            if self._keys.keys is None:
                scope["owner"] = Caller(is_admin=True)  # a local user, who may administer the swarm
            await self._forward(scope, headers, receive, send)
            return
        scope["owner"], scope["swarm.key"] = _caller_of(key), key.name
        scope["swarm.still_may"] = functools.partial(self._is_still_valid, key)
        if is_console(scope["path"]):
            limiter, key = self._console_limiter, msgspec.structs.replace(key, limits=CONSOLE_LIMITS)
        else:
            limiter = self._limiter
        if (problem := limiter.admit(key, self._clock())) is not None:
            raise problem
        try:
            await self._forward(scope, headers, receive, send)
        finally:
            limiter.release(key.name)

    async def _forward(self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] == UPLOAD_PATH:
            await self._app(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        own = self._settings
        body = await read_body(
            receive, int(declared) if declared.isdecimal() else None, own.max_body, own.body_timeout_s
        )
        if body and not resume_event_id(scope):
            most = max(MAX_VALUES, 2 * self.context())
            is_long = len(body) > LONG_BODY
            scope["swarm.json"] = (
                await self._threads.run(decode_body, body, most) if is_long else decode_body(body, most)
            )
            scope["headers"] = _declare_json(scope["headers"])
        scope["swarm.body"] = body
        try:
            await self._app(scope, _replay_body(scope, receive), send)
        finally:
            scope["swarm.body"] = b""  # other holders of the scope do not need the body
            scope.pop("swarm.json", None)
            if len(body) > LONG_BODY:
                del body
                self._threads.start(release_memory)

    def _authenticate(self, scope: Scope, headers: Mapping[str, str]) -> ApiKey | None:
        """Return the key that the request carries; None if it needs none. Raises ApiError."""
        path: str = scope["path"]
        if path in OPEN_PATHS:
            return None
        ring = self._keys.keys
        if ring is None:
            check_local(scope, headers, self._settings.cors_origins)
            return None
        if path in self.public_paths:
            return None
        if path == "/metrics" and _is_local(scope, headers):
            return None
        shown = _sent_key(headers)
        if not shown:
            raise ApiError(
                401, "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key"
            )
        if (key := ring.find(shown)) is None:
            raise ApiError(401, "this API key is unknown", code="invalid_api_key")
        return key

    def _is_still_valid(self, key: ApiKey) -> bool:
        """Whether the key with which an endless stream began is still valid and unchanged."""
        self._reload_keys()
        return self._keys.keys is not None and self._keys.keys.has_same(key)

    def _reload_keys(self) -> None:
        """Reload the keys' file if it has changed, checking at most every ``KEYS_CHECK_S``; a check costs one system
        call."""
        now = time.monotonic()
        if now - self._keys_checked_at < KEYS_CHECK_S:
            return
        self._keys_checked_at = now
        reload_error = self._keys.refresh()
        if reload_error:
            log.error("keys_not_read", error=reload_error)
        elif reload_error is not None and self._keys.keys is not None:
            for limiter in (self._limiter, self._console_limiter):
                limiter.retain({key.name for key in self._keys.keys.keys})
            log.info("keys_read", num_keys=len(self._keys.keys.keys))


def _caller_of(key: ApiKey) -> Caller:
    return Caller(key.name, key.limits.max_priority, key.admin, frozenset(key.models), key.id)


def parse_headers(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name; of several with one name, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _sent_key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether the request comes from this machine, and not through a proxy."""
    client = scope.get("client")
    is_passed_on = "forwarded" in headers or "x-forwarded-for" in headers
    return client is not None and _is_loopback(client[0]) and not is_passed_on


@functools.lru_cache(_CACHE_SIZE)
def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(scope: Scope, headers: Mapping[str, str], origins: list[str]) -> None:
    """Refuse requests from other machines while there are no keys, and requests from other sites' pages in a local
    browser. Such a page can send requests here, under its own name (Host) or its own origin. Raises ApiError."""
    client = scope.get("client")
    if client is not None and not _is_loopback(client[0]):
        raise ApiError(403, "without API keys only this machine is served", code="only_loopback")
    host = headers.get("host")
    if host is not None and not _is_loopback(_hostname(f"//{host}")):
        raise ApiError(403, f"this server is not {host[:80]!r}; without API keys it is 127.0.0.1", code="only_loopback")
    origin = headers.get("origin")
    if origin is not None and "*" not in origins and origin not in origins and not _is_loopback(_hostname(origin)):
        raise ApiError(403, f"pages of {origin[:80]!r} may not send requests here", code="origin_refused")


def is_console(path: str) -> bool:
    return path in ("/", "/docs") or path.startswith("/console/")


def check_same_origin(scope: Scope, headers: Mapping[str, str]) -> None:
    """Refuse requests to the console from other sites' pages, whatever key they carry; only its own page and programs
    may use it. Commands must be declared as JSON, which other sites' pages cannot do without permission. Raises
    ApiError."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and netloc_of(origin) != host.lower():
        raise ApiError(403, f"pages of {origin[:80]!r} may not send requests here", code="origin_refused")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json":
        raise ApiError(415, "a body of content-type application/json is expected", code="content_type")


@functools.lru_cache(_CACHE_SIZE)
def netloc_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


@functools.lru_cache(_CACHE_SIZE)
def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _declare_json(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Declare the body as JSON: ``curl -d`` would declare it as a form."""
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    return [*kept, (b"content-type", b"application/json")]


def _replay_body(scope: Scope, receive: Receive) -> Receive:
    """Return a receive function that first returns the body already read, once, and then further messages."""
    is_given = False

    async def next_message() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": scope["swarm.body"], "more_body": False}

    return next_message


async def send_error(scope: Scope, send: Send, problem: ApiError) -> None:
    """Answer with an error in the format of the API that was called."""
    body = msgspec.json.encode(problem.body_for(scope["path"]))
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    fields |= request_id_headers(secrets.token_hex(16)) | problem.headers
    if problem.status == 401:
        fields["www-authenticate"] = "Bearer"
    if problem.status in (408, 413):
        fields["connection"] = "close"  # the rest of the body is not read
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

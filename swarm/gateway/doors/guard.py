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

from swarm.client.text.vocabulary import give_memory_back
from swarm.gateway.answer import Counts
from swarm.gateway.aside import LONG_BODY, Aside
from swarm.gateway.desk.desk import Owner
from swarm.gateway.doors.body import MAX_VALUES, HungUp, decode, read
from swarm.gateway.doors.limits import Book
from swarm.gateway.errors import Problem
from swarm.gateway.http.accounts import api_of
from swarm.gateway.http.json import identified
from swarm.gateway.http.sse import resumed_by
from swarm.keys.file import Watched
from swarm.keys.keys import Key, Limits
from swarm.log import get_logger
from swarm.numbers.http import HttpNumbers

if TYPE_CHECKING:
    from swarm.config import GatewaySettings

OPEN = frozenset({"/health", "/ready"})
LOOK_S = 0.5  # seconds between two checks of the keys' file
# A key's limits at the console, apart from its limits for answers. An open page counts as one of the eight.
CONSOLE_LIMITS = Limits(rate_per_min=600, concurrency=8)
_MANY = 64  # cached loopback checks of addresses and hosts; their length is bounded by that of a head

log = get_logger(__name__)


class Guard:
    """Auth middleware of a gateway. Also a usage sink: the tokens of answers are charged to their keys."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Watched,
        settings: GatewaySettings,
        clock: Callable[[], float] = time.time,
        *,
        numbers: HttpNumbers | None = None,
    ) -> None:
        self.page: frozenset[str] = frozenset()  # paths of the console's files, which reveal nothing and need no key
        self.context: Callable[[], int] = int  # returns the positions of the model's context; 0 if unknown
        self._aside = Aside("bodies", 1)
        self._app, self._keys, self._settings, self._clock = app, keys, settings, clock
        self._numbers = numbers or HttpNumbers()
        self._book, self._console_book = Book(), Book()  # separate limits for answers and for the console
        self._looked_at = 0.0  # time of the last check of the keys' file

    def close(self) -> None:
        self._aside.close()

    # --- usage sink

    def ended(self, owner: Owner, counts: Counts) -> None:
        self._book.spend(owner.tenant, counts.prompt + counts.answer, self._clock())

    def usage(self, name: str) -> tuple[int, int]:
        """Return the tokens that a key has used today, and its answers in progress."""
        return self._book.usage(name, self._clock())

    # --- ASGI application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._let_in(scope, receive, send)
        except Problem as problem:
            problem.forget()
            self._numbers.refused(api_of(scope["path"]), problem.status)
            await refuse(scope, send, problem)
        except HungUp:
            return

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        self._look()
        if is_console(scope["path"]):
            check_same_origin(scope, headers)
        key = self._key_of(scope, headers)
        if key is None:
            if self._keys.ring is None:
                scope["owner"] = Owner(is_admin=True)  # a local user, who may administer the swarm
            await self._pass(scope, headers, receive, send)
            return
        scope["owner"], scope["swarm.key"] = Owner(key.name, key.limits.max_priority, key.admin), key.name
        scope["swarm.still_may"] = functools.partial(self._still_may, key)
        if is_console(scope["path"]):
            book, key = self._console_book, msgspec.structs.replace(key, limits=CONSOLE_LIMITS)
        else:
            book = self._book
        if (problem := book.enter(key, self._clock())) is not None:
            raise problem
        try:
            await self._pass(scope, headers, receive, send)
        finally:
            book.leave(key.name)

    async def _pass(self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        own = self._settings
        body = await read(receive, int(declared) if declared.isdecimal() else None, own.max_body, own.body_timeout_s)
        if body and not resumed_by(scope):
            most = max(MAX_VALUES, 2 * self.context())
            is_long = len(body) > LONG_BODY
            scope["swarm.json"] = await self._aside.run(decode, body, most) if is_long else decode(body, most)
            scope["headers"] = _as_json(scope["headers"])
        scope["swarm.body"] = body
        try:
            await self._app(scope, _again(scope, receive), send)
        finally:
            scope["swarm.body"] = b""  # other holders of the scope do not need the body
            scope.pop("swarm.json", None)
            if len(body) > LONG_BODY:
                del body
                self._aside.start(give_memory_back)

    def _key_of(self, scope: Scope, headers: Mapping[str, str]) -> Key | None:
        """Return the key that the request carries; None if it needs none. Raises ApiError."""
        path: str = scope["path"]
        if path in OPEN:
            return None
        ring = self._keys.ring
        if ring is None:
            check_local(scope, headers, self._settings.cors_origins)
            return None
        if path in self.page:
            return None
        if path == "/metrics" and _is_local(scope, headers):
            return None
        shown = _shown(headers)
        if not shown:
            raise Problem(
                401, "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key"
            )
        if (key := ring.find(shown)) is None:
            raise Problem(401, "this API key is unknown", code="invalid_api_key")
        return key

    def _still_may(self, key: Key) -> bool:
        """Whether the key with which an endless stream began is still valid and unchanged."""
        self._look()
        return self._keys.ring is not None and self._keys.ring.still_has(key)

    def _look(self) -> None:
        """Reload the keys' file if it has changed, checking at most every ``KEYS_CHECK_S``; a check costs one system
        call."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        news = self._keys.refresh()
        if news:
            log.error("keys_not_read", error=news)
        elif news is not None and self._keys.ring is not None:
            for book in (self._book, self._console_book):
                book.keep({key.name for key in self._keys.ring.keys})
            log.info("keys_read", num_keys=len(self._keys.ring.keys))


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name; of several with one name, the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _shown(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether the request comes from this machine, and not through a proxy."""
    client = scope.get("client")
    is_passed_on = "forwarded" in headers or "x-forwarded-for" in headers
    return client is not None and _is_loopback(client[0]) and not is_passed_on


@functools.lru_cache(_MANY)
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
        raise Problem(403, "without API keys only this machine is served", code="only_loopback")
    host = headers.get("host")
    if host is not None and not _is_loopback(_hostname(f"//{host}")):
        raise Problem(403, f"this server is not {host[:80]!r}; without API keys it is 127.0.0.1", code="only_loopback")
    origin = headers.get("origin")
    if origin is not None and "*" not in origins and origin not in origins and not _is_loopback(_hostname(origin)):
        raise Problem(403, f"pages of {origin[:80]!r} may not send requests here", code="origin_refused")


def is_console(path: str) -> bool:
    return path == "/" or path.startswith("/console/")


def check_same_origin(scope: Scope, headers: Mapping[str, str]) -> None:
    """Refuse requests to the console from other sites' pages, whatever key they carry; only its own page and programs
    may use it. Commands must be declared as JSON, which other sites' pages cannot do without permission. Raises
    ApiError."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and netloc_of(origin) != host.lower():
        raise Problem(403, f"pages of {origin[:80]!r} may not send requests here", code="origin_refused")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json":
        raise Problem(415, "a body of content-type application/json is expected", code="content_type")


@functools.lru_cache(_MANY)
def netloc_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


@functools.lru_cache(_MANY)
def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _as_json(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Declare the body as JSON: ``curl -d`` would declare it as a form."""
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    return [*kept, (b"content-type", b"application/json")]


def _again(scope: Scope, receive: Receive) -> Receive:
    """Return a receive function that first returns the body already read, once, and then further messages."""
    is_given = False

    async def next_message() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": scope["swarm.body"], "more_body": False}

    return next_message


async def refuse(scope: Scope, send: Send, problem: Problem) -> None:
    """Answer with an error in the format of the API that was called."""
    is_anthropic = scope["path"].startswith("/v1/messages")
    body = msgspec.json.encode(problem.anthropic() if is_anthropic else problem.openai())
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    fields |= identified(secrets.token_hex(16)) | problem.headers
    if problem.status == 401:
        fields["www-authenticate"] = "Bearer"
    if problem.status in (408, 413):
        fields["connection"] = "close"  # the rest of the body is not read
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

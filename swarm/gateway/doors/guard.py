"""The guard before the routes: who asks, how much they may, and what they send. Pure ASGI: streams pass untouched."""

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
LOOK_S = 0.5  # between two looks at the keys' file
# What a key may ask of the console beside its own limits, which are for answers: open pages count among the eight.
CONSOLE_LIMITS = Limits(rate_per_min=600, concurrency=8)
_MANY = 64  # addresses and hosts that are known as loopback or not; a head bounds how long they are

log = get_logger(__name__)


class Guard:
    """One for a gateway. Also its ledger: what answers took is written to their keys."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Watched,
        settings: GatewaySettings,
        clock: Callable[[], float] = time.time,
        *,
        numbers: HttpNumbers | None = None,
    ) -> None:
        self.page: frozenset[str] = frozenset()  # paths of the console's files, which tell nothing and need no key
        self.context: Callable[[], int] = int  # positions of the model's context; 0: unknown
        self._aside = Aside("bodies", 1)
        self._app, self._keys, self._settings, self._clock = app, keys, settings, clock
        self._numbers = numbers or HttpNumbers()
        self._book, self._console_book = Book(), Book()
        self._looked_at = 0.0

    def close(self) -> None:
        self._aside.close()

    # --- a ledger

    def ended(self, owner: Owner, counts: Counts) -> None:
        self._book.spend(owner.tenant, counts.prompt + counts.answer, self._clock())

    def usage(self, name: str) -> tuple[int, int]:
        """Tokens that a key has spent today, and its answers under way."""
        return self._book.usage(name, self._clock())

    # --- an application

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
                scope["owner"] = Owner(is_admin=True)  # whoever is on this machine
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
            scope["swarm.body"] = b""  # whoever still has the scope needs no body
            scope.pop("swarm.json", None)
            if len(body) > LONG_BODY:
                del body
                self._aside.start(give_memory_back)

    def _key_of(self, scope: Scope, headers: Mapping[str, str]) -> Key | None:
        """Whose key was shown; None where none is needed. Raises Problem."""
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
            raise Problem(401, "this API key is not known here", code="invalid_api_key")
        return key

    def _still_may(self, key: Key) -> bool:
        """For what never ends: is the key that began it still as it was?"""
        self._look()
        return self._keys.ring is not None and self._keys.ring.still_has(key)

    def _look(self) -> None:
        """At the file, every so often: a moment of a system call."""
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
    """By lower-case name; the last of several."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _shown(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Does this machine ask, and not as a proxy for others?"""
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
    """Without keys, only this machine is served, and no page from elsewhere that its browser shows: such a page can
    send requests here, under its own name (Host) or its own origin. Raises Problem."""
    client = scope.get("client")
    if client is not None and not _is_loopback(client[0]):
        raise Problem(403, "without API keys only this machine is served", code="only_loopback")
    host = headers.get("host")
    if host is not None and not _is_loopback(_hostname(f"//{host}")):
        raise Problem(403, f"this server is not {host[:80]!r}; without API keys it is 127.0.0.1", code="only_loopback")
    origin = headers.get("origin")
    if origin is not None and "*" not in origins and origin not in origins and not _is_loopback(_hostname(origin)):
        raise Problem(403, f"pages of {origin[:80]!r} may not ask here", code="origin_refused")


def is_console(path: str) -> bool:
    return path == "/" or path.startswith("/console/")


def check_same_origin(scope: Scope, headers: Mapping[str, str]) -> None:
    """The console is asked by its own page, or by programs: by no page from elsewhere, whoever's key it has. What gives
    orders must be said to be JSON, which pages from elsewhere can't say unasked. Raises Problem."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and netloc_of(origin) != host.lower():
        raise Problem(403, f"pages of {origin[:80]!r} may not ask here", code="origin_refused")
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
    """Say that the body is JSON, as it is: curl -d would call it a form."""
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    return [*kept, (b"content-type", b"application/json")]


def _again(scope: Scope, receive: Receive) -> Receive:
    """Give the body that was read, once, and then what comes."""
    is_given = False

    async def next_message() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": scope["swarm.body"], "more_body": False}

    return next_message


async def refuse(scope: Scope, send: Send, problem: Problem) -> None:
    """Answer with an error, in the words of the API that was asked."""
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

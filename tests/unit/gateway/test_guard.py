"""The guard before the routes, around a routes' stand-in: who is let in, what is refused and in whose words."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from swarm.api_keys.file import ReloadingKeyFile, update_keys
from swarm.api_keys.keys import KeyLimits, make_key
from swarm.config import GatewaySettings
from swarm.gateway.answer import TokenCounts
from swarm.gateway.middleware.auth import AuthMiddleware
from swarm.gateway.middleware.body import MAX_DEPTH

SETTINGS = GatewaySettings(max_body=1000, body_timeout_s=0.2)  # type: ignore[arg-type]
ROOMY = GatewaySettings()


class Routes:
    """Notes what comes, and answers 200."""

    def __init__(self) -> None:
        self.seen: list[tuple[Scope, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.seen.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.json: Any = json.loads(messages[1]["body"])


async def ask(
    app: Any,
    path: str = "/v1/completions",
    *,
    body: bytes | list[bytes] = b"{}",
    method: str = "POST",
    client: str = "127.0.0.1",
    **headers: str,
) -> Answer:
    """``body``: a list is what comes bit by bit, and never ends."""
    given = {"host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "client": (client, 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
    }
    bits = list(body) if isinstance(body, list) else [body]

    async def receive() -> Message:
        if not bits:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bits.pop(0), "more_body": isinstance(body, list)}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Answer(sent)


class Keyed:
    """A guard with a file of keys."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.json"
        self.now = 1e9
        self.routes = Routes()
        self.shown = self.add("alice")

    def add(self, name: str, limits: KeyLimits | None = None) -> str:
        key, shown = make_key(name, limits or KeyLimits(), "")
        update_keys(self.path, lambda ring: ring.add(key))
        return shown

    def guard(self) -> AuthMiddleware:
        return AuthMiddleware(self.routes, ReloadingKeyFile(self.path), SETTINGS, lambda: self.now)


@pytest.fixture
def keyed(tmp_path: Path) -> Keyed:
    return Keyed(tmp_path)


async def test_the_body_is_not_looked_at_where_a_stream_goes_on() -> None:
    """Anywhere else, and where no event is named, it must be JSON."""
    guard = AuthMiddleware(Routes(), ReloadingKeyFile(None), SETTINGS)
    assert (await ask(guard, body=b"no JSON", last_event_id="abc:1.0")).status == 200
    assert (await ask(guard, body=b"no JSON", last_event_id="")).status == 400
    assert (await ask(guard, "/tokenize", body=b"no JSON", last_event_id="abc:1.0")).status == 400
    assert (await ask(guard, body=b"x" * 1001, last_event_id="abc:1.0")).status == 413


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/tags//", "/api/tags"),
        ("/v1/", "/v1"),
        ("/health/", "/health/"),
    ],
)
async def test_a_slash_behind_a_path_changes_nothing(asked: str, served: str) -> None:
    """A redirect would lose the body of clients that do not follow it."""
    routes = Routes()
    await ask(AuthMiddleware(routes, ReloadingKeyFile(None), SETTINGS), asked)
    assert [scope["path"] for scope, _ in routes.seen] == [served]


async def test_without_keys_only_this_machine_is_served() -> None:
    guard = AuthMiddleware(Routes(), ReloadingKeyFile(None), SETTINGS)
    assert (await ask(guard)).status == 200
    assert (await ask(guard, host="localhost:8000")).status == 200
    assert (await ask(guard, host="[::1]:8000")).status == 200
    assert (await ask(guard, origin="http://localhost:3000")).status == 200
    for headers in ({"host": "evil.example"}, {"host": "127.0.0.1.evil.example:80"}, {"host": "["}):
        assert (await ask(guard, **headers)).json["error"]["code"] == "only_loopback"
    for origin in ("https://evil.example", "null", "http://["):
        answer = await ask(guard, origin=origin)
        assert (answer.status, answer.json["error"]["code"]) == (403, "origin_refused")
    assert (await ask(guard, client="10.0.0.7")).status == 403


@pytest.mark.parametrize("shape", ["Bearer KEY", "bearer KEY", "Bearer  KEY", "x-api-key"])
async def test_a_key_makes_its_tenant(keyed: Keyed, shape: str) -> None:
    """OpenAI's header or Anthropic's; limits of priority go with it."""
    name = "x_api_key" if shape == "x-api-key" else "authorization"
    value = keyed.shown if shape == "x-api-key" else shape.replace("KEY", keyed.shown)
    assert (await ask(keyed.guard(), body=b'{"a": 1}', **{name: value})).status == 200
    scope, body = keyed.routes.seen[0]
    assert (scope["owner"].tenant, scope["owner"].max_priority) == ("alice", 100)
    assert body == b'{"a": 1}'
    assert dict(scope["headers"])[b"content-type"] == b"application/json"


async def test_whoever_has_no_key_is_told_so_in_their_apis_words(keyed: Keyed) -> None:
    guard = keyed.guard()
    answer = await ask(guard)
    ids = {answer.headers["x-request-id"], answer.headers["request-id"]}  # where OpenAI's clients look, and Anthropic's
    assert len(ids) == 1
    assert (answer.status, answer.json["error"]["code"]) == (401, "missing_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer x", "Basic x", "Bearer " + keyed.shown[:-1], "Bearer \xe9"):
        assert (await ask(guard, authorization=wrong)).status == 401
    answer = await ask(guard, "/v1/messages", x_api_key="wrong")
    assert answer.json == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "this API key is unknown"},
    }
    assert not keyed.routes.seen


async def test_health_needs_no_key_and_metrics_only_from_elsewhere(keyed: Keyed) -> None:
    guard = keyed.guard()
    for path in ("/health", "/ready", "/metrics"):
        assert (await ask(guard, path, method="GET")).status == 200
    assert (await ask(guard, "/metrics", method="GET", client="10.0.0.7")).status == 401
    assert (await ask(guard, "/metrics", method="GET", x_forwarded_for="10.0.0.7")).status == 401
    assert (await ask(guard, "/v1/models", method="GET")).status == 401


async def test_keys_come_and_go_without_a_restart(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gateway.middleware.auth.KEYS_CHECK_S", 0.0)
    guard = keyed.guard()
    second = keyed.add("bob")
    assert (await ask(guard, x_api_key=second)).status == 200
    update_keys(keyed.path, lambda ring: ring.remove("bob"))
    assert (await ask(guard, x_api_key=second)).status == 401
    update_keys(keyed.path, lambda ring: ring.remove("alice"))
    assert (await ask(guard)).status == 401  # the last key gone opens nothing
    keyed.path.unlink()
    assert (await ask(guard)).status == 401


async def test_limits_are_answered_with_429_and_a_time_to_come_back(keyed: Keyed) -> None:
    shown = keyed.add("slow", KeyLimits(rate_per_min=1))
    guard = keyed.guard()
    assert (await ask(guard, x_api_key=shown)).status == 200
    answer = await ask(guard, x_api_key=shown)
    assert (answer.status, answer.headers["retry-after"]) == (429, "60")
    assert answer.json["error"]["code"] == "rate_limit_exceeded"
    keyed.now += 60
    assert (await ask(guard, x_api_key=shown)).status == 200


async def test_tokens_are_written_to_the_key(keyed: Keyed) -> None:
    shown = keyed.add("thrifty", KeyLimits(tokens_per_day=10))
    guard = keyed.guard()
    assert (await ask(guard, x_api_key=shown)).status == 200

    guard.record_usage(keyed.routes.seen[0][0]["owner"], TokenCounts(4, 6))
    assert (await ask(guard, x_api_key=shown)).json["error"]["code"] == "tokens_per_day"
    assert (await ask(guard, x_api_key=keyed.shown)).status == 200


async def test_what_fails_behind_it_gives_its_place_back(keyed: Keyed) -> None:
    shown = keyed.add("one", KeyLimits(concurrency=1))
    guard = keyed.guard()

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError("broken")

    guard._app = broken
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            await ask(guard, x_api_key=shown)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": 1} x',
        b"[" * 500,
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    ],
)
async def test_what_is_no_json_is_refused_before_anybody_looks(body: bytes) -> None:
    guard = AuthMiddleware(routes := Routes(), ReloadingKeyFile(None), SETTINGS)
    answer = await ask(guard, body=body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
    assert not routes.seen


async def test_brackets_in_texts_are_no_nesting() -> None:
    guard = AuthMiddleware(Routes(), ReloadingKeyFile(None), SETTINGS)
    assert (await ask(guard, body=json.dumps({"a": '[{\\"' * 120}).encode())).status == 200
    assert (await ask(guard, body=json.dumps([[] for _ in range(200)]).encode())).status == 200


async def test_bodies_are_bounded_in_size_and_time() -> None:
    guard = AuthMiddleware(routes := Routes(), ReloadingKeyFile(None), SETTINGS)
    assert (await ask(guard, body=b"", content_length="1001")).status == 413
    assert (await ask(guard, body=[b"x" * 600, b"x" * 600])).status == 413
    answer = await ask(guard, body=[b"{"])
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert not routes.seen


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 101 + b'"' + b'\\"' * 400_000,  # a regular expression once took hours over this
        b'{"prompt": [' + b"0.5," * 400_000 + b"0.5]}",
        b'{"a": {' + b",".join(b'"%d": 1' % number for number in range(20_000)) + b"}}",
    ],
)
async def test_what_would_take_long_to_look_at_is_refused_at_once(body: bytes) -> None:
    guard = AuthMiddleware(routes := Routes(), ReloadingKeyFile(None), ROOMY)
    began = time.process_time()
    answer = await ask(guard, body=body)
    assert answer.status == 400
    assert routes.seen == []
    assert time.process_time() - began < 5


async def test_a_million_token_ids_pass_where_a_model_holds_them() -> None:
    guard = AuthMiddleware(Routes(), ReloadingKeyFile(None), ROOMY)
    body = b'{"prompt": [' + b"7," * 1_000_000 + b"7]}"
    assert (await ask(guard, body=body)).status == 400
    guard.context = lambda: 1 << 20
    assert (await ask(guard, body=body)).status == 200

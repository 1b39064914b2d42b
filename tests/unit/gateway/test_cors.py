"""Pages of others: whose browsers may ask, before any key is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message

from swarm.config import Settings, load
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.middleware.gateway_app import GatewayApp

PAGE = "https://chat.example"


class NoClient:
    """The routes that are asked here need none."""

    async def trace(self, request_id: str) -> dict[str, Any]:
        raise AssertionError("nobody asks")


def doors(tmp_path: Path, *origins: str) -> GatewayApp:
    settings: Settings = load(overrides={"gateway.cors_origins": list(origins), "state_dir": str(tmp_path)})
    return GatewayApp(settings, [CompletionService(cast("Any", NoClient()))])


async def asked(made: GatewayApp, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    given = {"host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await made.app(scope, receive, send)
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def preflight(origin: str) -> dict[str, str]:
    wanted = "authorization,content-type,last-event-id,x-api-key"
    return {
        "origin": origin,
        "access_control_request_method": "POST",
        "access_control_request_headers": wanted,
    }


async def test_a_page_that_is_named_may_ask(tmp_path: Path) -> None:
    """Browsers ask first whether they may, without a key; then the answer says that the page may read it."""
    made = doors(tmp_path, PAGE)
    status, headers = await asked(made, "OPTIONS", "/v1/chat/completions", **preflight(PAGE))
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in headers["access-control-allow-methods"]
    for name in ("authorization", "content-type", "last-event-id", "x-api-key"):
        assert name in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers
    status, headers = await asked(made, "GET", "/health", origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil.example", "null"])
@pytest.mark.parametrize("origins", [(), (PAGE,)])
async def test_no_other_page_may(tmp_path: Path, origins: tuple[str, ...], origin: str) -> None:
    """With none named, or others: neither asked before nor told."""
    made = doors(tmp_path, *origins)
    for method, headers in (("OPTIONS", preflight(origin)), ("GET", {"origin": origin})):
        _, told = await asked(made, method, "/v1/models", **headers)
        assert "access-control-allow-origin" not in told
    status, _ = await asked(made, "GET", "/v1/models", origin=origin)
    assert status == 403

"""JSON responses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

REQUEST_ID = "x-request-id"
ANTHROPIC_ID = "request-id"  # the header that Anthropic's clients read


def request_id_headers(request_id: str) -> dict[str, str]:
    """Return the response headers with the request's id, under the names that the clients of each API expect."""
    return {REQUEST_ID: request_id, ANTHROPIC_ID: request_id}


class JsonResponse(Response):
    """JSON response encoded by msgspec, which is several times faster than the standard library. Every response has a
    request id."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, {**request_id_headers(secrets.token_hex(16)), **(headers or {})})

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)

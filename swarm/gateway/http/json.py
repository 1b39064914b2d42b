"""JSON as it goes out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

REQUEST_ID = "x-request-id"
ANTHROPIC_ID = "request-id"  # of Anthropic's clients


def identified(request_id: str) -> dict[str, str]:
    """The headers in which clients look for the id of their request."""
    return {REQUEST_ID: request_id, ANTHROPIC_ID: request_id}


class JsonResponse(Response):
    """Encoded by msgspec, several times as fast as the standard library. Every answer has a request id."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code, {**identified(secrets.token_hex(16)), **(headers or {})})

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)

"""JSON as it goes out."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    """Encoded by msgspec, several times as fast as the standard library."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)

"""Security headers of the console: browsers let the page run only its own scripts, connect only to this server, and
appear in no frame."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.gateway.middleware.auth import is_console

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_ENCODED: Final = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def add_security_headers(app: ASGIApp) -> ASGIApp:
    """Add the security headers to all responses of the console, errors included."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_console(scope["path"]):
            await app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_ENCODED]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return call

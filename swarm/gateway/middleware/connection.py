"""HTTP connections with deadlines. uvicorn's protocol has one for idle connections, but none for request heads that
never end, nor for readers that never read."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.gateway.errors import ApiError

if TYPE_CHECKING:
    from swarm.config import GatewaySettings

KEEP_ALIVE_S = 20.0  # seconds without a request until a connection is closed
MAX_HEAD_BYTES = 32 << 10
BACKLOG = 512
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

_END_OF_HEAD = re.compile(rb"\n\r?\n")

_Timer = asyncio.TimerHandle | None


def _ignore_status(_status: int) -> None:
    """Ignore the status: refusals are not counted."""


def bounded_protocol(
    settings: GatewaySettings, on_refused: Callable[[int], None] = _ignore_status
) -> type[H11Protocol]:
    """Return the protocol class with these bounds. ``on_refused`` is called with the status of everything that arrived
    and was not a request."""

    class Bounded(BoundedProtocol):
        head_s = settings.head_timeout_s
        write_s = settings.write_timeout_s
        max_connections = settings.max_connections
        refused = staticmethod(on_refused)

    return Bounded


class BoundedConnection(h11.Connection):
    """h11 connection that rejects heads that are too long. h11 bounds only incomplete heads: one that arrives in a
    single read may have any size, and as many fields as fit.

    It also rejects requests with both Content-Length and Transfer-Encoding: a proxy that uses the other one would take
    what follows for another request. ``refusal``: the reason why ``next_event`` has raised.
    """

    refusal: ApiError | None = None

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and len(buffer := self.trailing_data[0]) > MAX_HEAD_BYTES:
            end = _END_OF_HEAD.search(buffer, 0, MAX_HEAD_BYTES)
            if end is None:
                self.refusal = ApiError(431, f"the head is longer than {MAX_HEAD_BYTES} bytes", code="too_large")
                raise h11.RemoteProtocolError(self.refusal.message, error_status_hint=431)
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            text = "a request has either Content-Length or Transfer-Encoding, not both"
            self.refusal = ApiError(400, text, code="invalid_http")
            raise h11.RemoteProtocolError(text)
        return event


class BoundedProtocol(H11Protocol):
    """Protocol of one connection, with deadlines."""

    head_s = 10.0  # seconds for a request's head
    write_s = 75.0  # seconds without progress until a connection to a slow reader is aborted
    max_connections = 1024
    refused: Callable[[int], None] = staticmethod(_ignore_status)

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.conn: BoundedConnection = BoundedConnection(h11.SERVER, MAX_HEAD_BYTES)
        self._head_timer: _Timer = None
        self._write_timer: _Timer = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            text = f"{self.max_connections} connections are open, which is the limit"
            self._refuse(ApiError(503, text, code="overloaded", retry_after_s=1.0))
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancel_timer(self._head_timer)
        self._write_timer = _cancel_timer(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = _cancel_timer(self._head_timer)  # a head is complete
        elif self.conn.trailing_data[0] and self._head_timer is None:
            self._start_head_timer()  # the next head has begun; further bytes of it do not extend the deadline

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        self._refuse(ApiError(408, f"the head of a request did not come within {self.head_s:g} s", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP in the usual error format; if an answer is in progress, only close the
        connection."""
        self._refuse(self.conn.refusal or ApiError(400, "this is not an HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, problem: ApiError) -> None:
        """Send the error, and close the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self.refused(problem.status)
        self._unset_keepalive_if_required()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (
            self.cycle is None or self._is_between_responses()
        ):
            self.transport.write(_encode_response(problem))
        self._close()

    def _is_between_responses(self) -> bool:
        """Whether no response is partly sent."""
        return self.cycle.response_complete or not self.cycle.response_started

    def _close(self) -> None:
        self.transport.close()
        self._start_write_timer()  # the transport closes when everything has been read, which may be never

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._is_refused = True
            self.transport.close()  # not through h11, which raises if half of a head has arrived
            self._start_write_timer()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._write_timer = _cancel_timer(self._write_timer)
        super().resume_writing()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_s, self.transport.abort)


def _cancel_timer(timer: _Timer) -> _Timer:
    """Cancel the timer. Returns None, its new value."""
    if timer is not None:
        timer.cancel()
    return None


def _encode_response(problem: ApiError) -> bytes:
    body = msgspec.json.encode(problem.to_openai())
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **problem.headers,
    }
    lines = itertools.chain(
        [f"HTTP/1.1 {problem.status} {_PHRASES[problem.status]}"],
        (f"{name}: {value}" for name, value in fields.items()),
    )
    return "\r\n".join([*lines, "", ""]).encode() + body

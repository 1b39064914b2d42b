"""Runs one line of a batch through the gateway's own routes, and turns the response into the line's answer."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Scope

from swarm.gateway.batches.lines import BatchLine, read_custom_id
from swarm.gateway.batches.objects import Answer, BatchRecord, StoredLine
from swarm.gateway.batches.runner import LineAborted, LineAnswered, LineNotRun
from swarm.gateway.batches.store import encode_answer
from swarm.gateway.completion.service import Caller
from swarm.gateway.errors import ApiError
from swarm.gateway.http.identity import RequestIdentity
from swarm.gateway.http.json import REQUEST_ID
from swarm.gateway.middleware.body import decode_body
from swarm.params import MAX_SEED

LOWEST_PRIORITY = -100
RETRY_S = 2.0  # seconds until a line runs again whose run has failed
MAX_WAIT_S = 60.0  # seconds; the longest pause that a refusal asks for
MAX_CONFLICTS = 3  # ids that one run tries
# Codes of refusals that say nothing about the line: another reader took the answer over, or the gateway ends.
_READ_ELSEWHERE = "ReadElsewhere"
_CONFLICT = "conflict"

LineEnd = LineAnswered | LineNotRun | LineAborted


@dataclass(frozen=True, slots=True)
class LineResponse:
    """Response of the gateway's routes to a line."""

    status: int
    request_id: str
    retry_after_s: float | None
    body: bytes

    @property
    def error_code(self) -> str:
        if self.status < 300:
            return ""
        try:
            return msgspec.json.decode(self.body, type=_ErrorBody).error.code or ""
        except msgspec.MsgspecError:
            return ""


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is ready to run, or why it cannot."""

    batch: BatchRecord
    number: int
    custom_id: str
    body: bytes = b""
    decoded: object = None
    problem: ApiError | None = None


def prepare_line(stored: StoredLine, max_values: int) -> Line:
    """Decode a line. Takes long for a long one, so a thread calls it. ``max_values``: as for ``decode_body``."""
    batch, number, custom_id = stored.batch, stored.number, read_custom_id(stored.content)
    try:
        body = bytes(msgspec.json.decode(stored.content, type=BatchLine).body)
        return Line(batch, number, custom_id, body, decode_body(body, max_values))
    except ApiError as problem:
        return Line(batch, number, custom_id, problem=problem)


async def run_line(app: ASGIApp, line: Line, is_aborted: asyncio.Event) -> LineResponse:
    """Run a line and return the response. ``is_aborted``: set to cancel it.

    The request's id and seed follow from batch and line. A prompt that changes between two runs (a template with the
    date) cannot be the same request: then the line runs under a new id.
    """
    batch, number = line.batch, line.number
    request_id = f"{batch.id}-{number}"
    for _ in range(MAX_CONFLICTS):
        scope = _scope(line)
        scope["swarm.identity"] = RequestIdentity(request_id, batch.created_at, seed_of(batch.id, number))
        response = await _request(app, scope, is_aborted)
        if response.error_code != _CONFLICT:
            break
        request_id = f"{batch.id}-{number}-{secrets.token_hex(4)}"
    return response


def seed_of(batch_id: str, number: int) -> int:
    """Return the seed of a line that gives none."""
    digest = hashlib.blake2s(f"{batch_id}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED


def _scope(line: Line) -> Scope:
    batch, body = line.batch, line.body
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": batch.endpoint,
        "raw_path": batch.endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "owner": Caller(batch.tenant, LOWEST_PRIORITY, models=frozenset(batch.models)),
        "swarm.body": body,
        "swarm.json": line.decoded,
    }


async def _request(app: ASGIApp, scope: Scope, is_aborted: asyncio.Event) -> LineResponse:
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": scope["swarm.body"], "more_body": False}
        await is_aborted.wait()
        return {"type": "http.disconnect"}

    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    headers = {name.decode().lower(): value.decode() for name, value in messages[0]["headers"]}
    after = headers.get("retry-after", "")
    return LineResponse(
        messages[0]["status"],
        headers.get(REQUEST_ID, ""),
        float(after) if after.isdecimal() else None,
        b"".join(message.get("body", b"") for message in messages[1:]),
    )


def error_response(problem: ApiError) -> LineResponse:
    """Return the response to a line that does not run, for this reason."""
    return LineResponse(problem.status, "", problem.retry_after_s, msgspec.json.encode(problem.to_openai()))


def end_of_line(batch_id: str, number: int, custom_id: str, response: LineResponse, is_aborted: bool) -> LineEnd:
    """Return how a line ended. Takes long for a long response, so a thread calls it."""
    is_error = response.status >= 300
    if is_error and is_aborted:
        return LineAborted(batch_id, number)
    after_s = min(MAX_WAIT_S, max(RETRY_S, response.retry_after_s or 0.0))
    if response.status in (429, 503) or response.error_code == _READ_ELSEWHERE:
        return LineNotRun(batch_id, number, after_s)
    described = {
        "status_code": response.status,
        "request_id": response.request_id,
        "body": msgspec.Raw(response.body or b"{}"),
    }
    answer = Answer(is_error, encode_answer(batch_id, number, custom_id, described, None))
    if response.status >= 500 and response.status != 504:
        return LineNotRun(batch_id, number, after_s, answer)
    return LineAnswered(batch_id, number, answer)

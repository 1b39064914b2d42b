"""Bodies, before anybody looks into them: bounded in size and time, JSON to the letter, not nested without end."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.types import Receive

from swarm.gateway.errors import Problem

MAX_DEPTH = 100  # the deepest schemas in use have some 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_LONG = 1 << 16  # bytes; longer ones are looked through beside the loop


class HungUp(Exception):
    """Whoever sent it is gone."""


async def read(receive: Receive, declared: int | None, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises Problem if it is too large or takes too long, HungUp if its sender is gone."""
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HungUp
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Problem(408, f"the body did not come within {timeout_s:g} s", code="timeout") from None


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, f"the body is longer than {max_bytes} bytes, which is the most", code="too_large")


async def check_json(body: bytes) -> None:
    """Raise Problem for what isn't JSON, or is nested too deep."""
    if len(body) > _LONG:
        await asyncio.to_thread(_check, body)
    else:
        _check(body)


def _check(body: bytes) -> None:
    """As the standard says: no NaN, no half of a character, no text that isn't UTF-8; others would stumble later."""
    if _depth(body) > MAX_DEPTH:
        raise Problem(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _depth(body: bytes) -> int:
    """How deep it is nested; at least as much as it is, where it is no JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0  # it can't be
    deepest = depth = 0
    for match in _BRACKET.finditer(_STRING.sub(b"", body)):
        depth += 1 if match[0] in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest

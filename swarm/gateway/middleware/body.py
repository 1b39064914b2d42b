"""Reads and decodes bodies before any other code sees them: bounded in size, time and nesting, strictly valid JSON, and
with no more values than can be decoded in a moment."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive

from swarm.gateway.errors import ApiError
from swarm.gateway.json_scanner import count_values
from swarm.wire.messages import MAX_TOKENS

MAX_DEPTH = 100  # the deepest schemas in use have about 20 levels
MAX_ITEMS = 1 << 14  # items of a list or an object; lists of token ids have a limit of their own
MAX_VALUES = 1 << 17  # values in a body; or twice the model's context, if that is more


class ClientDisconnected(Exception):
    """The client disconnected while its body was being read."""


async def read_body(receive: Receive, declared: int | None, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body. Raises ApiError if it is too large or takes too long, ClientDisconnected if its sender is
    gone."""
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="timeout") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than the limit of {max_bytes} bytes", code="too_large")


def decode_body(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """Decode a body with at most ``max_values`` values. It must be strictly valid: no NaN, no unpaired surrogates, only
    UTF-8; otherwise later stages would fail on it. Raises ApiError."""
    if any(num_values > max_values for num_values in count_values(body)):
        text = f"the body has more than {max_values} values, which is the limit for this model"
        raise ApiError(400, text, code="too_large")
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    _check_nesting(decoded)
    return decoded


def _check_nesting(decoded: object) -> None:
    """Raise ApiError for a value that is nested too deeply, or so broad that processing it would take seconds."""
    level, depth = [decoded], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
        level = [inner for each in level for inner in _inner_containers(each)]


def _inner_containers(value: object) -> list[object]:
    """Return the members of a value that are containers themselves."""
    if isinstance(value, dict):
        _check_length(len(value), MAX_ITEMS)
        return [each for each in value.values() if isinstance(each, dict | list)]
    if isinstance(value, list):
        inner: list[object] = [each for each in value if isinstance(each, dict | list)]
        is_ids = not inner and all(type(each) is int for each in value)
        _check_length(len(value), MAX_TOKENS if is_ids else MAX_ITEMS)
        return inner
    return []


def _check_length(number: int, most: int) -> None:
    if number > most:
        raise ApiError(
            400, f"a list or object of the body has {number} items, at most {most} are read", code="too_large"
        )

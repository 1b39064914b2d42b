"""Console commands: converts a body into the message for the broker, and checks permissions. Pure.

A caller without an admin's key may cancel its own requests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarm.errors import InvalidRequest
from swarm.gateway.errors import Problem, wrong
from swarm.govern import orders
from swarm.wire.messages import Cap, LayerRange, Pin, Steer, Suppose

MAX_JOIN: Final = 64


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Have a worker hand over its layers and leave."""

    worker: str
    force: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Start workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the worker's process without informing the broker, for demonstrations."""

    worker: str


Order = Cancel | Stop | Join | Kill | Steer


def order_of(body: object) -> Order:
    """Parse a command. Raises ApiError that names what is wrong."""
    fields = _fields(body)
    verb = fields.get("verb")
    make = VERBS.get(verb) if isinstance(verb, str) else None
    if make is None:
        raise wrong("verb", f"{str(verb)[:40]!r} is none of {', '.join(VERBS)}")
    try:
        return make(fields)
    except InvalidRequest as error:
        raise Problem(400, str(error), param=error.code, code="invalid_value") from None


def check_may(order: Order, *, is_admin: bool, is_demo: bool, is_own: bool) -> None:
    """Check whether the caller may give this command. Raises ApiError if not. ``is_own``: the command is about one of
    the caller's own requests."""
    if isinstance(order, Kill) and not is_demo:
        text = "workers can be killed from here only where swarm up runs them all on this machine alone"
        raise Problem(403, text, code="no_demo")
    if is_admin or (isinstance(order, Cancel) and is_own):
        return
    if isinstance(order, Cancel):
        # not 403: it would confirm that another tenant's request exists
        raise Problem(404, "you have no such request", code="not_found")
    check_admin(is_admin=False)


def check_admin(*, is_admin: bool) -> None:
    """Raise ApiError for a caller without an admin's key."""
    if not is_admin:
        text = "that needs the key of an admin: swarmctl keys add NAME --admin makes one"
        raise Problem(403, text, code="admin_only")


def supposed(body: object) -> Suppose | Steer:
    """Parse a question for a plan: without some workers, with additional ones, or with manual pins. Raises ApiError."""
    fields = _fields(body)
    one_more = fields.get("one_more")
    is_suppose = bool(fields.get("without")) or one_more is not None
    is_by_hand = any(fields.get(name) for name in ("pins", "caps", "exclude"))
    if is_suppose and is_by_hand:
        raise wrong("without", "workers assumed gone or added can't be combined with pins, caps and exclude")
    try:
        if is_by_hand:
            return by_hand(fields, dry_run=True)
        more = _fields(one_more) if isinstance(one_more, dict) else {}
        count = _count(more, "count", 1, 1, MAX_JOIN) if one_more is not None else 0
        like = _text(more, "like") if more.get("like") else ""
        return orders.supposition(_names(fields, "without"), _objective(fields), count, like)
    except InvalidRequest as error:
        raise Problem(400, str(error), param=error.code, code="invalid_value") from None


def by_hand(body: object, *, dry_run: bool) -> Steer:
    """Parse a manual plan. Raises ApiError or InvalidRequest."""
    fields = _fields(body)
    pins = [Pin(orders.worker_named(name), _layers(value)) for name, value in _table(fields, "pins").items()]
    caps = [Cap(orders.worker_named(name), _most(value)) for name, value in _table(fields, "caps").items()]
    return orders.by_hand(pins, caps, _names(fields, "exclude"), _objective(fields), dry_run=dry_run)


def _fields(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise Problem(400, "the body must be an object", code="invalid_value")
    return body


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 128:
        raise wrong(name, "a text of 1 to 128 characters is expected")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise wrong(name, "true or false is expected")
    return value


def _count(fields: Mapping[str, Any], name: str, otherwise: int, least: int, most: int) -> int:
    value = fields.get(name, otherwise)
    if type(value) is not int or not least <= value <= most:
        raise wrong(name, f"a number from {least} to {most} is expected")
    return value


def _names(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise wrong(name, "a list of workers' names is expected")
    return [orders.worker_named(each) for each in value]


def _table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise wrong(name, "an object by workers' names is expected")
    return value


def _objective(fields: Mapping[str, Any]) -> str:
    value = fields.get("objective") or ""
    return value if isinstance(value, str) else "?"


def _layers(value: object) -> LayerRange:
    """Parse a range of layers as in reports: the first, and the one after the last."""
    if isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value):
        first, stop = value
        if 0 <= first < stop <= 1 << 20:
            return LayerRange(first, stop)
    raise wrong("pins", "layers are [first, one past the last], like [0, 3]")


def _most(value: object) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise wrong("caps", "a number of layers, at least 1, is expected: to assign none, use exclude")
    return value


VERBS: Final[dict[str, Callable[[Mapping[str, Any]], Order]]] = {
    "cancel": lambda fields: Cancel(orders.plain_id(_text(fields, "request"))),
    "drain": lambda fields: orders.of_worker("drain", fields.get("worker")),
    "cordon": lambda fields: orders.of_worker("cordon", fields.get("worker")),
    "uncordon": lambda fields: orders.of_worker("uncordon", fields.get("worker")),
    "stop": lambda fields: Stop(orders.worker_named(fields.get("worker")), _flag(fields, "force")),
    "kill": lambda fields: Kill(orders.worker_named(fields.get("worker"))),
    "join": lambda fields: Join(_count(fields, "count", 1, 1, MAX_JOIN)),
    "rebalance": lambda fields: Steer(verb="rebalance", force=_flag(fields, "force")),
    "plan": lambda fields: by_hand(fields.get("suppose", {}), dry_run=False),
}

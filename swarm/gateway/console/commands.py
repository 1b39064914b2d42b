"""Console commands: converts a body into the message for the broker, and checks permissions. Pure.

A caller without an admin's key may cancel its own requests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarm.admin import orders
from swarm.errors import InvalidRequest
from swarm.gateway.errors import ApiError, invalid_field
from swarm.wire.messages import Cap, LayerRange, Pin, PlanCommand, PlanWhatIf

MAX_JOIN: Final = 64


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Cancel a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Have a worker hand over its layers and leave."""

    worker: str
    force: bool


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """Start workers."""

    count: int


@dataclass(frozen=True, slots=True)
class KillCommand:
    """Kill the worker's process without informing the broker, for demonstrations."""

    worker: str


ConsoleCommand = CancelCommand | StopCommand | JoinCommand | KillCommand | PlanCommand


def parse_command(body: object) -> ConsoleCommand:
    """Parse a command. Raises ApiError that names what is wrong."""
    fields = _fields(body)
    verb = fields.get("verb")
    make = VERBS.get(verb) if isinstance(verb, str) else None
    if make is None:
        raise invalid_field("verb", f"{str(verb)[:40]!r} is none of {', '.join(VERBS)}")
    try:
        return make(fields)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.code, code="invalid_value") from None


def check_allowed(command: ConsoleCommand, *, is_admin: bool, is_demo: bool, is_own: bool) -> None:
    """Check whether the caller may give this command. Raises ApiError if not. ``is_own``: the command is about one of
    the caller's own requests."""
    if isinstance(command, KillCommand) and not is_demo:
        text = "workers can be killed from here only where swarm up runs them all on this machine alone"
        raise ApiError(403, text, code="no_demo")
    if is_admin or (isinstance(command, CancelCommand) and is_own):
        return
    if isinstance(command, CancelCommand):
        # not 403: it would confirm that another tenant's request exists
        raise ApiError(404, "you have no such request", code="not_found")
    check_admin(is_admin=False)


def check_admin(*, is_admin: bool) -> None:
    """Raise ApiError for a caller without an admin's key."""
    if not is_admin:
        text = "that needs the key of an admin: swarmctl keys add NAME --admin makes one"
        raise ApiError(403, text, code="admin_only")


def parse_plan_question(body: object) -> PlanWhatIf | PlanCommand:
    """Parse a question for a plan: without some workers, with additional ones, or with manual pins. Raises ApiError."""
    fields = _fields(body)
    one_more = fields.get("one_more")
    is_suppose = bool(fields.get("without")) or one_more is not None
    is_by_hand = any(fields.get(name) for name in ("pins", "caps", "exclude"))
    if is_suppose and is_by_hand:
        raise invalid_field("without", "workers assumed gone or added can't be combined with pins, caps and exclude")
    try:
        if is_by_hand:
            return parse_manual_plan(fields, dry_run=True)
        more = _fields(one_more) if isinstance(one_more, dict) else {}
        count = _count(more, "count", 1, 1, MAX_JOIN) if one_more is not None else 0
        like = _text(more, "like") if more.get("like") else ""
        return orders.plan_what_if(_names(fields, "without"), _objective(fields), count, like)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.code, code="invalid_value") from None


def parse_manual_plan(body: object, *, dry_run: bool) -> PlanCommand:
    """Parse a manual plan. Raises ApiError or InvalidRequest."""
    fields = _fields(body)
    pins = [Pin(orders.parse_worker_name(name), _layers(value)) for name, value in _table(fields, "pins").items()]
    caps = [Cap(orders.parse_worker_name(name), _max_layers(value)) for name, value in _table(fields, "caps").items()]
    return orders.plan_command(pins, caps, _names(fields, "exclude"), _objective(fields), dry_run=dry_run)


def _fields(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be an object", code="invalid_value")
    return body


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 128:
        raise invalid_field(name, "a text of 1 to 128 characters is expected")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise invalid_field(name, "true or false is expected")
    return value


def _count(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise invalid_field(name, f"a number from {low} to {high} is expected")
    return value


def _names(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise invalid_field(name, "a list of workers' names is expected")
    return [orders.parse_worker_name(each) for each in value]


def _table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise invalid_field(name, "an object by workers' names is expected")
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
    raise invalid_field("pins", "layers are [first, one past the last], like [0, 3]")


def _max_layers(value: object) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise invalid_field("caps", "a number of layers, at least 1, is expected: to assign none, use exclude")
    return value


VERBS: Final[dict[str, Callable[[Mapping[str, Any]], ConsoleCommand]]] = {
    "cancel": lambda fields: CancelCommand(orders.parse_request_id(_text(fields, "request"))),
    "drain": lambda fields: orders.worker_command("drain", fields.get("worker")),
    "cordon": lambda fields: orders.worker_command("cordon", fields.get("worker")),
    "uncordon": lambda fields: orders.worker_command("uncordon", fields.get("worker")),
    "stop": lambda fields: StopCommand(orders.parse_worker_name(fields.get("worker")), _flag(fields, "force")),
    "kill": lambda fields: KillCommand(orders.parse_worker_name(fields.get("worker"))),
    "join": lambda fields: JoinCommand(_count(fields, "count", 1, 1, MAX_JOIN)),
    "rebalance": lambda fields: PlanCommand(verb="rebalance", force=_flag(fields, "force")),
    "plan": lambda fields: parse_manual_plan(fields.get("suppose", {}), dry_run=False),
}

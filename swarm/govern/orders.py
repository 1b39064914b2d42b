"""An operator's words turned into messages for the broker, and the standby report. Raises InvalidRequest, which names
the word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec

from swarm.errors import InvalidRequest
from swarm.govern.rows import is_here, may_have_layers, rows_of
from swarm.wire.messages import ByHand, Cap, Json, Pin, Steer, Suppose

Objective = Literal["", "auto", "throughput", "latency"]
OBJECTIVES: Final = ("", "auto", "throughput", "latency")
_ANSWER: Final = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32}(?:-[0-9]{1,3})?)")  # ids that gateways assign


def worker_named(name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
    return name


def of_worker(verb: Literal["cordon", "uncordon", "drain"], worker: object) -> Steer:
    return Steer(verb=verb, worker=worker_named(worker))


def by_hand(
    pins: Sequence[Pin], caps: Sequence[Cap], exclude: Sequence[str], objective: str, *, dry_run: bool
) -> Steer:
    """Return the order to plan with these constraints. ``dry_run``: only compute the plan."""
    wanted = ByHand(tuple(pins), tuple(caps), tuple(map(worker_named, exclude)), _objective(objective))
    return cast(Steer, _checked(Steer(verb="plan", by_hand=wanted, dry_run=dry_run)))


def supposition(without: Sequence[str], objective: str, more: int, like: str) -> Suppose:
    """Return the question which plan there would be without some workers, or with ``more`` workers like ``like``."""
    left = tuple(map(worker_named, without))
    found = Suppose(without=left, objective=_objective(objective), more=more or int(bool(like)), like=like)
    return cast(Suppose, _checked(found))


def _objective(text: str) -> Objective:
    if text not in OBJECTIVES:
        raise InvalidRequest(f"the objective is throughput or latency, not {text!r}", code="objective")
    return cast(Objective, text)


def _checked(message: Steer | Suppose) -> Any:
    """Validate a message against its own bounds, as a peer's message is validated. Raises InvalidRequest."""
    try:
        return msgspec.convert(msgspec.to_builtins(message), type(message))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"invalid command: {error}", code="invalid") from error


def plain_id(request: str) -> str:
    """Return the broker's id of a request, also for the id in an HTTP answer, which has a prefix."""
    answer = _ANSWER.fullmatch(request)
    return request if answer is None else answer[1]


def kept(nodes: Json) -> Json:
    """Return a report on standby layers.

    ``workers``: each worker's layers and standby layers. ``not_kept``: served layers that no worker keeps as standby.
    ``nobody_may_load``: the part of ``not_kept`` that no other worker may load, because all others are held back by an
    operator or there are none.
    """
    workers = [row for row in rows_of(nodes.get("workers")) if is_here(row)]
    may = [row for row in workers if may_have_layers(row)]
    warm = {layer for row in may for layer in _layers(row.get("standby"))}
    served = {layer: row for row in workers for layer in _layers([row.get("layers")])}
    not_kept = sorted(layer for layer in served if layer not in warm)
    rows = [{key: row.get(key) for key in ("name", "layers", "standby", "steered", "warming")} for row in workers]
    lost = [layer for layer in not_kept if all(row is served[layer] for row in may)]
    return {"workers": rows, "not_kept": not_kept, "nobody_may_load": lost}


def _layers(ranges: object) -> set[int]:
    found: set[int] = set()
    for each in ranges if isinstance(ranges, list | tuple) else ():
        if isinstance(each, list | tuple) and len(each) == 2:
            found.update(range(int(each[0]), int(each[1])))
    return found

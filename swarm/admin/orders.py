"""An operator's words turned into messages for the broker, and the standby report. Raises InvalidRequest, which names
the word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec

from swarm.admin.report_rows import is_present, may_have_layers, read_rows
from swarm.errors import InvalidRequest
from swarm.wire.messages import Cap, Json, Pin, PlanCommand, PlanOverrides, PlanWhatIf

Objective = Literal["", "auto", "throughput", "latency"]
OBJECTIVES: Final = ("", "auto", "throughput", "latency")
_ANSWER: Final = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32}(?:-[0-9]{1,3})?)")  # ids that gateways assign


def parse_worker_name(name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        raise InvalidRequest("a worker's name has 1 to 128 characters", code="worker")
    return name


def worker_command(verb: Literal["cordon", "uncordon", "drain"], worker: object) -> PlanCommand:
    return PlanCommand(verb=verb, worker=parse_worker_name(worker))


def plan_command(
    pins: Sequence[Pin], caps: Sequence[Cap], exclude: Sequence[str], objective: str, *, dry_run: bool
) -> PlanCommand:
    """Return the order to plan with these constraints. ``dry_run``: only compute the plan."""
    overrides = PlanOverrides(
        tuple(pins), tuple(caps), tuple(map(parse_worker_name, exclude)), _parse_objective(objective)
    )
    return cast(PlanCommand, _validate(PlanCommand(verb="plan", by_hand=overrides, dry_run=dry_run)))


def plan_what_if(without: Sequence[str], objective: str, more: int, like: str) -> PlanWhatIf:
    """Return the query for a plan without some workers, or with ``more`` workers like ``like``."""
    excluded = tuple(map(parse_worker_name, without))
    question = PlanWhatIf(
        without=excluded, objective=_parse_objective(objective), more=more or int(bool(like)), like=like
    )
    return cast(PlanWhatIf, _validate(question))


def _parse_objective(text: str) -> Objective:
    if text not in OBJECTIVES:
        raise InvalidRequest(f"the objective is throughput or latency, not {text!r}", code="objective")
    return cast(Objective, text)


def _validate(message: PlanCommand | PlanWhatIf) -> Any:
    """Validate a message against its own bounds, as a peer's message is validated. Raises InvalidRequest."""
    try:
        return msgspec.convert(msgspec.to_builtins(message), type(message))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"invalid command: {error}", code="invalid") from error


def parse_request_id(request: str) -> str:
    """Return the broker's id of a request, also for the id in an HTTP answer, which has a prefix."""
    answer = _ANSWER.fullmatch(request)
    return request if answer is None else answer[1]


def standby_report(nodes: Json) -> Json:
    """Return a report on standby layers.

    ``workers``: each worker's layers and standby layers. ``not_kept``: served layers that no worker keeps as standby.
    ``nobody_may_load``: the part of ``not_kept`` that no other worker may load, because all others are held back by an
    operator or there are none.
    """
    workers = [row for row in read_rows(nodes.get("workers")) if is_present(row)]
    may = [row for row in workers if may_have_layers(row)]
    warm = {layer for row in may for layer in _layers(row.get("standby"))}
    served = {layer: row for row in workers for layer in _layers([row.get("layers")])}
    not_kept = sorted(layer for layer in served if layer not in warm)
    names = ("name", "layers", "standby", "steered", "warming", "copies")
    rows = [{name: row.get(name) for name in names} for row in workers]
    lost = [layer for layer in not_kept if all(row is served[layer] for row in may)]
    return {"workers": rows, "not_kept": not_kept, "nobody_may_load": lost}


def _layers(ranges: object) -> set[int]:
    layers: set[int] = set()
    for layer_range in ranges if isinstance(ranges, list | tuple) else ():
        if isinstance(layer_range, list | tuple) and len(layer_range) == 2:
            layers.update(range(int(layer_range[0]), int(layer_range[1])))
    return layers

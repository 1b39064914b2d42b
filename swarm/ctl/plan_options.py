"""Translation of plan options on the command line into messages. Raises typer.BadParameter that names the wrong
option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import typer

from swarm.admin import orders
from swarm.errors import InvalidRequest
from swarm.wire.messages import Cap, LayerRange, Pin, PlanCommand, PlanWhatIf

_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
T = TypeVar("T")


def worker_command(verb: Literal["cordon", "uncordon", "drain"], worker: str) -> PlanCommand:
    return _as_parameter_error(lambda: orders.worker_command(verb, worker))


def override_command(
    pins: Sequence[str], caps: Sequence[str], exclude: Sequence[str], objective: str, *, dry_run: bool
) -> PlanCommand:
    _check_objective(objective)
    overrides = (
        [_parse_pin(text) for text in pins],
        [_parse_cap(text) for text in caps],
        [_check_name(text, "--exclude") for text in exclude],
    )
    return _as_parameter_error(lambda: orders.plan_command(*overrides, objective, dry_run=dry_run))


def plan_preview(without: Sequence[str], objective: str, more: int, like: str) -> PlanWhatIf:
    _check_objective(objective)
    return _as_parameter_error(lambda: orders.plan_what_if(without, objective, more, like))


def _as_parameter_error(make: Callable[[], T]) -> T:
    try:
        return make()
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def _check_objective(objective: str) -> None:
    if objective not in orders.OBJECTIVES:
        raise typer.BadParameter(f"--objective takes throughput or latency, not {objective!r}")


def _parse_pin(text: str) -> Pin:
    """Parse ``w1=0-10``. The last layer is included, as in the setting plan.pins."""
    name, _, layers = text.rpartition("=")
    match = _RANGE.fullmatch(layers)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise typer.BadParameter(f"--pin takes WORKER=FIRST-LAST, like w1=0-10, not {text!r}")
    return Pin(_check_name(name, "--pin"), LayerRange(first, last + 1))


def _parse_cap(text: str) -> Cap:
    name, _, most = text.rpartition("=")
    if not re.fullmatch(r"[1-9]\d{0,4}", most):
        raise typer.BadParameter(f"--cap takes WORKER=N, at least 1, not {text!r}: for none at all, --exclude")
    return Cap(_check_name(name, "--cap"), int(most))


def _check_name(text: str, option: str) -> str:
    if not 1 <= len(text) <= 128:
        raise typer.BadParameter(f"{option} takes a worker's name, of 1 to 128 characters")
    return text

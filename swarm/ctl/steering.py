"""Translation of plan options on the command line into messages. Raises typer.BadParameter that names the wrong
option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import typer

from swarm.errors import InvalidRequest
from swarm.govern import orders
from swarm.wire.messages import Cap, LayerRange, Pin, Steer, Suppose

_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
T = TypeVar("T")


def of_worker(verb: Literal["cordon", "uncordon", "drain"], worker: str) -> Steer:
    return _made(lambda: orders.of_worker(verb, worker))


def by_hand(
    pins: Sequence[str], caps: Sequence[str], exclude: Sequence[str], objective: str, *, dry_run: bool
) -> Steer:
    _check_objective(objective)
    found = [_pin(text) for text in pins], [_cap(text) for text in caps], [_name(text, "--exclude") for text in exclude]
    return _made(lambda: orders.by_hand(*found, objective, dry_run=dry_run))


def supposition(without: Sequence[str], objective: str, more: int, like: str) -> Suppose:
    _check_objective(objective)
    return _made(lambda: orders.supposition(without, objective, more, like))


def _made(make: Callable[[], T]) -> T:
    try:
        return make()
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def _check_objective(objective: str) -> None:
    if objective not in orders.OBJECTIVES:
        raise typer.BadParameter(f"--objective takes throughput or latency, not {objective!r}")


def _pin(text: str) -> Pin:
    """Parse ``w1=0-10``. The last layer is included, as in the setting plan.pins."""
    name, _, layers = text.rpartition("=")
    found = _RANGE.fullmatch(layers)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise typer.BadParameter(f"--pin takes WORKER=FIRST-LAST, like w1=0-10, not {text!r}")
    return Pin(_name(name, "--pin"), LayerRange(first, last + 1))


def _cap(text: str) -> Cap:
    name, _, most = text.rpartition("=")
    if not re.fullmatch(r"[1-9]\d{0,4}", most):
        raise typer.BadParameter(f"--cap takes WORKER=N, at least 1, not {text!r}: for none at all, --exclude")
    return Cap(_name(name, "--cap"), int(most))


def _name(text: str, option: str) -> str:
    if not 1 <= len(text) <= 128:
        raise typer.BadParameter(f"{option} takes a worker's name, of 1 to 128 characters")
    return text

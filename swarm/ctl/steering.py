"""Words of a command line to what the broker is told about plans; and who keeps what, from what it tells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast

import msgspec
import typer

from swarm.ctl.render import rows_of
from swarm.wire.messages import ByHand, Cap, Json, LayerRange, Pin, Steer

_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_OBJECTIVES: Final = ("", "auto", "throughput", "latency")


def of_worker(verb: Literal["cordon", "uncordon", "drain"], worker: str) -> Steer:
    if not 1 <= len(worker) <= 128:
        raise typer.BadParameter("a worker's name has 1 to 128 characters")
    return Steer(verb=verb, worker=worker)


def by_hand(
    pins: Sequence[str], caps: Sequence[str], exclude: Sequence[str], objective: str, *, dry_run: bool
) -> Steer:
    """Raises typer.BadParameter, which says what is wrong with which word."""
    if objective not in _OBJECTIVES:
        raise typer.BadParameter(f"--objective takes throughput or latency, not {objective!r}")
    wanted = ByHand(
        pins=tuple(_pin(text) for text in pins),
        caps=tuple(_cap(text) for text in caps),
        exclude=tuple(_name(text, "--exclude") for text in exclude),
        objective=cast("Literal['', 'auto', 'throughput', 'latency']", objective),
    )
    try:
        return msgspec.convert(msgspec.to_builtins(Steer(verb="plan", by_hand=wanted, dry_run=dry_run)), Steer)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(f"that can't be said to the broker: {error}") from error


def _pin(text: str) -> Pin:
    """Read ``w1=0-10``: the last layer is meant, too, as in the settings (plan.pins)."""
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


def kept(nodes: Json) -> Json:
    """Who keeps what besides its own layers, and what would have to be loaded if its holder died."""
    workers = [row for row in rows_of(nodes.get("workers")) if row.get("state") not in ("left", "out")]
    warm = {layer for row in workers for layer in _layers(row.get("standby"))}
    served = sorted({layer for row in workers for layer in _layers([row.get("layers")])})
    rows = [{key: row.get(key) for key in ("name", "layers", "standby", "steered")} for row in workers]
    return {"workers": rows, "not_kept": [layer for layer in served if layer not in warm]}


def _layers(ranges: object) -> set[int]:
    found: set[int] = set()
    for each in ranges if isinstance(ranges, list | tuple) else ():
        if isinstance(each, list | tuple) and len(each) == 2 and not isinstance(each, Mapping):
            found.update(range(int(each[0]), int(each[1])))
    return found

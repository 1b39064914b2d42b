"""Text for ``swarm up`` from the broker's reports. Reports come in, lines go out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.cli.output import format_bytes
from swarm.wire.messages import Json, LayerRange

DEFAULT_URL = "tcp://127.0.0.1:5700"
GENERATE = 'swarm generate "Once upon a time"'
_NO_WORKERS = "no worker is here"


def format_loading(status: Json, nodes: Json) -> str:
    """Return the state until the swarm serves: present workers, loading progress, missing resources."""
    parts = [_workers(nodes)]
    loading: list[dict[str, Any]] = status.get("loading") or []  # type: ignore[assignment]
    if loading:
        loaded, total = (sum(int(row[key]) for row in loading) for key in ("loaded_bytes", "total_bytes"))
        # in steps of ten percent, because without a terminal each change is a line
        percent = 100 if total == 0 else 10 * (10 * loaded // total)
        parts.append(f"{percent} % of {format_bytes(total)} loaded")
    elif _adds_information(waits_for := str(status.get("waits_for") or ""), than=parts[0]):
        parts.append(f"waiting for {waits_for}")
    return " · ".join(parts)


def _adds_information(waits_for: str, than: str) -> bool:
    """Whether a reason adds information: without any worker, waiting for a worker is obvious."""
    return bool(waits_for) and not (than == _NO_WORKERS and waits_for.startswith("a worker"))


def _workers(nodes: Json) -> str:
    workers: list[dict[str, Any]] = nodes.get("workers") or []  # type: ignore[assignment]
    names = sorted((str(worker["name"]) for worker in workers if worker["state"] not in ("out", "left")), key=_natural)
    return f"workers: {', '.join(names)}" if names else _NO_WORKERS


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def format_serving(plan: Json, status: Json, url: str, how_to_stop: str, example: str = GENERATE) -> list[str]:
    """Return lines for the first time the swarm serves: the plan, the URL, how to try it by the command ``example``, if
    there is one, and how to stop it."""
    at = "" if url == DEFAULT_URL else f" --url {url}"
    stages = plan.get("stages") or []
    count = "1 worker" if len(stages) == 1 else f"{len(stages)} workers"  # type: ignore[arg-type]
    return [
        f"serving {status.get('model')} on {count}",
        *format_plan(plan),
        f"url: {url}",
        *([f"try: {example}{at}"] if example else []),
        how_to_stop,
    ]


def format_plan(plan: Json) -> list[str]:
    """Return a table of the plan: worker, layers, memory, capacity in tokens."""
    stages: list[dict[str, Any]] = plan.get("stages") or []  # type: ignore[assignment]
    rows = [("worker", "layers", "weights", "memory", "room")]
    rows += [
        (
            str(stage["worker"]),
            str(LayerRange(*stage["layers"])),
            format_bytes(stage["weight_bytes"]),
            format_bytes(stage["resident_bytes"]) if "resident_bytes" in stage else "?",
            f"{stage['kv_capacity']} tokens" if "kv_capacity" in stage else "?",
        )
        for stage in stages
    ]
    return [f"  {line}" for line in _align(rows)]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""Recoveries as the console shows them: phase by phase, predicted and actual times, and a summary when one has
ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from swarm.admin.report_rows import Row, get_number
from swarm.gateway.console.patch import Tree

# (phase, its actual time in the report, its predicted time, the moment at which it ended)
PHASES: Final = (
    ("verdict", "detect_s", "", "detected_at"),
    ("plan", "plan_s", "", "planned_at"),
    ("load", "load_s", "load_s", "prepared_at"),
    ("activate", "activate_s", "", "activated_at"),
    ("replay", "replay_s", "replay_s", "replayed_at"),
    ("resume", "resume_s", "", "resumed_all_at"),
)


def has_ended(row: Row) -> bool:
    return row.get("resumed_all_at") is not None


def describe_recovery(row: Row, began_at: float | None, holders: Mapping[int, str]) -> Tree:
    """Return one recovery. ``began_at``: its start in seconds since 1970, if known. ``holders``: the worker that holds
    each layer now."""
    body: Tree = {key: row.get(key) for key in ("epoch", "cause", "evidence", "workers", "lost", "choice", "warm")}
    body |= {"began_at": began_at, "phases": _phases(row)}
    if has_ended(row):
        body |= {
            "total_s": _seconds_in(row, "measured", "total_s"),
            "sequences": row.get("sequences"),
            "sentence": summarize(row, holders),
        }
    return body


def _phases(row: Row) -> list[Tree]:
    """Return the phases: those with an end are done, the next one runs."""
    phases: list[Tree] = []
    state = "done"
    for name, took, predicted, over_at in PHASES:
        is_done = state == "done" and row.get(over_at) is not None
        state = "done" if is_done else "runs" if state == "done" else "waits"
        phases.append(
            {
                "name": name,
                "state": state,
                "took_s": _seconds_in(row, "measured", took) if is_done else None,
                "predicted_s": _seconds_in(row, "predicted", predicted) if predicted else None,
            }
        )
    return phases


def _seconds_in(row: Row, table: str, key: str) -> float | None:
    values = row.get(table)
    value = values.get(key) if isinstance(values, Mapping) else None
    return round(float(value), 6) if isinstance(value, int | float) else None


def summarize(row: Row, holders: Mapping[int, str]) -> str:
    """Return the summary: ``w1 died; w0 took layers 3–5; 2 answers went on after 212 ms.``

    It predicts nothing, since the broker predicts only two of the phases: those stand in their rows.
    """
    parts = [_describe_lost(row), _describe_takeover(row, holders), _describe_resumed(row)]
    return "; ".join(part for part in parts if part) + "."


def _describe_lost(row: Row) -> str:
    workers = [str(name) for name in _list(row.get("workers"))]
    if not workers:
        return str(row.get("cause") or "the plan was void")
    return f"{_join_words(workers)} {'was' if len(workers) == 1 else 'were'} lost"


def _describe_takeover(row: Row, holders: Mapping[int, str]) -> str:
    takers: dict[str, list[int]] = {}
    for layers in _list(row.get("lost")):
        first, stop = (int(layers[0]), int(layers[1])) if isinstance(layers, Sequence) and len(layers) == 2 else (0, 0)
        for layer in range(first, stop):
            if layer in holders:
                takers.setdefault(holders[layer], []).append(layer)
    return _join_words([f"{name} took {_layers(layers)}" for name, layers in takers.items()])


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {format_ranges(layers)}"


def _describe_resumed(row: Row) -> str:
    total_s = _seconds_in(row, "measured", "total_s")
    count = int(get_number(row, "sequences"))
    who = "the plan served again" if not count else "1 answer went on" if count == 1 else f"{count} answers went on"
    return who if total_s is None else f"{who} after {format_duration(total_s)}"


def format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1000:,.0f} ms".replace(",", " ")


def format_ranges(layers: Sequence[int]) -> str:
    """Format layers as ranges: ``[3, 4, 5, 8]`` → ``3–5, 8``."""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in ranges)


def _join_words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []

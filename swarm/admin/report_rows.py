"""Tables in the broker's reports. Missing or unexpected values are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swarm.wire.messages import LayerRange

Row = Mapping[str, object]
GONE = ("left", "out")  # states of workers that are not members any more


def read_rows(value: object) -> list[Row]:
    """Return the rows of a table; none if it is not a table."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def is_present(worker: Row) -> bool:
    """Whether this worker in the report ``nodes`` has neither left nor been excluded."""
    return worker.get("state") not in GONE


def may_have_layers(worker: Row) -> bool:
    """Whether a plan may give layers to this worker in the report ``nodes``.

    A worker that is leaving, or held back by an operator, gets none. An older broker reports neither.
    """
    return worker.get("state", "member") in ("member", "refused") and not worker.get("steered")


def describe_held_back(workers: Iterable[Row]) -> str:
    """Return ``w0, w1 are drained, w2 is cordoned``; empty if an operator holds no worker back."""
    by_state: dict[str, list[str]] = {}
    for row in workers:
        if row.get("steered"):
            by_state.setdefault(str(row["steered"]), []).append(str(row.get("name")))
    return ", ".join(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {how}" for how, names in by_state.items()
    )


def release_commands(workers: Iterable[Row]) -> str:
    """Return the commands with which an operator lets the held-back workers have layers again."""
    held = [row for row in workers if row.get("steered")]
    names = [str(row.get("name")) for row in held if row.get("steered") != "excluded"]
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    commands = [f"swarmctl uncordon {names[0]}{others}"] if names else []
    return ", ".join([*commands, *(["swarmctl plan --apply"] if len(names) < len(held) else [])])


def get_number(row: Row, key: str) -> float:
    """Return a number; 0 if it is missing."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def format_layers(layers: Sequence[Any]) -> str:
    """Format ``[3, 6]`` as ``layers 3–5``, and ``[5, 6]`` as ``layer 5``."""
    return LayerRange(*layers).label


def format_layers_short(layers: Sequence[Any]) -> str:
    """Format ``[3, 6]`` as ``3–5``, and ``[5, 6]`` as ``5``."""
    return str(LayerRange(*layers))


def format_count(count: object, noun: str) -> str:
    """Format ``1 stage``, ``2 stages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

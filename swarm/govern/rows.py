"""Tables in the broker's reports, read as they are: what is missing or strange is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, object]
GONE = ("left", "out")  # states of workers that are no members any more


def rows_of(value: object) -> list[Row]:
    """The rows of a table; none where there is no table."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def is_here(worker: Row) -> bool:
    """Is this row of the report ``nodes`` about a worker that has neither left nor been put out?"""
    return worker.get("state") not in GONE


def number(row: Row, key: str) -> float:
    """A figure; 0 where there is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def layers_in_words(layers: Sequence[Any]) -> str:
    """``[3, 6]`` → ``layers 3–5``; ``[5, 6]`` → ``layer 5``."""
    first, last = layers[0], layers[1] - 1
    return f"layer {first}" if first == last else f"layers {first}–{last}"


def counted(count: object, one: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"

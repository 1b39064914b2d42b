"""Tables in the broker's reports, read as they are: what is missing or strange is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

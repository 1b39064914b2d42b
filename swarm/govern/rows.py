"""Tables in the broker's reports, read as they are: what is missing or strange is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swarm.wire.messages import LayerRange

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


def may_have_layers(worker: Row) -> bool:
    """May a plan give layers to this worker of the report ``nodes``? Not to one that leaves, or is held back by hand.
    An older broker does not tell of either."""
    return worker.get("state", "member") in ("member", "refused") and not worker.get("steered")


def held_back(workers: Iterable[Row]) -> str:
    """``w0, w1 are drained, w2 is cordoned``; empty if nobody is held back by hand."""
    by_state: dict[str, list[str]] = {}
    for row in workers:
        if row.get("steered"):
            by_state.setdefault(str(row["steered"]), []).append(str(row.get("name")))
    return ", ".join(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {how}" for how, names in by_state.items()
    )


def lets_them(workers: Iterable[Row]) -> str:
    """What an operator says so that those who are held back by hand may have layers again."""
    held = [row for row in workers if row.get("steered")]
    names = [str(row.get("name")) for row in held if row.get("steered") != "excluded"]
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    said = [f"swarmctl uncordon {names[0]}{others}"] if names else []
    return ", ".join([*said, *(["swarmctl plan --apply"] if len(names) < len(held) else [])])


def number(row: Row, key: str) -> float:
    """A figure; 0 where there is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def layers_in_words(layers: Sequence[Any]) -> str:
    """``[3, 6]`` → ``layers 3–5``; ``[5, 6]`` → ``layer 5``."""
    return LayerRange(*layers).in_words


def layers_in_brief(layers: Sequence[Any]) -> str:
    """``[3, 6]`` → ``3–5``; ``[5, 6]`` → ``5``."""
    return str(LayerRange(*layers))


def counted(count: object, one: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"

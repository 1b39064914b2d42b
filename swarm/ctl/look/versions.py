"""Comparison of the builds of all processes, for ``swarmctl version``. Pure, except for this process's own build."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.govern.rows import is_here, rows_of
from swarm.version import __version__
from swarm.wire.greeting import Greeting
from swarm.wire.messages import Json
from swarm.wire.schema import schema


def versions(status: Json, nodes: Json, gateways: Mapping[str, Json] | None = None) -> Json:
    """Return a row for each process: the broker, present workers, gateways by address, and this one.

    ``messages``: schema digest of the build; ``protocol``: protocol versions it supports; null: the build is too old to
    report them. ``unlike``: the fields that differ from the broker's. ``out``: missing workers, whose builds are
    unknown.
    """
    here = Greeting(schema=schema())
    broker = _row("broker", status.get("version"), status.get("protocol"), status.get("messages"))
    rows = sorted(rows_of(nodes.get("workers")), key=lambda row: str(row.get("name")))
    workers = [
        _row(str(row.get("name")), row.get("build"), row.get("protocol"), row.get("messages"))
        for row in rows
        if is_here(row)
    ]
    doors = [
        _row(f"gateway {address}", told.get("version"), told.get("protocol"), told.get("messages"))
        for address, told in (gateways or {}).items()
    ]
    own = _row("swarmctl", __version__, list(here.versions), here.schema)
    processes = [broker, *({**row, "unlike": _unlike(broker, row)} for row in (*workers, *doors, own))]
    names, out = {row["process"] for row in workers}, [row for row in rows if row.get("state") == "out"]
    return {
        "processes": processes,
        "out": list(dict.fromkeys(n for row in out if (n := str(row["name"])) not in names)),
    }


def _row(process: str, version: object, protocol: object, messages: object) -> Json:
    return {"process": process, "version": version, "protocol": protocol, "messages": messages, "unlike": []}


def _unlike(broker: Mapping[str, object], row: Mapping[str, object]) -> list[str]:
    """Return the fields that differ from the broker's; missing values are not compared."""
    known = [key for key in ("version", "protocol", "messages") if broker[key] is not None and row[key] is not None]
    return [key for key in known if broker[key] != row[key]]


def drawn(body: Json) -> RenderableType:
    rows = rows_of(body.get("processes"))
    table = Table(box=box.SIMPLE)
    for title in ("process", "version", "protocol", "messages"):
        table.add_column(title)
    for row in rows:
        protocol = row["protocol"]
        spoken = ", ".join(map(str, protocol)) if isinstance(protocol, list) else None
        table.add_row(
            *(Text(str(part or "unknown")) for part in (row["process"], row["version"], spoken, row["messages"]))
        )
    strange = [row for row in rows if row["unlike"]]
    told = [f"· {row['process']} has another build than the broker: other {_words(row['unlike'])}" for row in strange]
    silent = [str(row["process"]) for row in rows if row["messages"] is None]
    if silent:
        told.append(f"· too old to report their messages: {_words(silent)}")
    told = told or ["· all have the same build"]
    if out := body.get("out"):
        told.append(f"· out, so their builds are unknown: {_words(out)} (see swarmctl nodes)")
    return Group(table, *map(Text, told))


def _words(parts: object) -> str:
    names = [str(part) for part in parts] if isinstance(parts, list) else []
    return " and ".join(names)

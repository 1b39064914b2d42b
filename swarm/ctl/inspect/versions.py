"""Comparison of the builds of all processes, for ``swarmctl version``. Pure, except for this process's own build."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from swarm.admin.report_rows import is_present, read_rows
from swarm.screen import ReportTable
from swarm.version import __version__
from swarm.wire.greeting import Greeting
from swarm.wire.messages import Json
from swarm.wire.schema import schema


def compare_versions(status: Json, nodes: Json, gateways: Mapping[str, Json] | None = None) -> Json:
    """Return a row for each process: the broker, present workers, gateways by address, and this one.

    ``messages``: schema digest of the build; ``protocol``: protocol versions it supports; null: the build is too old to
    report them. ``unlike``: the fields that differ from the broker's. ``out``: missing workers, whose builds are
    unknown.
    """
    here = Greeting(schema=schema())
    broker = _row("broker", status.get("version"), status.get("protocol"), status.get("messages"))
    rows = sorted(read_rows(nodes.get("workers")), key=lambda row: str(row.get("name")))
    workers = [
        _row(str(row.get("name")), row.get("build"), row.get("protocol"), row.get("messages"))
        for row in rows
        if is_present(row)
    ]
    gateway_rows = [
        _row(f"gateway {address}", told.get("version"), told.get("protocol"), told.get("messages"))
        for address, told in (gateways or {}).items()
    ]
    own = _row("swarmctl", __version__, list(here.versions), here.schema)
    processes = [broker, *({**row, "unlike": _differing_fields(broker, row)} for row in (*workers, *gateway_rows, own))]
    names, out = {row["process"] for row in workers}, [row for row in rows if row.get("state") == "out"]
    return {
        "processes": processes,
        "out": list(dict.fromkeys(n for row in out if (n := str(row["name"])) not in names)),
    }


def _row(process: str, version: object, protocol: object, messages: object) -> Json:
    return {"process": process, "version": version, "protocol": protocol, "messages": messages, "unlike": []}


def _differing_fields(broker: Mapping[str, object], row: Mapping[str, object]) -> list[str]:
    """Return the fields that differ from the broker's; missing values are not compared."""
    known = [key for key in ("version", "protocol", "messages") if broker[key] is not None and row[key] is not None]
    return [key for key in known if broker[key] != row[key]]


def render_versions(body: Json) -> RenderableType:
    rows = read_rows(body.get("processes"))
    table = ReportTable(box=box.SIMPLE)
    for title in ("process", "version", "protocol", "messages"):
        table.add_column(title)
    for row in rows:
        protocol = row["protocol"]
        protocols = ", ".join(map(str, protocol)) if isinstance(protocol, list) else None
        table.add_row(
            *(Text(str(part or "unknown")) for part in (row["process"], row["version"], protocols, row["messages"]))
        )
    different = [row for row in rows if row["unlike"]]
    notes = [
        f"· {row['process']} has another build than the broker: other {_join_words(row['unlike'])}" for row in different
    ]
    unknown = [str(row["process"]) for row in rows if row["messages"] is None]
    if unknown:
        notes.append(f"· too old to report their messages: {_join_words(unknown)}")
    notes = notes or ["· all have the same build"]
    if out := body.get("out"):
        notes.append(f"· out, so their builds are unknown: {_join_words(out)} (see swarmctl nodes)")
    return Group(table, *map(Text, notes))


def _join_words(parts: object) -> str:
    names = [str(part) for part in parts] if isinstance(parts, list) else []
    return " and ".join(names)

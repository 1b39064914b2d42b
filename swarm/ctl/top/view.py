"""Rendering of the screen: data and a size go in, lines come out that fit. Pure.

Nothing is shown by colour alone: the selected line has a mark, and so has an unhealthy worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.cli.output import in_bytes
from swarm.ctl.render import value_of
from swarm.govern.rows import is_here, rows_of
from swarm.wire.messages import Json

_LEAST: Final = (40, 8)  # Columns and lines of the smallest useful screen.
KEYS: Final = "↑↓ move  d drain  u uncordon  c cancel  q quit"

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Known:
    """The broker's last answers. ``away_s``: how long it has not answered; None: it answers."""

    status: Json
    nodes: Json
    stats: Json
    requests: Json
    away_s: float | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A selectable worker or request."""

    kind: str  # "worker" or "request".
    name: str


@dataclass(frozen=True, slots=True)
class Said:
    """Content of the status line: the result of the last command, or a question (``is_question``)."""

    text: str = ""
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    is_chosen: bool = False
    is_title: bool = False


def workers_of(known: Known) -> list[Row]:
    """Return the present workers: by layers, then those without layers by name."""
    found = [row for row in rows_of(known.nodes.get("workers")) if is_here(row)]
    return sorted(found, key=lambda row: (_first_layer(row), str(row.get("name"))))


def requests_of(known: Known) -> list[Row]:
    """Return the active requests, the oldest first."""
    return [row for row in rows_of(known.requests.get("requests")) if row.get("state") != "ended"]


def items(known: Known) -> list[Item]:
    """Return the selectable items in screen order."""
    workers = [Item("worker", str(row.get("name"))) for row in workers_of(known)]
    return workers + [Item("request", str(row.get("request_id"))) for row in requests_of(known)]


def screen(known: Known, chosen: Item | None, said: Said, columns: int, lines: int) -> list[Line]:
    """Return the lines of a screen of this size."""
    if columns < _LEAST[0] or lines < _LEAST[1]:
        return [Line("too small"[:columns])][:lines]
    head = [Line(text, is_title=number == 0) for number, text in enumerate(_head(known))]
    foot = Line((said.text if said.waits else _absence(known) or said.text) or KEYS, is_title=True)
    body = _body(known, chosen)
    room = lines - len(head) - 1
    shown = _around(body, room)
    filled = [*head, *shown, *[Line("")] * (room - len(shown)), foot]
    return [Line(_cut(line.text, columns), line.is_chosen, line.is_title) for line in filled]


def _head(known: Known) -> list[str]:
    status, scheduler = known.status, _part(known.stats, "scheduler")
    recoveries = _part(known.stats, "recoveries")
    state = str(status.get("state") or "no data yet")
    where = f" {status.get('model')}, epoch {status.get('epoch')}" if state == "serving" else ""
    waits = f": {status['waits_for']}" if status.get("waits_for") else ""
    under_way = ", one under way" if recoveries.get("under_way") else ""
    used, capacity = status.get("kv_reserved") or 0, status.get("kv_capacity") or 0
    return [
        f"swarm  {state}{where}{waits}  up {value_of('_s', status.get('uptime_s') or 0)}",
        f"tokens/s {_figure(scheduler.get('tokens_per_s'))}  running {_figure(status.get('num_running'))}  "
        f"queued {_figure(status.get('num_queued'))}  recoveries {_figure(recoveries.get('ended'))}{under_way}",
        f"KV {bar(used, capacity, 20)} {_figure(used)} of {_figure(capacity)} positions",
        _chain(known),
    ]


def _chain(known: Known) -> str:
    """Return the stages in pipeline order."""
    stages = [row for row in workers_of(known) if row.get("layers")]
    return " → ".join(f"[{row.get('name')} {value_of('layers', row.get('layers'))}]" for row in stages) or "no stages"


def _body(known: Known, chosen: Item | None) -> list[Line]:
    rows = [Line(f"  {'worker':<16}{'layers':<9}{'verdict':<10}{'by hand':<9}{'memory':>10}  KV", is_title=True)]
    for row in workers_of(known):
        rows.append(_choice(_worker(row), Item("worker", str(row.get("name"))), chosen))
    rows.append(Line(f"  {'request':<34}{'state':<9}{'tokens':>12}  tenant", is_title=True))
    for row in requests_of(known):
        rows.append(_choice(_request(row), Item("request", str(row.get("request_id"))), chosen))
    return rows


def _choice(text: str, item: Item, chosen: Item | None) -> Line:
    return Line(f"{'>' if item == chosen else ' '} {text}", is_chosen=item == chosen)


def _worker(row: Row) -> str:
    layers = value_of("layers", row.get("layers"))
    verdict = str(row.get("verdict") or "")
    memory = in_bytes(_number(row.get("resident_bytes")))
    kv = bar(_number(row.get("kv_used")), _number(row.get("kv_capacity")), 10)
    mark = verdict if verdict == "well" else f"!{verdict}"
    return f"{_cut(str(row.get('name')), 15):<16}{layers:<9}{mark:<10}{row.get('steered') or '':<9}{memory:>10}  {kv}"


def _request(row: Row) -> str:
    tokens = f"{row.get('num_tokens')} / {row.get('max_tokens')}"
    tenant = str(row.get("tenant") or "")
    return f"{_cut(str(row.get('request_id')), 33):<34}{row.get('state') or '':<9}{tokens:>12}  {tenant}"


def bar(used: object, capacity: object, width: int) -> str:
    """Return a bar that shows the used part of a capacity."""
    of = _number(capacity)
    filled = round(width * min(1.0, _number(used) / of)) if of else 0
    return "█" * filled + "░" * (width - filled)


def _around(body: Sequence[Line], room: int) -> Sequence[Line]:
    """Return as many lines as fit, with the selected one among them."""
    at = next((number for number, line in enumerate(body) if line.is_chosen), 0)
    first = max(0, min(at - room // 2, len(body) - room))
    return body[first : first + room]


def _absence(known: Known) -> str:
    if known.away_s is None:
        return ""
    return f"the broker has not answered for {known.away_s:.0f} s; these are its last figures  (q quit)"


def _first_layer(row: Row) -> float:
    layers = row.get("layers")
    return _number(layers[0]) if isinstance(layers, list) and layers else float("inf")


def _part(body: Json, name: str) -> Row:
    part = body.get(name)
    return part if isinstance(part, Mapping) else {}


def _figure(value: object) -> str:
    return f"{_number(value):,.4g}" if isinstance(value, float) else f"{_number(value):,.0f}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _cut(text: str, width: int) -> str:
    """Return the text on one line of this width, with control characters (which a peer's name might contain)
    replaced."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= width else plain[: width - 1] + "…"

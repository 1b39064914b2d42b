"""Rendering of the screen: data and a size go in, lines come out that fit. Pure.

Nothing is shown by colour alone: the selected line has a mark, and so has an unhealthy worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.admin.report_rows import is_present, read_rows
from swarm.cli.output import format_bytes
from swarm.ctl.render import format_value
from swarm.wire.messages import Json

_MIN_SIZE: Final = (40, 8)  # Columns and lines of the smallest useful screen.
_NAME_WIDTH: Final = 16  # Least width of the workers' names; they get more if they need it and the screen has it.
_OTHERS_WIDTH: Final = 43  # Width of a worker's line without its name and what was done by hand.
KEYS: Final = "↑↓ move  d drain  u uncordon  c cancel  q quit"

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TopData:
    """The broker's last answers. ``away_s``: how long it has not answered; None: it answers."""

    status: Json
    nodes: Json
    stats: Json
    requests: Json
    away_s: float | None = None


@dataclass(frozen=True, slots=True)
class TopItem:
    """A selectable worker or request."""

    kind: str  # "worker" or "request".
    name: str


@dataclass(frozen=True, slots=True)
class StatusLine:
    """Content of the status line: the result of the last command, or a question (``is_question``)."""

    text: str = ""
    is_question: bool = False


@dataclass(frozen=True, slots=True)
class TopLine:
    text: str
    is_selected: bool = False
    is_title: bool = False


def workers_of(known: TopData) -> list[Row]:
    """Return the present workers: by layers, then those without layers by name."""
    present = [row for row in read_rows(known.nodes.get("workers")) if is_present(row)]
    return sorted(present, key=lambda row: (_first_layer(row), str(row.get("name"))))


def requests_of(known: TopData) -> list[Row]:
    """Return the active requests, the oldest first."""
    return [row for row in read_rows(known.requests.get("requests")) if row.get("state") != "ended"]


def selectable_items(known: TopData) -> list[TopItem]:
    """Return the selectable items in screen order."""
    workers = [TopItem("worker", str(row.get("name"))) for row in workers_of(known)]
    return workers + [TopItem("request", str(row.get("request_id"))) for row in requests_of(known)]


def render_screen(known: TopData, chosen: TopItem | None, said: StatusLine, columns: int, lines: int) -> list[TopLine]:
    """Return the lines of a screen of this size."""
    if columns < _MIN_SIZE[0] or lines < _MIN_SIZE[1]:
        return [TopLine("too small"[:columns])][:lines]
    head = [TopLine(text, is_title=number == 0) for number, text in enumerate(_render_head(known))]
    foot = TopLine((said.text if said.is_question else _describe_absence(known) or said.text) or KEYS, is_title=True)
    body = _render_body(known, chosen, columns)
    num_free = lines - len(head) - 1
    shown = _scroll_to_selected(body, num_free)
    all_lines = [*head, *shown, *[TopLine("")] * (num_free - len(shown)), foot]
    return [TopLine(_truncate(line.text, columns), line.is_selected, line.is_title) for line in all_lines]


def _render_head(known: TopData) -> list[str]:
    status, scheduler = known.status, _part(known.stats, "scheduler")
    recoveries = _part(known.stats, "recoveries")
    state = str(status.get("state") or "no data yet")
    where = f" {status.get('model')}, epoch {status.get('epoch')}" if state == "serving" else ""
    waits = f": {status['waits_for']}" if status.get("waits_for") else ""
    under_way = ", one under way" if recoveries.get("under_way") else ""
    used, capacity = status.get("kv_reserved") or 0, status.get("kv_capacity") or 0
    return [
        f"swarm  {state}{where}{waits}  up {format_value('_s', status.get('uptime_s') or 0)}",
        f"tokens/s {_format_figure(scheduler.get('tokens_per_s'))}  "
        f"running {_format_figure(status.get('num_running'))}  "
        f"queued {_format_figure(status.get('num_queued'))}  "
        f"recoveries {_format_figure(recoveries.get('ended'))}{under_way}",
        f"KV {render_bar(used, capacity, 20)} {_format_figure(used)} of {_format_figure(capacity)} positions",
        _render_stages(known),
    ]


def _render_stages(known: TopData) -> str:
    """Return the stages in pipeline order."""
    stages = [row for row in workers_of(known) if row.get("layers")]
    return (
        " → ".join(f"[{row.get('name')} {format_value('layers', row.get('layers'))}]" for row in stages) or "no stages"
    )


def _render_body(known: TopData, chosen: TopItem | None, columns: int) -> list[TopLine]:
    workers = workers_of(known)
    longest = max((len(str(row.get("name"))) for row in workers), default=0)
    width = max(_NAME_WIDTH, min(longest + 1, columns - _OTHERS_WIDTH))
    by_hand = f"{'by hand':<9}" if any(row.get("steered") for row in workers) else ""
    heading = f"  {'worker':<{width}}{'layers':<9}{'verdict':<10}{by_hand}{'memory':>10}  KV"
    rows = [TopLine(heading, is_title=True)]
    for row in workers:
        text = _render_worker(row, width, has_by_hand=bool(by_hand))
        rows.append(_item_line(text, TopItem("worker", str(row.get("name"))), chosen))
    rows.append(TopLine(f"  {'request':<34}{'state':<9}{'tokens':>12}  tenant", is_title=True))
    for row in requests_of(known):
        rows.append(_item_line(_render_request(row), TopItem("request", str(row.get("request_id"))), chosen))
    return rows


def _item_line(text: str, item: TopItem, chosen: TopItem | None) -> TopLine:
    return TopLine(f"{'>' if item == chosen else ' '} {text}", is_selected=item == chosen)


def _render_worker(row: Row, width: int, *, has_by_hand: bool) -> str:
    layers = format_value("layers", row.get("layers"))
    verdict = str(row.get("verdict") or "")
    memory = format_bytes(_number(row.get("resident_bytes")))
    kv = render_bar(_number(row.get("kv_used")), _number(row.get("kv_capacity")), 10)
    mark = verdict if verdict == "well" else f"!{verdict}"
    by_hand = f"{row.get('steered') or '':<9}" if has_by_hand else ""
    return f"{_truncate(str(row.get('name')), width - 1):<{width}}{layers:<9}{mark:<10}{by_hand}{memory:>10}  {kv}"


def _render_request(row: Row) -> str:
    tokens = f"{row.get('num_tokens')} / {row.get('max_tokens')}"
    tenant = str(row.get("tenant") or "")
    return f"{_truncate(str(row.get('request_id')), 33):<34}{row.get('state') or '':<9}{tokens:>12}  {tenant}"


def render_bar(used: object, capacity: object, width: int) -> str:
    """Return a bar that shows the used part of a capacity."""
    of = _number(capacity)
    filled = round(width * min(1.0, _number(used) / of)) if of else 0
    return "█" * filled + "░" * (width - filled)


def _scroll_to_selected(body: Sequence[TopLine], room: int) -> Sequence[TopLine]:
    """Return as many lines as fit, with the selected one among them."""
    at = next((number for number, line in enumerate(body) if line.is_selected), 0)
    first = max(0, min(at - room // 2, len(body) - room))
    return body[first : first + room]


def _describe_absence(known: TopData) -> str:
    if known.away_s is None:
        return ""
    return f"the broker has not answered for {known.away_s:.0f} s; these are its last figures  (q quit)"


def _first_layer(row: Row) -> float:
    layers = row.get("layers")
    return _number(layers[0]) if isinstance(layers, list) and layers else float("inf")


def _part(body: Json, name: str) -> Row:
    part = body.get(name)
    return part if isinstance(part, Mapping) else {}


def _format_figure(value: object) -> str:
    return f"{_number(value):,.4g}" if isinstance(value, float) else f"{_number(value):,.0f}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _truncate(text: str, width: int) -> str:
    """Return the text on one line of this width, with control characters (which a peer's name might contain)
    replaced."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= width else plain[: width - 1] + "…"

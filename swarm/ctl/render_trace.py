"""Rendering of traces for people: where each token's time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from swarm.admin.report_rows import read_rows
from swarm.ctl.render import Body, fields, format_value
from swarm.screen import ReportTable

_PARTS = (
    ("queue_s", "queue", "in no step: waiting for KV capacity or its turn"),
    ("wire_s", "wire", "between broker and stages: encoding, sockets, networks"),
    ("wait_s", "waiting", "in a stage, behind other steps"),
    ("compute_s", "compute", "in the layers"),
    ("sample_s", "sampling", "from logits to tokens"),
    ("broker_s", "broker", "from the answer to the client's socket"),
    ("unaccounted_s", "unaccounted", "the rest: the stages' bookkeeping"),
)
_MOST_LINES = 32  # Tokens shown; --json has all.


def trace(body: Body) -> RenderableType:
    """Render the whole report."""
    head = fields({key: value for key, value in body.items() if key != "sequences"})
    return Group(head, *(part for sequence in read_rows(body.get("sequences")) for part in _sequence(sequence)))


def _sequence(sequence: Body) -> list[RenderableType]:
    head = fields({key: v for key, v in sequence.items() if key not in ("sums", "stages", "tokens")})
    sums, tokens = sequence.get("sums"), read_rows(sequence.get("tokens"))
    parts: list[RenderableType] = [Text(""), head]
    if isinstance(sums, Mapping) and tokens:
        parts += [_sums(sums), _stages(read_rows(sequence.get("stages"))), _tokens(tokens)]
        return parts
    if "tokens" in sequence:
        parts.append(Text("no token is traced: none is finished yet, or its steps were too long ago"))
    if stages := read_rows(sequence.get("stages")):
        parts.append(_stages(stages))
    return parts


def _sums(sums: Body) -> RenderableType:
    total = _number(sums.get("total_s")) or 1.0
    table = ReportTable("part", "time", "share", "what it is", box=box.SIMPLE)
    table.columns[1].justify = table.columns[2].justify = "right"
    for key, name, meaning in _PARTS:
        if key not in sums:  # Unknown, which is not the same as zero.
            continue
        share = f"{100 * _number(sums.get(key)) / total:.1f} %"
        table.add_row(name, format_value(key, sums.get(key)), share, meaning)
    table.add_row("all tokens", format_value("total_s", sums.get("total_s")), "100 %", "")
    return table


def _stages(stages: Sequence[Body]) -> RenderableType:
    table = ReportTable("worker", "layers", "waiting", "compute", "sampling", "received", box=box.SIMPLE)
    for column in table.columns[2:]:
        column.justify = "right"
    for stage in stages:
        keys = ("worker", "layers", "wait_s", "compute_s", "sample_s", "wire_bytes")
        table.add_row(*(Text(format_value(key, stage.get(key))) for key in keys))
    return table


def _tokens(tokens: Sequence[Body]) -> RenderableType:
    """Render tokens in milliseconds; of long answers, the first and the last ones."""
    workers = list(dict.fromkeys(str(stage.get("worker")) for token in tokens for stage in read_rows(token["stages"])))
    title = "milliseconds per token; on the right, what each stage computed"
    parts = [(key, name) for key, name, _ in _PARTS if any(key in token for token in tokens)]
    columns = (*(name for _, name in parts), *workers)
    table = ReportTable("token", "time", *columns, optional=columns[::-1], box=box.SIMPLE)
    for column in table.columns:
        column.justify = "right"
    for token in tokens if len(tokens) <= _MOST_LINES else [*tokens[: _MOST_LINES // 2], *tokens[-_MOST_LINES // 2 :]]:
        computed: dict[str, float] = dict.fromkeys(workers, 0.0)
        for stage in read_rows(token["stages"]):
            computed[str(stage.get("worker"))] += _number(stage.get("compute_s"))
        times = [token.get(key) for key in ("total_s", *(key for key, _ in parts))]
        table.add_row(str(token.get("index")), *map(_milliseconds, (*times, *computed.values())))
    if len(tokens) <= _MOST_LINES:
        return Group(Text(title), table)
    return Group(
        Text(title), table, Text(f"{len(tokens) - _MOST_LINES} tokens between them are omitted; --json has them")
    )


def _milliseconds(value: object) -> str:
    """Return milliseconds, or an empty text for an unknown value."""
    return "" if value is None else f"{1000 * _number(value):.2f}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

"""Output of ``swarmctl stats``: counters, sizes and times of the pipeline and of each stage.

For people, once or repeatedly (``--watch``), or in Prometheus' text format (``--prometheus``) for swarms without a
gateway.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from swarm.cli.output import make_console, print_json_line
from swarm.client.blocking import Client
from swarm.ctl.render import Body, counters, fields
from swarm.ctl.stats_summary import quantile
from swarm.errors import ConfigError, RequestTimeout, Unavailable
from swarm.screen import ReportTable
from swarm.version import install_command
from swarm.wire.messages import Json

_KINDS = ("sizes", "microseconds")  # Groups of values with a total, a last value and an average.
_PARTS = ("average", "last", "most", "total")
# Counters in the report -> names of their rates.
_RATES = (("steps", "steps"), ("positions", "positions"), ("tokens", "tokens"))


def watch_stats(
    client: Client,
    every_s: float,
    *,
    render: Callable[[Body], RenderableType],
    as_json: bool,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Display the report repeatedly, until an interrupt, which is the normal way to end it. Closes the client."""
    try:
        with client:
            _watch(client, every_s, render, as_json, pause)
    except KeyboardInterrupt:
        return


def _watch(
    client: Client,
    every_s: float,
    render: Callable[[Body], RenderableType],
    as_json: bool,
    pause: Callable[[float], None],
) -> None:
    before: Json = {}
    asked_at = time.monotonic()
    screen = make_console()
    while True:
        body = client.query("stats")
        now = time.monotonic()
        if as_json:
            print_json_line(body)
        else:
            screen.clear()  # No effect if it isn't a terminal.
            screen.print(Group(Text(_describe_refresh(before, body, now - asked_at)), render(body)))
        before, asked_at = body, now
        pause(every_s)


def _describe_refresh(before: Json, body: Json, seconds: float) -> str:
    first, last = before.get("pipeline"), body.get("pipeline")
    if not isinstance(first, Mapping) or not isinstance(last, Mapping):
        return "counters are totals since the start; from the next refresh on, this line shows rates per second"
    return f"since the last refresh: {describe_rates(first, last, seconds) or 'no data'}"


def print_metrics(connect: Callable[[], Client]) -> None:
    """Query and print the metrics. An unreachable broker is a metric, too (``swarm_up 0``), not a failure: the
    collector needs to see it."""
    try:
        from swarm.metrics.exposition import QUERIES, render_swarm  # its package is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--prometheus needs a package that is not installed ({error.name}): {install_command('gateway')}"
        ) from error
    answers: dict[str, Json] | None = None
    try:
        with connect() as client:
            answers = {what: client.query(what) for what in QUERIES}
    except (Unavailable, RequestTimeout) as error:
        print(error, file=sys.stderr)
    sys.stdout.write(render_swarm(answers).decode())


def render_stats(body: Body) -> RenderableType:
    """Render the whole report; an unknown value is shown under its own name."""
    pipeline, stages = body.get("pipeline"), body.get("stages")
    parts: list[RenderableType] = []
    if isinstance(pipeline, Mapping):
        parts.append(fields(pipeline, hidden=set(_KINDS)))
        parts += [_render_figures(f"pipeline, {kind}", {"": pipeline.get(kind)}) for kind in _KINDS if kind in pipeline]
    if isinstance(stages, Mapping) and stages:
        named = {str(name): values for name, values in stages.items() if isinstance(values, Mapping)}
        plain = {name: {key: v for key, v in values.items() if key not in _KINDS} for name, values in named.items()}
        parts.append(counters(plain))
        for kind in _KINDS:
            of_kind = {name: values[kind] for name, values in named.items() if kind in values}
            if of_kind:
                parts.append(_render_figures(f"stages, {kind}", of_kind))
    histograms = body.get("histograms")
    if isinstance(histograms, Mapping):
        parts.append(_render_histograms(histograms))
    rest = {key: value for key, value in body.items() if key not in ("pipeline", "stages", "histograms")}
    for key, value in rest.items():
        if isinstance(value, Mapping):
            shown = _without_positions(value) if key == "speculation" else value
            parts += [Text(key.replace("_", " ")), Padding(fields(shown), (0, 0, 1, 2))]
    return Group(*parts, fields({key: value for key, value in rest.items() if not isinstance(value, Mapping)}))


def _without_positions(speculation: Body) -> Body:
    """Return the figures of proposers without their numbers by position, whose quotients are shown as
    ``acceptance``."""
    return {
        name: {key: v for key, v in value.items() if key != "positions"} if isinstance(value, Mapping) else value
        for name, value in speculation.items()
    }


def _render_histograms(histograms: Mapping[str, object]) -> RenderableType:
    """Render a line per non-empty histogram: count, mean, and upper bounds of the median and the 95th and 99th
    percentiles."""
    table = ReportTable("spread", "number", "average", "half below", "95 % below", "99 % below", box=box.SIMPLE)
    for name, histogram in histograms.items():
        if not isinstance(histogram, Mapping):
            continue
        counts, bounds, total = (histogram.get(key) for key in ("counts", "bounds", "total"))
        if not (
            isinstance(counts, list) and isinstance(bounds, list) and isinstance(total, int | float) and any(counts)
        ):
            continue
        num = sum(counts)
        below = [_format_quantile(counts, bounds, part) for part in (0.5, 0.95, 0.99)]
        table.add_row(*map(Text, (name.replace("_", " "), str(num), f"{total / num:.4g}", *below)))
    return table


def _format_quantile(counts: list[int], bounds: list[float], part: float) -> str:
    bound = quantile(counts, bounds, part)
    return f"(above {bounds[-1]:g})" if bound is None else f"{bound:g}"


def describe_rates(before: Body, now: Body, seconds: float) -> str:
    """Describe the throughput between two pipeline reports; empty if the broker was restarted in between."""
    parts = []
    for key, name in _RATES:
        first, last = before.get(key, 0), now.get(key, 0)
        if isinstance(first, int | float) and isinstance(last, int | float) and last >= first and seconds > 0:
            parts.append(f"{(last - first) / seconds:.1f} {name}/s")
    return ", ".join(parts)


def _render_figures(title: str, columns: Mapping[str, object]) -> RenderableType:
    """Render a line per value, with its average, last, maximum and total in each column, as far as available."""
    found = {name: dict(_flatten(values)) for name, values in columns.items() if isinstance(values, Mapping)}
    figures = dict.fromkeys(figure for values in found.values() for figure in values)
    kinds = [part for part in _PARTS if any(part in v for values in found.values() for v in values.values())]
    table = ReportTable("figure", box=box.SIMPLE)
    for name in found:
        table.add_column(Text(name), justify="right")
    for figure in figures:
        cells = [" / ".join(_cell(values[figure], kinds)) if figure in values else "–" for values in found.values()]
        table.add_row(Text(figure.replace("_", " ")), *map(Text, cells))
    return Group(Text(f"{title}: {' / '.join(kinds)}"), table)


def _cell(values: Body, kinds: list[str]) -> list[str]:
    return [_number(values[part]) for part in kinds if part in values]


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _flatten(values: Body, prefix: str = "") -> list[tuple[str, Body]]:
    """Flatten nested values; groups (the stages' times inside the pipeline's) get names like "group name"."""
    found: list[tuple[str, Body]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            is_figure = any(part in value for part in _PARTS)
            found += [(f"{prefix}{name}", value)] if is_figure else _flatten(value, f"{prefix}{name} ")
    return found

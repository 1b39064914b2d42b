"""Short form of ``swarmctl stats``: the figures that an operator looks at. ``stats`` renders the whole report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from swarm.ctl.render import Body, format_value
from swarm.screen import ReportTable

_HINT = "swarmctl stats --all shows all figures"
_SPREADS = (
    ("time to first token", "first_token_s"),
    ("time between tokens", "between_tokens_s"),
    ("time of a request", "request_s"),
    ("time of a step", "step_s"),
)


def render_summary(body: Body) -> RenderableType:
    """Render a line per figure; a figure that the report lacks has no line."""
    grid = ReportTable.grid(padding=(0, 2))
    for name, text in summary_rows(body):
        grid.add_row(Text(name), Text(text))
    return Group(grid, Text(_HINT))


def summary_rows(body: Body) -> Iterator[tuple[str, str]]:
    """Yield names of figures and their texts."""
    pipeline, scheduler = _section(body, "pipeline"), _section(body, "scheduler")
    requests, recoveries = _section(body, "requests"), _section(body, "recoveries")
    ended = _section(requests, "ended")
    yield from _row("sequences", _parts((pipeline, "running", "running"), (pipeline, "queued", "queued")))
    yield from _row("tokens/s", _number(scheduler, "tokens_per_s"))
    yield from _row("tokens", _number(pipeline, "tokens"))
    if ended:
        complete = sum(_value(ended, reason) or 0 for reason in ("stop", "length"))
        others = _parts((ended, "cancelled", "cancelled"), (ended, "failed", "failed"))
        yield "requests ended", f"{format_value('', complete)} complete{others and ', '}{others}"
    yield from _row(
        "prompt tokens", _parts((requests, "prompt_tokens", "in all"), (requests, "cached_prompt_tokens", "cached"))
    )
    for name, key in _SPREADS:
        yield from _row(name, _spread(_section(_section(body, "histograms"), key)))
    yield from _row("sequences in a step", _number(_section(_section(pipeline, "sizes"), "rows"), "average"))
    kv = ((scheduler, "kv_used", "used"), (scheduler, "kv_cached", "cached"), (scheduler, "kv_capacity", "in all"))
    yield from _row("KV positions", _parts(*kv))
    yield from _row("preemptions", _number(scheduler, "preemptions"))
    under_way = ", one under way" if _value(recoveries, "under_way") else ""
    yield from _row("recoveries", (num := _number(recoveries, "ended")) and num + under_way)
    yield from _row("workers lost", _number(pipeline, "workers_lost"))


def quantile(counts: list[int], bounds: list[float], part: float) -> float | None:
    """Return the upper end of the bucket that contains this quantile; None if that bucket has none."""
    seen = 0
    for count, bound in zip(counts, bounds, strict=False):
        seen += count
        if seen >= part * sum(counts):
            return bound
    return None


def _section(body: Body, name: str) -> Body:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _value(body: Body, key: str) -> float | None:
    value = body.get(key)
    return value if isinstance(value, int | float) else None


def _number(body: Body, key: str) -> str:
    value = _value(body, key)
    return "" if value is None else format_value("", value)


def _parts(*parts: tuple[Body, str, str]) -> str:
    return ", ".join(f"{number} {label}" for body, key, label in parts if (number := _number(body, key)))


def _row(name: str, text: str) -> Iterator[tuple[str, str]]:
    if text:
        yield name, text


def _spread(histogram: Body) -> str:
    """Describe a histogram of seconds: bounds of its median and 95th percentile; empty without values."""
    counts, bounds = histogram.get("counts"), histogram.get("bounds")
    if not (isinstance(counts, list) and isinstance(bounds, list) and any(counts)):
        return ""
    texts = []
    for name, part in (("half", 0.5), ("95 %", 0.95)):
        bound = quantile(counts, bounds, part)
        side, end = ("above", bounds[-1]) if bound is None else ("below", bound)
        texts.append(f"{name} {side} {format_value('_s', end)}")
    return ", ".join(texts)

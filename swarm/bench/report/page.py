"""The report as one self-contained HTML page. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from swarm.bench.document import Document, PointResult
from swarm.bench.figures import LatencySummary, PointFigures
from swarm.bench.report.format import format_number, format_time
from swarm.bench.report.plots import (
    Plot,
    category_axis,
    describe_time_point,
    linear_axis,
    log_axis,
    tick_time,
    time_axis,
)
from swarm.bench.report.style import STYLE
from swarm.bench.report.table import LATENCIES, describe_ceiling, describe_verdict, summary_values

CURVES = (("ttft", "Time to first token", "a"), ("inter_token", "Between tokens", "b"), ("e2e", "End to end", "c"))


def render_page(document: Document) -> str:
    """Render the page."""
    best = document.best
    parts = [_header(document)]
    if best is None:
        parts.append('<p class="verdict">Nothing was measured.</p>')
    else:
        parts += [_key_cards(best)]
        if len(document.points) > 1:
            parts.append(_sweep(document))
        parts += [_time_section(best), _curves(best), _latencies(best.figures, best)]
        parts.append(_errors(best.figures))
    parts += [_facts(document, best), _notes(document), _footer(document)]
    title = escape(document.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _header(document: Document) -> str:
    when = escape(document.started_at.replace("T", " ").replace("+00:00", " UTC"))
    load = "a sweep over requests in flight" if document.sweep or len(document.points) > 1 else ""
    if not load and document.best is not None:
        load = document.best.load
    how = "streamed" if document.stream else "whole answers"
    lengths = f"{_option(document, 'prompt')} tokens in, {_option(document, 'output')} out at most"
    verdict = f'<p class="verdict">{escape(describe_verdict(document))}</p>' if document.sweep else ""
    return (
        f'<div class="kicker">Load test</div><h1>{escape(document.title)}</h1>'
        f'<p class="sub"><b>{escape(document.model)}</b> at <b>{escape(document.url)}</b> · '
        f"{escape(document.api)}, {how} · {escape(lengths)} · {escape(load)} · {when}</p>{verdict}"
    )


def _key_cards(best: PointResult) -> str:
    figures = best.figures
    cards = [
        _key("Generated", _split(format_number(figures.tokens_per_s), "tokens/s"), best.load, "first"),
        _key(
            "Answered",
            _split(format_number(figures.requests_per_s), "requests/s"),
            f"{figures.succeeded} requests succeeded"
            + (f", answers of {figures.answer_tokens}" if figures.answer_tokens else ""),
        ),
    ]
    for name, spread in (
        ("Time to first token", figures.ttft_ms),
        ("Between tokens", figures.inter_token_ms),
        ("End to end", figures.e2e_ms),
    ):
        if spread is not None:
            cards.append(_key(name, _time(spread.p50), f"median; 99 %: {format_time(spread.p99)}"))
    if figures.goodput is not None:
        cards.append(_key("Goodput", _split(f"{figures.goodput.share:.1%}", ""), f"met {figures.goodput.limits}"))
    failed = f"of {figures.requests} requests" + (f", {figures.retries} retries" if figures.retries else "")
    cards.append(_key("Failed", _split(str(figures.failed), ""), failed, "wrong" if figures.failed else ""))
    return f'<div class="keys">{"".join(cards)}</div>'


def _key(name: str, big: str, more: str, style: str = "") -> str:
    return (
        f'<div class="card key {style}"><div class="name">{escape(name)}</div><div class="big">{big}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def _split(figure: str, unit: str) -> str:
    return f"{escape(figure)} <small>{escape(unit)}</small>" if unit else escape(figure)


def _time(ms: float) -> str:
    figure, _, unit = format_time(ms).partition(" ")
    return _split(figure, unit)


def _card(title: str, drawn: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    names = "".join(f"<span>{_swatch(style)}{escape(name)}</span>" for name, style in legend)
    head = f'<header><h3>{escape(title)}</h3><div class="legend">{names}</div></header>'
    return f'<div class="card plot">{head}{drawn}</div>'


def _swatch(style: str) -> str:
    return f'<i style="background:var(--{style})"></i>' if style else ""


def _sweep(document: Document) -> str:
    points = document.points
    loads = [float(point.concurrency or 0) for point in points]
    best = document.best
    rates = [(load, point.figures.tokens_per_s) for load, point in zip(loads, points, strict=True)]
    most = max((rate for _, rate in rates), default=1.0)
    plot = Plot(
        "tokens per second by requests in flight",
        category_axis("requests in flight", loads),
        linear_axis("tokens/s", most),
    )
    plot.area(rates, "a")
    plot.dots(rates, "a", 4, lambda x, y: f"{x:.0f} in flight: {format_number(y)} tokens/s")
    if best is not None:
        chosen = (float(best.concurrency or 0), best.figures.tokens_per_s)
        plot.dots([chosen], "best", 7)
        plot.label(*chosen, format_number(best.figures.tokens_per_s), 16)
    rows = [_sweep_row(point, document) for point in points]
    heads = (
        "in flight",
        "tokens/s",
        "requests/s",
        "ttft p50",
        "ttft p99",
        "per token p50",
        "e2e p50",
        "e2e p99",
        "failed",
    )
    return (
        "<h2>The sweep</h2>"
        f'<div class="plots">{_card("Throughput by load", plot.draw())}{_latency_by_load(document, loads)}</div>'
        f'<div class="card wide" style="margin-top:14px">{_table(heads, rows)}</div>'
    )


def _latency_by_load(document: Document, loads: list[float]) -> str:
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for load, point in zip(loads, document.points, strict=True):
        figures = point.figures
        for name, style, spread, key in (
            ("first token (p99 dashed)", "a", figures.ttft_ms, "p50"),
            ("p99", "a dashed", figures.ttft_ms, "p99"),
            ("per token", "b", figures.tpot_ms, "p50"),
            ("end to end", "c", figures.e2e_ms, "p50"),
        ):
            if spread is not None:
                lines.setdefault((name, style), []).append((load, getattr(spread, key)))
    every = [y for points in lines.values() for _, y in points]
    plot = Plot(
        "latency by requests in flight",
        category_axis("requests in flight", loads),
        time_axis("time (log scale)", every),
    )
    for (_, style), points in lines.items():
        plot.line(points, style)
        if "dashed" not in style:
            plot.dots(points, style, 3.5, lambda x, y: f"{x:.0f} in flight: {format_time(y)}")
    shown = [(name, style) for name, style in lines if "dashed" not in style]
    return _card("Latency by load, p50", plot.draw(), shown)


def _sweep_row(point: PointResult, document: Document) -> tuple[str, list[str]]:
    figures = point.figures
    is_best = document.sweep is not None and document.sweep.concurrency == point.concurrency
    cells = [str(point.concurrency), format_number(figures.tokens_per_s), format_number(figures.requests_per_s)]
    for spread, key in (
        (figures.ttft_ms, "p50"),
        (figures.ttft_ms, "p99"),
        (figures.tpot_ms, "p50"),
        (figures.e2e_ms, "p50"),
        (figures.e2e_ms, "p99"),
    ):
        cells.append("–" if spread is None else format_time(getattr(spread, key)))
    return "best" if is_best else "", [*cells, str(figures.failed)]


def _time_section(best: PointResult) -> str:
    series, seconds = best.series, best.figures.seconds
    rates = series.tokens_per_s
    across = linear_axis("seconds since the window opened", seconds)
    rate = Plot("tokens per second by time", across, linear_axis("tokens/s", max((y for _, y in rates), default=1.0)))
    rate.area(rates, "a")
    firsts = [(at, ttft) for at, ttft, _ in series.requests if ttft is not None]
    wholes = [(at, e2e) for at, _, e2e in series.requests]
    clouds = Plot("latency by time", across, time_axis("time (log scale)", [y for _, y in [*firsts, *wholes]]))
    clouds.dots(wholes, "c cloud", 2.4, describe_time_point)
    clouds.dots(firsts, "a cloud", 2.4, describe_time_point)
    clouds.ticks_of_failures(series.failures)
    legend = [("first token", "a")] * bool(firsts) + [("end to end", "c")]
    legend += [("failed", "bad")] * bool(series.failures)
    return (
        f"<h2>Over time <span class='sub'>· {escape(best.load)}</span></h2>"
        f'<div class="plots">{_card("Tokens generated", rate.draw())}'
        f"{_card('Latency of each request', clouds.draw(), legend)}</div>"
    )


def _curves(best: PointResult) -> str:
    cards = []
    for name, title, style in CURVES:
        points = best.series.curves.get(name)
        spread = getattr(best.figures, f"{name}_ms")
        if not points or spread is None:
            continue
        # The outermost half percent would stretch the axis for a single request.
        inner = [x for x, share in points if 0.005 <= share <= 0.995 and x > 0.005] or [x for x, _ in points]
        across = log_axis("at most (log scale)", min(inner), max([*inner, spread.p99]), tick_time)
        plot = Plot(title, across, linear_axis("requests, %" if name != "inter_token" else "tokens, %", 100), 400, 250)
        plot.area([(x, share * 100) for x, share in points], style)
        plot.mark(spread.p50, "p50", "end")
        plot.mark(spread.p99, "p99", "start")
        legend = [(f"p50 {format_time(spread.p50)}", ""), (f"p99 {format_time(spread.p99)}", "")]
        cards.append(_card(title, plot.draw(), legend))
    return f'<h2>Distributions</h2><div class="plots three">{"".join(cards)}</div>' if cards else ""


def _latencies(figures: PointFigures, best: PointResult) -> str:
    rows: list[tuple[str, list[str]]] = []
    for name, key in LATENCIES:
        spread: LatencySummary | None = getattr(figures, key)
        if spread is not None:
            rows.append(("", [name, *(format_time(value) for value in summary_values(spread)), f"{spread.num:,}"]))
    if not rows:
        return ""
    heads = ("latency", "mean", "p50", "p90", "p95", "p99", "max", "values")
    title = f'<h2>Latency <span class="sub">· {escape(best.load)}</span></h2>'
    return f'{title}<div class="card wide">{_table(heads, rows)}</div>'


def _errors(figures: PointFigures) -> str:
    if not figures.errors:
        return ""
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{errors.count}</td>"
        f'<td class="text"><code>{escape(errors.example)}</code></td></tr>'
        for kind, errors in figures.errors.items()
    )
    head = '<tr><th>kind</th><th>count</th><th style="text-align:left">the first one</th></tr>'
    return f'<h2>Errors</h2><div class="card wide"><table>{head}{rows}</table></div>'


def _table(heads: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f'<tr class="{style}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>' for style, cells in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _facts(document: Document, best: PointResult | None) -> str:
    machine = document.machine
    options = {name.replace("_", " "): _value(value) for name, value in document.asked.items()}
    run = _list(
        {
            "model": document.model,
            "endpoint": f"{document.api}, {'streamed' if document.stream else 'whole'}",
            **options,
        }
    )
    where = _list(
        {
            "processor": machine.processor,
            "cores": str(machine.cores),
            "memory": f"{machine.memory_gib:g} GiB",
            "system": f"{machine.system}, Python {machine.python}",
            "client processes": str(document.num_processes),
            "prompt lengths": document.prompt_lengths,
        }
    )
    cards = [
        f'<div class="card"><h3>What was run</h3>{run}</div>',
        f'<div class="card"><h3>Where this tool ran</h3>{where}</div>',
    ]
    if document.ceiling is not None and best is not None:
        cards.append(_ceiling(document, best))
    return f'<h2>The run</h2><div class="facts">{"".join(cards)}</div>'


def _ceiling(document: Document, best: PointResult) -> str:
    ceiling = document.ceiling
    most = ceiling.tokens_per_s if ceiling is not None else 0.0
    share = min(1.0, best.figures.tokens_per_s / most) if most else 0.0
    used = f"<p>Client processes used {', '.join(f'{cpu:.0%}' for cpu in best.cpu)} of a core.</p>" if best.cpu else ""
    return (
        '<div class="card"><h3>This tool’s own ceiling</h3>'
        f'<div class="bar"><i style="width:{max(0.6, share * 100):.1f}%"></i></div>'
        f"<p><b>{format_number(best.figures.tokens_per_s)}</b> of <b>{format_number(most)} tokens/s</b> ({share:.1%}): "
        f"{escape(describe_ceiling(document))}.</p>{used}</div>"
    )


def _notes(document: Document) -> str:
    if not document.notes:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in document.notes)
    return f'<h2>Notes</h2><div class="card"><ul class="notes">{items}</ul></div>'


def _footer(document: Document) -> str:
    return (
        f"<footer>swarm bench {escape(document.version)} · {document.wall_clock_s:.1f} s in all · latencies are "
        "of requests that were due within the window and succeeded; tokens/s are generated tokens that arrived "
        "within it.</footer>"
    )


def _list(facts: dict[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{items}</dl>"


def _option(document: Document, name: str) -> str:
    return str(document.asked.get(name, "?"))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)

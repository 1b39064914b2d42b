"""The report as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from swarm.bench.document import Document, PointResult
from swarm.bench.figures import LatencySummary, PointFigures
from swarm.bench.report.format import format_number, format_time
from swarm.screen import ReportTable

LATENCIES = (
    ("time to first token", "ttft_ms"),
    ("between tokens", "inter_token_ms"),
    ("per token after the first", "tpot_ms"),
    ("end to end", "e2e_ms"),
)


def render_table(document: Document) -> RenderableType:
    """Render a whole run."""
    parts: list[RenderableType] = [Text(f"{document.title}", style="bold"), _header(document), Text()]
    if document.sweep is not None or len(document.points) > 1:
        parts += [_sweep(document), *_verdict(document), Text()]
    if (best := document.best) is not None:
        parts += [Text(f"{best.load}, {best.figures.seconds:g} s", style="bold"), _rates(best, document), Text()]
        parts.append(_latencies(best.figures))
        if best.figures.errors:
            parts += [Text(), _errors(best.figures)]
    else:
        parts.append(Text("nothing was measured"))
    parts += [Text(f"note: {text}", style="yellow") for text in document.notes]
    return Group(*parts)


def summarise_point(result: PointResult) -> str:
    """Summarise a point in one line."""
    figures = result.figures
    first = f", first token {format_time(figures.ttft_ms.p50)}" if figures.ttft_ms else ""
    failed = f", {figures.failed} failed" if figures.failed else ""
    rates = f"{format_number(figures.tokens_per_s)} tokens/s, {format_number(figures.requests_per_s)} requests/s"
    return f"{result.load}: {rates}{first}, {figures.succeeded} ok{failed}"


def _header(document: Document) -> Text:
    how = "streamed" if document.stream else "not streamed"
    processes = f"{document.num_processes} client process{'es' if document.num_processes > 1 else ''}"
    return Text(
        f"{document.model} at {document.url} ({document.api}, {how}), by {processes}; {document.wall_clock_s:.1f} s in "
        f"all\nprompts: {document.asked.get('prompt', '?')} tokens ({document.prompt_lengths}); "
        f"asked for answers of {document.asked.get('output', '?')} tokens",
        style="dim",
    )


def _rates(result: PointResult, document: Document) -> ReportTable:
    figures = result.figures
    table = ReportTable(box=None, show_header=False, padding=(0, 2, 0, 0))
    by = {"usage": "as the server counts", "pieces": "counted by pieces", "mixed": "partly counted by pieces"}
    table.add_row("generated", f"{format_number(figures.tokens_per_s)} tokens/s", by[figures.counted_by])
    table.add_row("answered", f"{format_number(figures.requests_per_s)} requests/s", "")
    if figures.answer_tokens is not None:
        table.add_row("answers", str(figures.answer_tokens), f"{document.asked.get('output', '?')} asked")
    parts = [f"{figures.succeeded} succeeded", f"{figures.failed} failed"]
    if figures.cut:
        parts.append(f"{figures.cut} cut by this tool")
    if figures.retries:
        parts.append(f"{figures.retries} retries")
    table.add_row("requests", f"{figures.requests}", ", ".join(parts))
    if figures.goodput is not None:
        good = figures.goodput
        table.add_row(
            "goodput", f"{format_number(good.requests_per_s)} requests/s", f"{good.share:.1%} met {good.limits}"
        )
    if document.ceiling is not None:
        table.add_row("ceiling", f"{format_number(document.ceiling.tokens_per_s)} tokens/s", describe_ceiling(document))
    if result.cpu:
        table.add_row("this tool", ", ".join(f"{share:.0%}" for share in result.cpu), "of a core, by client process")
    return table


def describe_ceiling(document: Document) -> str:
    """Describe the ceiling."""
    if document.ceiling is None:
        return "not measured"
    ceiling = document.ceiling
    return (
        f"the most that this tool can measure here ({format_number(ceiling.requests_per_s)} requests/s of "
        f"{ceiling.output_tokens} tokens, null server)"
    )


def _latencies(figures: PointFigures) -> ReportTable:
    table = ReportTable(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("latency")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, key in LATENCIES:
        spread: LatencySummary | None = getattr(figures, key)
        if spread is not None:
            table.add_row(name, *(format_time(value) for value in summary_values(spread)))
    return table


def summary_values(spread: LatencySummary) -> tuple[float, ...]:
    return spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max


def _errors(figures: PointFigures) -> ReportTable:
    table = ReportTable(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("errors")
    table.add_column("count", justify="right")
    table.add_column("the first one", overflow="fold")
    for kind, errors in figures.errors.items():
        table.add_row(kind, str(errors.count), Text(errors.example))
    return table


def _sweep(document: Document) -> ReportTable:
    table = ReportTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("in flight", "tokens/s", "requests/s", "ttft p50", "ttft p99", "per token p50", "e2e p99", "failed"):
        table.add_column(name, justify="right")
    for point in document.points:
        figures = point.figures
        is_best = document.sweep is not None and point.concurrency == document.sweep.concurrency
        table.add_row(
            str(point.concurrency),
            format_number(figures.tokens_per_s),
            format_number(figures.requests_per_s),
            _cell(figures.ttft_ms, "p50"),
            _cell(figures.ttft_ms, "p99"),
            _cell(figures.tpot_ms, "p50"),
            _cell(figures.e2e_ms, "p99"),
            str(figures.failed),
            style="bold green" if is_best else None,
        )
    return table


def _cell(spread: LatencySummary | None, name: str) -> str:
    return "–" if spread is None else format_time(getattr(spread, name))


def _verdict(document: Document) -> list[RenderableType]:
    return [] if document.sweep is None else [Text(describe_verdict(document), style="bold")]


def describe_verdict(document: Document) -> str:
    """Describe the load at which the server is saturated."""
    sweep = document.sweep
    if sweep is None:
        return ""
    reason = sweep.reason[:1].upper() + sweep.reason[1:]
    if sweep.concurrency is None:
        return f"No load was served: {sweep.reason}."
    if not sweep.is_saturated:
        return f"{format_number(sweep.tokens_per_s)} tokens/s with {sweep.concurrency} in flight. {reason}."
    return f"Saturated at {sweep.concurrency} in flight: {format_number(sweep.tokens_per_s)} tokens/s. {reason}."

"""Tables of a profile, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.text import Text

from swarm.cli.output import make_console
from swarm.screen import ReportTable
from swarm.wire.messages import LayerRange

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

_PARTS = {
    "queue_s": "queue",
    "wire_s": "wire",
    "wait_s": "waiting in a stage",
    "compute_s": "compute",
    "sample_s": "sampling",
    "broker_s": "broker",
    "unaccounted_s": "unaccounted",
}


def print_profile(result: Mapping[str, Any]) -> None:
    """Print the profile to stdout."""
    out = make_console()
    stages = ", ".join(f"{s['worker']} {LayerRange(*s['layers'])}" for s in result["stages"])
    out.print(f"{result['model']} at {result['url']}: {stages}")
    for title, table in _tables(result):
        out.print(Text(f"\n{title}"))
        out.print(table)


def _tables(result: Mapping[str, Any]) -> Sequence[tuple[str, ReportTable]]:
    typical: tuple[Column, ...] = (
        ("first token", lambda r: _format_ms(r["ttft_s"])),
        ("per token", lambda r: _format_ms(r["per_token_s"])),
        ("in all", lambda r: _format_ms(r["total_s"])),
        ("tokens/s", lambda r: _format_rate(r["tokens_per_s"])),
    )
    prompt: Column = ("prompt tokens/s", lambda r: _format_rate(r["prompt_tokens_per_s"]))
    return (
        ("warm-up (milliseconds)", _warm_up_table(result["warm_up"])),
        ("output lengths", _table([("tokens", lambda r: str(r["tokens"])), *typical], result["output_scaling"])),
        (
            "prompt lengths",
            _table([("prompt", lambda r: f"{r['name']}, {r['prompt']}"), *typical, prompt], result["prompts"]),
        ),
        ("sustained", _sustained_table(result["sustained"])),
        (
            "batches",
            _table(
                [
                    ("together", lambda r: str(r["size"])),
                    ("tokens/s in all", lambda r: _format_rate(r["together_per_s"])),
                    ("against one", lambda r: f"{r['speed_up']:.2f} ×"),
                    ("efficiency", lambda r: f"{100 * r['efficiency']:.0f} %"),
                    *typical[:2],
                ],
                result["batches"],
            ),
        ),
        ("latency of the sustained run (milliseconds)", _latency_table(result["latency"])),
        ("caches", _caches_table(result["caches"])),
        ("where a token's time goes, sustained run", _overhead_table(result["overhead"])),
    )


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> ReportTable:
    table = _empty_table(*(name for name, _ in columns))
    for row in rows:
        table.add_row(*(Text(cell(row)) for _, cell in columns))
    return table


def _warm_up_table(of: Row) -> ReportTable:
    table = _empty_table("", "first token", "in all")
    first = "the first request ever" if of["first_ever"] else "the first request (the swarm ran already)"
    table.add_row(first, _format_ms(of["first_ttft_s"]), _format_ms(of["first_total_s"]))
    table.add_row("later ones like it", _format_ms(of["later_ttft_s"]), _format_ms(of["later_total_s"]))
    table.add_row("the first one's extra", _format_ms(of["extra_s"]), "")
    table.add_row("spared: the stages' warm-up before serving", _format_ms(of["stages_warm_up_s"]), "")
    return table


def _sustained_table(of: Row) -> ReportTable:
    table = _empty_table("runs", "tokens/s", "slowest", "fastest", "deviation", "second half against first")
    rates = (_format_rate(of[key]) for key in ("tokens_per_s", "slowest", "fastest", "deviation"))
    table.add_row(str(of["runs"]), *rates, f"{100 * of['drift']:+.1f} %")
    return table


def _latency_table(of: Row) -> ReportTable:
    table = _empty_table("", "mean", "p50", "p95", "p99")
    for key, name in (("ttft_s", "first token"), ("per_token_s", "per token")):
        table.add_row(name, *(_format_ms(of[key][part]) for part in ("mean", "p50", "p95", "p99")))
    return table


def _caches_table(of: Row) -> ReportTable:
    table = _empty_table("cache", "hits", "misses", "rate")
    for name in ("rope", "mask", "prefix"):
        rate = of[name]["rate"]
        table.add_row(
            name, str(of[name]["hits"]), str(of[name]["misses"]), "–" if rate is None else f"{100 * rate:.1f} %"
        )
    prefix = of["prefix_ttft"]
    cold, again = _format_ms(prefix["cold_s"]), _format_ms(prefix["again_s"])
    table.caption = f"first token of a prompt of {prefix['prompt']}: {cold} ms, again {again} ms"
    table.caption_style, table.caption_justify = "", "left"
    return table


def _overhead_table(of: Row) -> ReportTable:
    table = _empty_table("part", "ms per token", "share")
    for part, name in _PARTS.items():
        if part in of["share"]:
            table.add_row(name, _format_ms(of["per_token_s"][part]), f"{100 * of['share'][part]:.1f} %")
    if of["communication"] is not None:
        table.add_row("communication: queue, wire, broker", "", f"{100 * of['communication']:.1f} %")
    return table


def _empty_table(*headings: str) -> ReportTable:
    table = ReportTable(box=box.SIMPLE)
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if number == 0 else "right")
    return table


def _format_ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f}"


def _format_rate(value: float) -> str:
    return f"{value:.1f}"

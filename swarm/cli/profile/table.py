"""Tables of a profile, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from swarm.cli.output import console
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


def show(result: Mapping[str, Any]) -> None:
    """Print the profile to stdout."""
    out = console()
    stages = ", ".join(f"{s['worker']} {LayerRange(*s['layers'])}" for s in result["stages"])
    out.print(f"{result['model']} at {result['url']}: {stages}")
    for title, table in _tables(result):
        out.print(Text(f"\n{title}"))
        out.print(table)


def _tables(result: Mapping[str, Any]) -> Sequence[tuple[str, Table]]:
    typical: tuple[Column, ...] = (
        ("first token", lambda r: _ms(r["ttft_s"])),
        ("per token", lambda r: _ms(r["per_token_s"])),
        ("in all", lambda r: _ms(r["total_s"])),
        ("tokens/s", lambda r: _rate(r["tokens_per_s"])),
    )
    prompt: Column = ("prompt tokens/s", lambda r: _rate(r["prompt_tokens_per_s"]))
    return (
        ("warm-up (milliseconds)", _warm_up(result["warm_up"])),
        ("output lengths", _table([("tokens", lambda r: str(r["tokens"])), *typical], result["output_scaling"])),
        (
            "prompt lengths",
            _table([("prompt", lambda r: f"{r['name']}, {r['prompt']}"), *typical, prompt], result["prompts"]),
        ),
        ("sustained", _sustained(result["sustained"])),
        (
            "batches",
            _table(
                [
                    ("together", lambda r: str(r["size"])),
                    ("tokens/s in all", lambda r: _rate(r["together_per_s"])),
                    ("against one", lambda r: f"{r['speed_up']:.2f} ×"),
                    ("efficiency", lambda r: f"{100 * r['efficiency']:.0f} %"),
                    *typical[:2],
                ],
                result["batches"],
            ),
        ),
        ("latency of the sustained run (milliseconds)", _latency(result["latency"])),
        ("caches", _caches(result["caches"])),
        ("where a token's time goes, sustained run", _overhead(result["overhead"])),
    )


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = _empty(*(name for name, _ in columns))
    for row in rows:
        table.add_row(*(Text(cell(row)) for _, cell in columns))
    return table


def _warm_up(of: Row) -> Table:
    table = _empty("", "first token", "in all")
    first = "the first request ever" if of["first_ever"] else "the first request (the swarm ran already)"
    table.add_row(first, _ms(of["first_ttft_s"]), _ms(of["first_total_s"]))
    table.add_row("later ones like it", _ms(of["later_ttft_s"]), _ms(of["later_total_s"]))
    table.add_row("the first one's extra", _ms(of["extra_s"]), "")
    table.add_row("spared: the stages' warm-up before serving", _ms(of["stages_warm_up_s"]), "")
    return table


def _sustained(of: Row) -> Table:
    table = _empty("runs", "tokens/s", "slowest", "fastest", "deviation", "second half against first")
    rates = (_rate(of[key]) for key in ("tokens_per_s", "slowest", "fastest", "deviation"))
    table.add_row(str(of["runs"]), *rates, f"{100 * of['drift']:+.1f} %")
    return table


def _latency(of: Row) -> Table:
    table = _empty("", "mean", "p50", "p95", "p99")
    for key, name in (("ttft_s", "first token"), ("per_token_s", "per token")):
        table.add_row(name, *(_ms(of[key][part]) for part in ("mean", "p50", "p95", "p99")))
    return table


def _caches(of: Row) -> Table:
    table = _empty("cache", "hits", "misses", "rate")
    for name in ("rope", "mask", "prefix"):
        rate = of[name]["rate"]
        table.add_row(
            name, str(of[name]["hits"]), str(of[name]["misses"]), "–" if rate is None else f"{100 * rate:.1f} %"
        )
    prefix = of["prefix_ttft"]
    table.caption = (
        f"first token of a prompt of {prefix['prompt']}: {_ms(prefix['cold_s'])} ms, again {_ms(prefix['again_s'])} ms"
    )
    table.caption_style, table.caption_justify = "", "left"
    return table


def _overhead(of: Row) -> Table:
    table = _empty("part", "ms per token", "share")
    for part, name in _PARTS.items():
        if part in of["share"]:
            table.add_row(name, _ms(of["per_token_s"][part]), f"{100 * of['share'][part]:.1f} %")
    if of["communication"] is not None:
        table.add_row("communication: queue, wire, broker", "", f"{100 * of['communication']:.1f} %")
    return table


def _empty(*headings: str) -> Table:
    table = Table(box=box.SIMPLE)
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if number == 0 else "right")
    return table


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f}"


def _rate(value: float) -> str:
    return f"{value:.1f}"

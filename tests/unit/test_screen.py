"""Tables of every command in windows of 80 and of 200 columns, with long names: nothing is cut, no line is too wide."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rich import box
from rich.console import Group, RenderableType

from swarm.admin.orders import standby_report
from swarm.bench.report.table import render_table
from swarm.cli.doctor.checks import Finding
from swarm.cli.doctor.command import format_finding
from swarm.cli.meta.show import format_settings
from swarm.cli.profile.table import _tables
from swarm.cli.systemd.command import _render_units
from swarm.ctl import render, render_keys, render_trace
from swarm.ctl.inspect.versions import render_versions
from swarm.ctl.stats import render_stats
from swarm.ctl.stats_summary import render_summary
from swarm.screen import ReportConsole, ReportTable
from tests.unit.bench.test_report import SWEPT, VERDICT, document

NAME = "build-server-07.rack3.example"  # of a host, and the beginning of its worker's name
W0, W1 = f"{NAME}-w0", f"{NAME}-w1"
KEY = "3p0ALvqRzv4Xv8oPkXyXQmBLYuUjnCkfdNbLC7r0pUw="
URL = "tcp://build-server-07.rack3.example:5701"
REQUEST = "f85facadb8fbc556afba6b3086adf086"
MODEL = "/srv/models/Llama-3.3-70B-Instruct-Q4_K_M/model.gguf"


def worker(name: str, **changed: object) -> dict[str, Any]:
    return {
        "name": name,
        "state": "member",
        "steered": "cordoned",
        "layers": [10, 12],
        "device": "cuda:0",
        "standby": [[8, 10], [12, 14]],
        "verdict": "quarantined",
        "verdict_for_s": 119.0,
        "pace": 1.596,
        "kv_used": 123456,
        "kv_capacity": 954304,
        "memory_bytes": 5593 << 20,
        "resident_bytes": 419 << 20,
        "host": NAME,
        "pid": 123456,
        "evidence": f"no heartbeat from {URL} for 1.9 s, and its connection was reset by the other side",
        "kernels": "own kernels, variant avx512_bf16 amx, int4 weights",
        "field_of_a_newer_broker": 17,
    } | changed


STAGE = {
    "layers": [0, 40],
    "weight_bytes": 5 << 30,
    "kv_capacity": 954304,
    "predicted_s": 0.0123,
    "hop_s": 0.00012,
    "expected_s": 0.0122,
    "seen_s": 0.0121,
    "seen_steps": 123456,
    "kernels": "own kernels, variant avx512_bf16 amx",
}
COMING = {"needed_bytes": 5 << 30, "memory_bytes": 6 << 30, "kv_positions": 9, "load_s": 7.5, "warm_up_s": 1.5}
ROW = {
    "request_id": REQUEST,
    "state": "running",
    "num_prompt": 12345,
    "num_prompt_computed": 12345,
    "num_tokens": 1234,
    "max_tokens": 4096,
    "age_s": 123.4,
    "n": 2,
    "class": "interactive",
    "tenant": "team-of-translators",
    "attached": True,
}
FIGURES = {"average": 123.4, "last": 1234, "most": 12345, "total": 123456789}
HISTOGRAM = {"bounds": [0.01, 0.1, 1.0], "counts": [5, 4, 1, 0], "total": 1.0}
RECOVERY = {
    "epoch": 4,
    "evidence": f"{W0} closed its connection",
    "choice": f"{W1} takes over layers 0–39, which it keeps warm",
    "predicted": dict.fromkeys(("detect_s", "plan_s", "load_s", "activate_s", "replay_s", "resume_s", "total_s"), 12.5),
    "measured": dict.fromkeys(("detect_s", "plan_s", "load_s", "activate_s", "replay_s", "resume_s", "total_s"), 12.5),
}
SUMS = {f"{part}_s": 0.1 for part in ("queue", "wire", "wait", "compute", "sample", "broker", "unaccounted", "total")}
TIMES = {"worker": W0, "layers": [0, 40], "wait_s": 0.01, "compute_s": 0.1, "sample_s": 0.0, "wire_bytes": 123456}
TRACE = {
    "request_id": REQUEST,
    "sequences": [
        {
            "sums": SUMS,
            "stages": [TIMES, {**TIMES, "worker": W1}],
            "tokens": [{"index": 0, **SUMS, "stages": [TIMES, {**TIMES, "worker": W1}]}],
        }
    ],
}
SPREAD = {"mean": 0.0123, "p50": 0.0123, "p95": 0.0123, "p99": 0.0123}
TYPICAL = {
    "ttft_s": 0.123,
    "per_token_s": 0.0123,
    "total_s": 1.234,
    "tokens_per_s": 81.3,
    "prompt_tokens_per_s": 1234.5,
}
PROFILE: dict[str, Any] = {
    "warm_up": {"first_ever": False, "extra_s": 0.1, "stages_warm_up_s": 1.5}
    | {f"{when}_{what}_s": 0.123 for when in ("first", "later") for what in ("ttft", "total")},
    "output_scaling": [{"tokens": 64, **TYPICAL}],
    "prompts": [{"name": "long", "prompt": 4096, **TYPICAL}],
    "sustained": {"runs": 5, "tokens_per_s": 81.3, "slowest": 80.0, "fastest": 82.0, "deviation": 0.5, "drift": 0.01},
    "batches": [{"size": 16, "together_per_s": 812.3, "speed_up": 9.87, "efficiency": 0.61, **TYPICAL}],
    "latency": {"ttft_s": SPREAD, "per_token_s": SPREAD},
    "caches": {name: {"rate": 0.5, "hits": 123456, "misses": 123456} for name in ("rope", "mask", "prefix")}
    | {"prefix_ttft": {"prompt": 512, "cold_s": 0.2, "again_s": 0.02}},
    "overhead": {"share": SUMS, "per_token_s": SUMS, "communication": 0.3},
}
UNIT = {
    "Id": f"swarm-worker@{NAME}.service",
    "ActiveState": "activating",
    "SubState": "auto-restart",
    "NRestarts": "12",
    "StatusText": "layers 0–39 of 80, at tcp://10.0.0.17:5701",
}
SETTINGS: list[Any] = [{"name": "broker.model", "value": MODEL, "from": "the file /etc/swarm/swarm.toml"}]

REPORTS: Mapping[str, tuple[RenderableType, tuple[str, ...]]] = {
    "status": (render.status({"state": "serving", "model": MODEL, "url": URL, "key": KEY}), (MODEL, URL, KEY)),
    "nodes": (render.nodes({"workers": [worker(W0), worker(W1)]}), (W0, W1, URL)),
    "standby": (render.standby(standby_report({"workers": [worker(W0), worker(W1)]})), (W0, W1)),
    "plan": (
        render.plan(
            {
                "epoch": 3,
                "stages": [{"worker": W0, **STAGE}, {"worker": W1, **STAGE}],
                "coming": {"epoch": 4, "stages": [{"worker": W0, "layers": [0, 40], **COMING}]},
                "why": [f"{W0} and {W1} are the only workers with memory for the model"],
            }
        ),
        (W0, W1),
    ),
    "requests": (render.requests({"requests": [ROW], "kept": [{**ROW, "ended_age_s": 12.5}]}), (REQUEST,)),
    "recoveries": (render.recoveries({"recoveries": [RECOVERY]}), (W0, W1)),
    "stats": (render_summary({"pipeline": {"tokens": 123456789}}), ("123456789",)),
    "stats --all": (
        render_stats(
            {
                "pipeline": {"steps": 123456789, "microseconds": {"step": FIGURES}},
                "stages": {name: {"steps": 123456789, "sizes": {"rows": FIGURES}} for name in (W0, W1)},
                "histograms": {"first_token_s": HISTOGRAM},
            }
        ),
        (W0, W1, "123,456,789"),
    ),
    "trace": (render_trace.trace(TRACE), (REQUEST, W0, W1)),
    "version": (
        render_versions(
            {
                "processes": [
                    {
                        "process": W0,
                        "version": "0.9.0+g9f8e7d6c5b",
                        "protocol": [8, 9, 10],
                        "messages": KEY,
                        "unlike": [],
                    }
                ]
            }
        ),
        (W0, KEY),
    ),
    "keys": (
        render_keys.keys(
            {
                "keys": [{"name": "translators", "created_at": "2026-11-28 10:00", "limits": "60 requests a minute"}],
                "members": [{"name": NAME, "role": "worker", "key": KEY, "address": URL, "age_s": 7e4}],
                "invitations": [{"name": NAME, "role": "client", "key": KEY, "expires_in_s": 1234.0}],
            }
        ),
        (NAME, KEY, URL),
    ),
    "keys memberships": (
        render_keys.memberships({"key": KEY, "joined": [{"name": NAME, "broker": KEY, "addresses": [URL, URL]}]}),
        (NAME, KEY, URL),
    ),
    "profile": (Group(*(table for _, table in _tables(PROFILE))), ("123456",)),
    "bench": (render_table(document(*SWEPT, sweep=VERDICT)), ("tokens/s",)),
    "systemd status": (_render_units([UNIT]), (UNIT["Id"], "activating")),
}


def drawn(what: RenderableType, width: int) -> str:
    shown = io.StringIO()
    ReportConsole(file=shown, width=width).print(what)
    return shown.getvalue()


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_fits_the_window_and_cuts_nothing(name: str, width: int) -> None:
    what, words = REPORTS[name]
    text = drawn(what, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert set(words) <= {word.strip(",.;:") for word in text.split()}


@pytest.mark.parametrize(
    "lines",
    [
        lambda width: format_finding(
            Finding("worker", "note", f"{W0} {URL} " + "is slow " * 40, "do this " * 40), width
        ),
        lambda width: format_settings(SETTINGS, [], width),
    ],
    ids=["doctor", "config show"],
)
@pytest.mark.parametrize("width", [80, 200])
def test_lines_without_columns_fit_too(lines: Callable[[int], list[str]], width: int) -> None:
    text = "\n".join(lines(width))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert W0 in text or MODEL in text


def test_columns_are_omitted_before_a_table_becomes_records() -> None:
    """The omitted ones are named; the records have all of them."""
    table = ReportTable("worker", "state", "memory", "process", optional=("process", "memory"), box=box.SIMPLE)
    table.add_row("w0", "member", "1.5 GiB of 2.0 GiB", f"1234 on {NAME}")
    assert "omitted" not in drawn(table, 90)
    assert drawn(table, 50).splitlines()[-1] == "omitted in this window: process (--json has them)"
    assert drawn(table, 15).split("\n") == [
        "worker: w0",
        "state: member",
        "memory: 1.5 GiB",
        "of 2.0 GiB",
        f"process: 1234 on {NAME}",
        "",
        "",
    ]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("width", [20, 32, 40, 60, 80])
def test_no_window_is_so_narrow_that_a_word_is_broken(width: int, is_dense: bool) -> None:
    """An id that is longer than the window is on one line, which the terminal wraps."""
    table = ReportTable("worker", "request", "deadline", "at most", box=box.SIMPLE, collapse_padding=is_dense)
    table.add_row("w0", REQUEST, "no", "333 MiB of 5.3 GiB")
    text = drawn(table, width)
    assert {REQUEST, "333", "MiB"} <= set(text.split())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= max(width, len("request: ") + len(REQUEST))

"""Reports of a document: the table, the page, what is said about figures that must not be believed blindly."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from typing import ClassVar

import pytest
from rich.console import Console

from swarm.bench.document import Ceiling, Document, MachineInfo, PointResult, build_notes, without_series
from swarm.bench.figures import compute_figures, compute_series
from swarm.bench.plan import LatencyLimits
from swarm.bench.records import GapHistogram, PointRecords, RequestTiming
from swarm.bench.report.format import format_number, format_time, log_ticks, ticks
from swarm.bench.report.page import render_page
from swarm.bench.report.table import render_table
from swarm.bench.sweep import SweepVerdict


def result(concurrency: int | None = 4, *, failed: int = 0, cpu: float = 0.2, rate: float | None = None) -> PointResult:
    records = []
    for n in range(20):
        made = RequestTiming(n, n / 10, n / 10, n / 10 + 0.5, n / 10 + 0.1, num_tokens=5, num_pieces=5, pieces_inside=5)
        made.has_usage, made.prompt_tokens = True, 12
        if n < failed:
            made.outcome, made.detail = "http_500", "<b>burnt</b>"
        records.append(made)
    gaps = GapHistogram()
    gaps.add_all([(0.1, 1)] * 80)
    gathered = PointRecords(records, gaps, {0: 40, 1: 60})
    return PointResult(
        concurrency,
        rate,
        compute_figures(gathered, 2.0, LatencyLimits(ttft=0.5)),
        compute_series(gathered, 2.0, 1.0),
        [cpu],
    )


def document(*points: PointResult, sweep: SweepVerdict | None = None) -> Document:
    return Document(
        version="1",
        title="A <test> & more",
        started_at="2026-01-01T00:00:00+00:00",
        url="http://h/v1",
        model="<m>",
        api="chat",
        stream=True,
        asked={"prompt": "128", "output": "64", "extra": {"ignore_eos": True}},
        num_processes=1,
        machine=MachineInfo("cpu", 2, 8.0, "Linux", "3"),
        prompt_lengths="calibrated",
        ceiling=Ceiling(50_000.0, 400.0, 32, 64, 1, 2.0),
        points=list(points),
        sweep=sweep,
    )


def table(of: Document) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(render_table(of))
    return out.getvalue()


SWEPT = (result(1), result(2), result(4))
VERDICT = SweepVerdict(2, 50.0, "4 in flight bring +1.0%", True)


class Checker(HTMLParser):
    """Counts what is opened and closed, and collects what points outside."""

    VOID: ClassVar[set[str]] = {"meta", "br", "link", "img"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}" for name, value in attrs if name in ("src", "href") and value]
        if tag in ("script", "link", "img", "iframe"):
            self.outside.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "of",
    [
        document(),
        document(result()),
        document(result(failed=5)),
        document(*SWEPT, sweep=VERDICT),
        document(result(failed=20)),
    ],
    ids=["nothing", "one", "errors", "sweep", "all-failed"],
)
def test_a_page_is_whole_and_needs_nothing_from_outside(of: Document) -> None:
    checker, text = Checker(), render_page(of)
    checker.feed(text)
    assert not checker.open
    assert not checker.outside
    assert "url(" not in text
    assert "@import" not in text
    assert "nan" not in text.lower().replace("nano", "")
    assert "A <test> & more" in checker.text  # and not as markup
    assert "<m>" in checker.text


def test_a_page_shows_key_figures_plots_with_axes_errors_machine_and_ceiling() -> None:
    checker = Checker()
    checker.feed(render_page(document(result(failed=5))))
    for wanted in ("tokens/s", "seconds since the window opened", "time (log scale)", "requests, %", "http_500"):
        assert wanted in checker.text
    for wanted in ("<b>burnt</b>", "50,000 tokens/s", "cpu", "ignore_eos", "calibrated", "p99"):
        assert wanted in checker.text


def test_a_sweeps_page_and_table_show_each_load_and_where_it_is_full() -> None:
    of = document(*SWEPT, sweep=VERDICT)
    checker = Checker()
    checker.feed(render_page(of))
    for text in (checker.text, table(of)):
        assert "Saturated at 2 in flight" in text
        assert "in flight" in text
    assert "requests in flight" in checker.text
    assert of.best is SWEPT[1]


def test_the_table_has_every_figure_that_is_asked_of_a_report() -> None:
    text = table(document(result(failed=2)))
    for wanted in (
        *("answers", " 5 tokens ", "64 asked"),
        *("mean", "p50", "p90", "p95", "p99", "time to first token", "between tokens", "end to end", "tokens/s"),
        *("requests/s", "18 succeeded", "2 failed", "goodput", "ceiling", "http_500", "in all"),
    ):
        assert wanted in text


def test_the_document_is_json_with_the_same_figures() -> None:
    told = json.loads(json.dumps(without_series(document(result(failed=2)))))
    found = told["points"][0]["figures"]
    assert found["errors"]["http_500"]["count"] == 2
    assert set(found["ttft_ms"]) == {"num", "mean", "p50", "p90", "p95", "p99", "max"}
    assert {"wall_clock_s", "ceiling", "machine", "asked", "ended", "notes"} <= set(told)


def test_figures_that_must_not_be_believed_blindly_are_named() -> None:
    """A busy client, a near ceiling, few requests, no success, an early end: each has its note."""
    assert any("of a core" in note for note in build_notes(document(result(cpu=0.95))))
    assert any("p99 is based on 20 requests" in note for note in build_notes(document(result())))
    assert any("no request succeeded" in note for note in build_notes(document(result(failed=20))))
    near = document(result())
    near.ceiling = Ceiling(60.0, 4.0, 32, 64, 1, 2.0)
    assert any("may be faster" in note for note in build_notes(near))
    early = document(result())
    early.ended = "interrupted"
    assert "Ctrl-C" in build_notes(early)[0]


@pytest.mark.parametrize(
    ("ms", "text"), [(0.314, "0.31 ms"), (12.44, "12.4 ms"), (456.2, "456 ms"), (1234, "1.23 s"), (99_999, "100.0 s")]
)
def test_times_have_three_figures_and_a_unit(ms: float, text: str) -> None:
    assert format_time(ms) == text


@pytest.mark.parametrize(("value", "text"), [(0.534, "0.53"), (17.23, "17.2"), (1234.5, "1,234"), (8, "8")])
def test_numbers_have_as_many_digits_as_mean_something(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("most", [0.003, 1, 7, 99, 1234, 5_000_000])
def test_ticks_are_few_and_hold_the_greatest(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] >= most * 0.999
    assert 3 <= len(found) <= 8


@pytest.mark.parametrize(("least", "most"), [(0.3, 0.4), (1, 1), (0.02, 5000), (7, 12)])
def test_logarithmic_ticks_hold_both_ends(least: float, most: float) -> None:
    found = log_ticks(least, most)
    assert len(found) >= 2
    assert found[0] <= least * 1.0001
    assert found[-1] >= most * 0.9999
    assert found == sorted(set(found))

"""The short form of ``swarmctl stats``."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.broker.reports.statistics import PipelineStatistics, RequestLatencies
from swarm.ctl.stats_summary import quantile, summary_rows

HISTOGRAM = {"bounds": [0.01, 0.1, 1.0], "counts": [5, 4, 1, 0], "total": 1.0}
REPORT: dict[str, Any] = {
    "pipeline": {
        "running": 2,
        "queued": 3,
        "tokens": 80,
        "workers_lost": 1,
        "sizes": {"rows": {"average": 1.5, "last": 1, "most": 2, "total": 80}},
    },
    "scheduler": {"tokens_per_s": 230.9, "kv_used": 16, "kv_cached": 32, "kv_capacity": 4096, "preemptions": 0},
    "requests": {
        "ended": {"failed": 1, "cancelled": 0, "length": 2, "stop": 4},
        "prompt_tokens": 10,
        "cached_prompt_tokens": 4,
    },
    "recoveries": {"ended": 1, "under_way": 1},
    "histograms": dict.fromkeys(("first_token_s", "between_tokens_s", "request_s", "step_s", "queue_s"), HISTOGRAM),
}
SPREAD = "half below 10.0 ms, 95 % below 1.0 s"


def test_an_operators_figures() -> None:
    assert list(summary_rows(REPORT)) == [
        ("sequences", "2 running, 3 queued"),
        ("tokens/s", "230.9"),
        ("tokens", "80"),
        ("requests ended", "6 complete, 0 cancelled, 1 failed"),
        ("prompt tokens", "10 in all, 4 cached"),
        ("time to first token", SPREAD),
        ("time between tokens", SPREAD),
        ("time of a request", SPREAD),
        ("time of a step", SPREAD),
        ("sequences in a step", "1.5"),
        ("KV positions", "16 used, 32 cached, 4096 in all"),
        ("preemptions", "0"),
        ("recoveries", "1, one under way"),
        ("workers lost", "1"),
    ]


def test_a_broker_reports_these_names() -> None:
    """The figures of steps and requests stand where the summary reads them."""
    latencies = RequestLatencies()
    steps = PipelineStatistics()
    report: dict[str, Any] = {
        "pipeline": steps.report(),
        "requests": latencies.counts(),
        "histograms": latencies.histograms() | steps.histograms(),
    }
    assert list(report["histograms"]["step_s"]) == list(HISTOGRAM)
    assert [name for name, _ in summary_rows(report)] == ["requests ended", "prompt tokens", "sequences in a step"]
    for key in ("first_token_s", "between_tokens_s", "request_s", "step_s"):
        report["histograms"][key]["counts"][0] = 1
    assert len(list(summary_rows(report))) == 7


@pytest.mark.parametrize(
    "report",
    [
        {},
        dict.fromkeys(REPORT, 5),
        {"histograms": {"step_s": {"counts": [0, 0], "bounds": [1.0], "total": 0.0}}},
        {"histograms": {"step_s": {"counts": 5, "bounds": 5}}},
        {"scheduler": {"tokens_per_s": "many"}},
        {"recoveries": {"under_way": 1}},
    ],
)
def test_what_a_report_lacks_has_no_line(report: dict[str, Any]) -> None:
    assert list(summary_rows(report)) == []


def test_a_value_beyond_the_last_bound() -> None:
    above = {"histograms": {"step_s": {"bounds": [0.5], "counts": [1, 1], "total": 9.0}}}
    assert list(summary_rows(above)) == [("time of a step", "half below 500.0 ms, 95 % above 500.0 ms")]
    assert quantile([1, 1], [0.5], 0.5) == 0.5
    assert quantile([1, 1], [0.5], 0.51) is None

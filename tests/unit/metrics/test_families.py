"""Metrics made of reports: where values stand, what a missing one means, and the catalogue's own rules."""

from __future__ import annotations

import re

import pytest
from prometheus_client.core import Metric

from swarm.metrics.catalogue import FIGURES, UP, VERDICTS, combine_reports
from swarm.metrics.collectors import MetricSpec, ReportPath, build_metric
from swarm.series import Histogram


def values(metric: Metric | None) -> dict[tuple[str, ...], float]:
    assert metric is not None
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples}


def test_a_star_is_a_label() -> None:
    """Of a whole key, or of a part of one; two stars are two labels."""
    whole = MetricSpec("swarm_a_total", "counter", "A", (ReportPath("stages.*.steps", ("*",)),), ("worker",))
    assert values(build_metric(whole, {"stages": {"w0": {"steps": 3}, "w1": {"steps": 4}}})) == {("w0",): 3, ("w1",): 4}
    part = MetricSpec("swarm_b_total", "counter", "B", (ReportPath("rejected_*", ("*",)),), ("reason",))
    assert values(build_metric(part, {"rejected_overloaded": 2, "rejected_": 5, "other": 1})) == {("overloaded",): 2}
    two = MetricSpec("swarm_c", "gauge", "C", (ReportPath("w.*.*", ("*", "*")),), ("worker", "verdict"))
    assert values(build_metric(two, {"w": {"w0": {"well": 1}}})) == {("w0", "well"): 1}


def test_what_was_never_counted_is_zero_and_what_is_not_known_is_left_out() -> None:
    counter = MetricSpec("swarm_a_total", "counter", "A", (ReportPath("pipeline.tokens"),))
    gauge = MetricSpec("swarm_b", "gauge", "B", (ReportPath("pipeline.pace"),))
    assert values(build_metric(counter, {"pipeline": {}})) == {(): 0}
    assert build_metric(gauge, {"pipeline": {}}) is None
    assert build_metric(gauge, {"pipeline": {"pace": None}}) is None
    assert build_metric(counter, {}) is None  # nothing is known of what it belongs to


def test_units_are_base_units() -> None:
    figure = MetricSpec("swarm_a_seconds_total", "counter", "A", (ReportPath("us"),), (), 1e-6)
    assert values(build_metric(figure, {"us": 2_500_000})) == {(): 2.5}


def test_a_bucket_holds_all_below_it() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 7.0):
        histogram.add(value)
    made = build_metric(MetricSpec("swarm_a_seconds", "histogram", "A", (ReportPath("a"),)), {"a": histogram.report()})
    assert made is not None
    found = {(s.name, s.labels.get("le")): s.value for s in made.samples}
    assert found["swarm_a_seconds_bucket", "0.1"] == 1
    assert found["swarm_a_seconds_bucket", "1.0"] == 3
    assert found["swarm_a_seconds_bucket", "+Inf"] == found["swarm_a_seconds_count", None] == 4
    assert found["swarm_a_seconds_sum", None] == pytest.approx(8.15)


def test_of_two_workers_with_one_name_the_living_one_is_told() -> None:
    """Labels must not come twice; the order in which the broker lists them does not matter."""
    dead = {"name": "w0", "state": "out", "verdict": "dead", "layers": None, "lies": 3}
    alive = {"name": "w0", "state": "member", "verdict": "well", "layers": [2, 5], "lies": 0}
    for rows in ([dead, alive], [alive, dead]):
        worker = combine_reports({"nodes": {"workers": rows}})["workers"]["w0"]  # type: ignore[index]
        assert (worker["up"], worker["num_layers"], worker["first_layer"], worker["lies"]) == (1, 3, 2, 0)
        assert [name for name in VERDICTS if worker["verdicts"][name]] == ["well"]
    gone = combine_reports({"nodes": {"workers": [dead]}})["workers"]["w0"]  # type: ignore[index]
    assert (gone["up"], "lies" in gone) == (0, False)


@pytest.mark.parametrize("figure", [UP, *FIGURES], ids=lambda figure: figure.name)
def test_names_follow_the_rules(figure: MetricSpec) -> None:
    """Prometheus' own: a prefix, base units, ``_total`` for counters alone, a text; and bounded labels."""
    assert re.fullmatch(r"swarm_[a-z][a-z_]*", figure.name)
    assert figure.name.endswith("_total") == (figure.kind == "counter")
    assert not re.search(r"_(us|ms|microseconds|milliseconds|kib|mib|s)(_|$)", figure.name)
    assert figure.text
    assert not figure.text.endswith(".")
    assert set(figure.labels) <= {
        "worker",
        "verdict",
        "direction",
        "part",
        "door",
        "reason",
        "outcome",
        "proposer",
        "position",
    }
    assert all(len(source.labels) == len(figure.labels) for source in figure.sources)


def unit_of(path: str) -> float:
    """How many seconds one of what stands at this place of a report is; 0 if it is no time."""
    if ".microseconds." in path:
        return 1e-6
    return 1.0 if path.endswith("_s") else 0.0


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figures_scale_is_its_places_unit(figure: MetricSpec) -> None:
    """What the broker reports in microseconds is told in seconds, and all that is called seconds is some."""
    units = {unit_of(source.path) for source in figure.sources}
    assert len(units) == 1
    unit = units.pop()
    assert ("_seconds" in figure.name) == (unit > 0)
    assert figure.scale == (unit or 1.0)


def test_no_name_comes_twice() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(names) == len(set(names))


def test_all_verdicts_are_listed() -> None:
    from swarm.broker.members.health import Verdict

    assert {verdict.value for verdict in Verdict} == set(VERDICTS)

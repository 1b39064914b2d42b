"""Rates, medians and series, from counters that only grow."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.gateway.console.recent_metrics import SERIES_S, RecentMetrics, median, round_digits


def stats(tokens: int, *, steps: int = 0, positions: int = 0, first: list[int] | None = None) -> dict[str, Any]:
    spread = {"bounds": [0.1, 0.2], "counts": first or [0, 0, 0]}
    return {
        "pipeline": {"tokens": tokens, "steps": steps, "positions": positions, "queued": 2, "running": 1},
        "histograms": {"first_token_s": spread, "between_tokens_s": {"bounds": [1.0], "counts": [0, 0]}},
    }


def test_a_rate_is_that_of_the_last_seconds() -> None:
    figures = RecentMetrics()
    for at in range(11):  # ten tokens a second, then none
        figures.add(stats(min(at, 5) * 10, steps=at, positions=at * 30), float(at))
    assert figures.rates["tokens_per_s"] == 0.0
    assert figures.rates["steps_per_s"] == 1.0
    assert (figures.rates["queued"], figures.rates["running"]) == (2, 1)


def test_two_reports_at_nearly_the_same_moment_make_no_rate() -> None:
    """One that was late comes just before the next: what is between them says nothing of speed."""
    figures = RecentMetrics()
    figures.add(stats(0), 0.0)
    figures.add(stats(100), 0.01)
    assert figures.rates["tokens_per_s"] == 0.0
    figures.add(stats(100), 1.0)
    assert figures.rates["tokens_per_s"] == 100.0


def test_prompt_tokens_are_the_positions_that_gave_no_token() -> None:
    figures = RecentMetrics()
    figures.add(stats(0), 0.0)
    figures.add(stats(10, positions=110), 2.0)
    assert figures.rates["prompt_tokens_per_s"] == 50.0


def test_another_life_of_the_broker_begins_anew() -> None:
    figures = RecentMetrics()
    figures.add(stats(1000), 0.0)
    figures.add(stats(10), 1.0)
    assert figures.rates["tokens_per_s"] == 0.0
    figures.add(stats(30), 2.0)
    assert figures.rates["tokens_per_s"] == 20.0


def test_what_was_before_nobody_looked_is_not_of_late() -> None:
    figures = RecentMetrics()
    figures.add(stats(0, first=[0, 0, 0]), 0.0)
    figures.add(stats(36_000, first=[9, 0, 0]), 3600.0)
    assert (figures.rates["tokens_per_s"], figures.rates["first_token_s"]) == (0.0, None)
    figures.add(stats(36_010, first=[9, 1, 0]), 3601.0)
    assert (figures.rates["tokens_per_s"], figures.rates["first_token_s"]) == (10.0, 0.15)


def test_a_median_is_of_late() -> None:
    """What was long ago, or before anybody looked, doesn't count."""
    figures = RecentMetrics()
    figures.add(stats(0, first=[100, 0, 0]), 0.0)
    assert figures.rates["first_token_s"] is None
    figures.add(stats(0, first=[100, 10, 0]), 1.0)
    assert figures.rates["first_token_s"] == 0.15
    for at in range(2, 40):
        figures.add(stats(0, first=[100, 10, 0]), float(at))
    assert figures.rates["first_token_s"] is None


@pytest.mark.parametrize(
    ("counts", "found"), [([0, 0, 0], None), ([4, 0, 0], 0.05), ([1, 3, 0], 0.133), ([0, 0, 5], 0.2), ([], None)]
)
def test_medians_lie_within_their_bucket(counts: list[int], found: float | None) -> None:
    assert median([0.1, 0.2], counts) == found


def test_series_have_a_point_a_second_and_an_end() -> None:
    figures = RecentMetrics()
    figures.tick(5.0)
    assert figures.series(5.0)["at"] == []
    figures.add(stats(0), 0.0)
    for tenth in range(100 * 10):
        figures.tick(1000 + tenth / 10)
    for at in range(1100, 1100 + SERIES_S):
        figures.tick(float(at))
    series = figures.series(1100.0 + SERIES_S - 1)
    assert series["at"] == list(range(1100, 1100 + SERIES_S))
    assert set(series) == {"at", "tokens_per_s", "first_token_s", "between_tokens_s", "queued"}
    assert figures.series(5000.0)["at"] == []


def test_reports_of_other_builds_are_read_as_far_as_they_go() -> None:
    figures = RecentMetrics()
    figures.add({}, 0.0)
    figures.add({"pipeline": [], "histograms": {"first_token_s": 3}}, 1.0)
    assert figures.rates["tokens_per_s"] == 0.0


def test_small_changes_are_no_news() -> None:
    assert round_digits(1234.5) == round_digits(1230.2) == 1230.0
    assert round_digits(0.0) == 0.0

"""Figures of records: percentiles, windows, goodput, errors; and where a sweep finds its end."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.bench.figures import compute_figures, compute_series, percentile, summarise, summarise_histogram
from swarm.bench.plan import LatencyLimits
from swarm.bench.records import CUT, GapHistogram, PointRecords, RequestTiming
from swarm.bench.sweep import SweepPoint, SweepVerdict, next_step


def record(due: float, first: float | None, end: float, num_tokens: int = 10, **more: object) -> RequestTiming:
    made = RequestTiming(0, due, due, end, first, num_tokens=num_tokens, num_pieces=num_tokens, has_usage=True)
    made.pieces_inside = num_tokens
    for name, value in more.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_percentiles_are_numpys(values: list[float], share: int) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.percentile(values, share)), rel=1e-9, abs=1e-9)


def test_lengths_of_answers_are_those_received() -> None:
    """Of requests that succeeded, whatever was asked for."""
    records = [record(0.1, 0.2, 0.5, 4), record(0.1, 0.2, 0.5, 9), record(0.1, 0.2, 0.5, 1, outcome="http_500")]
    found = compute_figures(PointRecords(records, GapHistogram(), {}), 1.0).answer_tokens
    assert str(found) == "6.5 tokens (4 to 9)"
    assert compute_figures(PointRecords([], GapHistogram(), {}), 1.0).answer_tokens is None


def test_a_spread_of_nothing_is_none() -> None:
    assert summarise([]) is None
    assert summarise_histogram(GapHistogram()) is None


def test_a_histogram_knows_percentiles_within_one_percent_and_the_mean_exactly() -> None:
    chance = Random(4)
    values = [chance.lognormvariate(-4, 1) for _ in range(20_000)]
    whole, left, right = GapHistogram(), GapHistogram(), GapHistogram()
    whole.add_all((value, 1) for value in values)
    left.add_all((value, 1) for value in values[:7000])
    right.add_all((value, 1) for value in values[7000:])
    left.merge(right)
    assert left.bins == whole.bins
    found = summarise_histogram(left)
    assert found is not None
    for share, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(1000 * float(np.percentile(values, share)), rel=0.01)
    assert found.mean == pytest.approx(1000 * float(np.mean(values)), rel=1e-4)
    assert found.max == pytest.approx(1000 * max(values), abs=1e-3)


def test_a_histogram_takes_pieces_that_came_together() -> None:
    found = GapHistogram()
    found.add_all([(0.0, 3), (0.02, 1)])
    assert found.quantile(0.5) == 0.0
    assert found.quantile(1.0) == pytest.approx(0.02, rel=0.006)
    assert found.max_value == 0.02


def test_pieces_that_come_together_share_their_wait_and_the_maximum_is_the_whole_one() -> None:
    found = GapHistogram()
    found.add_all([(0.4, 4), (0.01, 1)])
    assert (found.num, found.mean) == (5, pytest.approx(0.41 / 5))
    assert found.quantile(0.5) == pytest.approx(0.1, rel=0.006)
    assert found.max_value == 0.4


def test_latencies_begin_when_a_request_was_due_not_when_it_was_sent() -> None:
    """A request that waited for room, or for a retry, has waited."""
    late = record(1.0, 2.5, 3.0, num_tokens=6, sent=2.0)
    found = compute_figures(PointRecords([late]), 10.0)
    assert found.ttft_ms is not None
    assert found.ttft_ms.p50 == 1500
    assert found.e2e_ms is not None
    assert found.e2e_ms.p50 == 2000
    assert found.tpot_ms is not None
    assert found.tpot_ms.p50 == 100
    assert found.send_delay_ms is not None
    assert found.send_delay_ms.p50 == 1000


def test_rates_are_what_came_within_the_window_and_latencies_of_what_was_due_within_it() -> None:
    before = record(-1.0, -0.5, 1.0, num_tokens=20, pieces_inside=10)  # of the warm-up; half of it came inside
    inside = record(1.0, 2.0, 3.0)
    beyond = record(9.0, 9.5, 12.0, num_tokens=20, pieces_inside=5)  # ended after the window
    found = compute_figures(PointRecords([before, inside, beyond]), 10.0)
    assert found.tokens_per_s == 2.5  # 10 + 10 + 5 in 10 s
    assert found.requests_per_s == 0.2  # before, inside
    assert (found.requests, found.succeeded) == (2, 2)  # inside, beyond


def test_pieces_of_several_tokens_count_as_the_server_says() -> None:
    made = record(0.0, 0.5, 2.0, num_tokens=40, num_pieces=10, pieces_inside=5)
    assert compute_figures(PointRecords([made]), 1.0).tokens_per_s == 20


def test_tokens_of_failures_are_told_apart_and_count_for_nothing() -> None:
    failed = record(0.0, 0.5, 2.0, num_tokens=7, outcome="bad_stream", detail="cut")
    found = compute_figures(PointRecords([failed]), 10.0)
    assert (found.tokens_per_s, found.tokens_of_failed, found.requests_per_s) == (0.0, 7, 0.0)
    assert found.ttft_ms is None


def test_errors_are_counted_by_kind_with_their_first_words() -> None:
    records = [
        record(0.1, None, 0.2, outcome="http_500", detail="first"),
        record(0.3, None, 0.4, outcome="http_500", detail="second"),
        record(0.5, None, 0.6, outcome="timeout", detail="slow"),
        record(0.7, 0.8, 0.9),
    ]
    found = compute_figures(PointRecords(records), 1.0)
    assert {kind: (errors.count, errors.example) for kind, errors in found.errors.items()} == {
        "http_500": (2, "first"),
        "timeout": (1, "slow"),
    }
    assert (found.failed, found.succeeded) == (3, 1)


def test_what_we_cut_ourselves_is_no_error_but_its_tokens_were_generated() -> None:
    found = compute_figures(PointRecords([record(0.0, 0.5, 1.0, outcome=CUT)]), 1.0, LatencyLimits(ttft=1.0))
    assert (found.failed, found.cut, found.tokens_per_s) == (0, 1, 10.0)
    assert found.goodput is not None
    assert found.goodput.share == 0.0


def test_goodput_needs_every_limit_and_failures_keep_none() -> None:
    records = [
        record(0.0, 0.1, 1.0),
        record(0.0, 0.9, 1.0),  # its first token was late
        record(0.0, 0.1, 5.0),  # its tokens were slow
        record(0.0, 0.1, 1.0, outcome="http_500"),
    ]
    found = compute_figures(PointRecords(records), 10.0, LatencyLimits(ttft=0.5, tpot=0.2)).goodput
    assert found is not None
    assert (found.share, found.requests_per_s) == (0.25, 0.1)


def test_the_report_knows_who_counted_the_tokens() -> None:
    told, counted = record(0, 0.1, 1.0), record(0, 0.1, 1.0, has_usage=False)
    assert compute_figures(PointRecords([told]), 1.0).counted_by == "usage"
    assert compute_figures(PointRecords([counted]), 1.0).counted_by == "pieces"
    assert compute_figures(PointRecords([told, counted]), 1.0).counted_by == "mixed"


def test_series_have_a_rate_for_each_part_of_the_window() -> None:
    gathered = PointRecords([record(0.0, 0.1, 1.0, num_tokens=20, num_pieces=10)], pieces={0: 4, 3: 6})
    found = compute_series(gathered, 1.0, 0.25)
    assert [rate for _, rate in found.tokens_per_s] == [32.0, 0.0, 0.0, 48.0]
    assert found.curves["ttft"][0] == (100.0, 0.0)
    assert found.curves["ttft"][-1] == (100.0, 1.0)


def point(concurrency: int, rate: float, failed: float = 0.0, good: float | None = None) -> SweepPoint:
    return SweepPoint(concurrency, rate, failed, good)


def played(rates: dict[int, float], *, most: int = 64, gain: float = 0.05) -> tuple[list[int], SweepVerdict]:
    """Play a sweep against a server with these rates."""
    points: list[SweepPoint] = []
    while True:
        step = next_step(points, 1, most, gain)
        if isinstance(step, SweepVerdict):
            return [p.concurrency for p in points], step
        points.append(point(step, rates[step]))


def test_a_sweep_doubles_until_throughput_gains_too_little_and_takes_the_point_before() -> None:
    tried, verdict = played({1: 10, 2: 20, 4: 38, 8: 60, 16: 62})
    assert tried == [1, 2, 4, 8, 16]
    assert (verdict.concurrency, verdict.tokens_per_s, verdict.is_saturated) == (8, 60, True)
    assert "+3.3%" in verdict.reason


def test_a_sweep_ends_at_its_most_and_says_that_the_server_is_not_full() -> None:
    tried, verdict = played({1: 10, 2: 20, 4: 40, 6: 60}, most=6)
    assert tried == [1, 2, 4, 6]
    assert (verdict.concurrency, verdict.is_saturated) == (6, False)


def test_a_last_step_that_is_no_doubling_must_bring_less() -> None:
    """From 4 to 5 is a quarter of a doubling: 2 % are more than a quarter of 5 %."""
    _, verdict = played({1: 10, 2: 20, 4: 40, 5: 40.8}, most=5)
    assert verdict.concurrency == 5


def test_a_sweep_ends_where_limits_break_or_requests_fail() -> None:
    broken = next_step([point(1, 10, good=1.0), point(2, 20, good=0.9)], 1, 64, 0.05)
    assert isinstance(broken, SweepVerdict)
    assert broken.concurrency == 1
    assert "limits" in broken.reason
    failing = next_step([point(1, 10), point(2, 20, failed=0.2)], 1, 64, 0.05)
    assert isinstance(failing, SweepVerdict)
    assert failing.concurrency == 1
    assert "20%" in failing.reason


def test_a_server_that_bears_nothing_has_no_point() -> None:
    verdict = next_step([point(1, 0, failed=1.0)], 1, 64, 0.05)
    assert isinstance(verdict, SweepVerdict)
    assert verdict.concurrency is None

"""What a point's window is, and what goes before it."""

from __future__ import annotations

import pytest

from swarm.bench.plan import LoadPoint
from swarm.bench.records import PointRecords, RequestTiming
from swarm.bench.run import OPEN_WARM_UP, warm_up_requests, window_length

SOME = PointRecords([RequestTiming(0, 0.0, 0.0, end=3.0), RequestTiming(1, 1.0, 1.0, end=7.5)])


@pytest.mark.parametrize(
    ("point", "was_stopped", "seconds"),
    [
        (LoadPoint(1, count=2), False, 7.5),  # until the last answer
        (LoadPoint(1, duration_s=5.0), False, 5.0),  # as planned, whatever came later
        (LoadPoint(1, duration_s=60.0), True, 7.5),  # stopped: until then
        (LoadPoint(1, duration_s=5.0), True, 5.0),
    ],
)
def test_a_window_is_as_long_as_planned_unless_the_run_was_shorter(
    point: LoadPoint, was_stopped: bool, seconds: float
) -> None:
    assert window_length(SOME, point, was_stopped) == seconds


def test_a_run_that_was_stopped_in_its_warm_up_has_no_window() -> None:
    early = PointRecords([RequestTiming(0, -2.0, -2.0, end=-1.0)])
    assert window_length(early, LoadPoint(1, duration_s=5.0, warmup_s=3.0), True) <= 0
    assert window_length(PointRecords(), LoadPoint(1, count=5), True) <= 0


@pytest.mark.parametrize(
    ("point", "num"),
    [
        (LoadPoint(8), 8),  # nothing said: a request for each that will be in flight
        (LoadPoint(rate=3.0), OPEN_WARM_UP),
        (LoadPoint(8, warmup_count=0), 0),
        (LoadPoint(8, warmup_count=30), 30),
        (LoadPoint(8, warmup_s=2.0), 0),  # warmed up by its own load
    ],
)
def test_a_warm_up_is_what_was_asked_for_or_a_request_for_each_in_flight(point: LoadPoint, num: int) -> None:
    assert warm_up_requests(point) == num

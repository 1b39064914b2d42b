"""Figures that are kept always: a histogram's buckets."""

from __future__ import annotations

import pytest

from swarm.series import LONG_S, POWERS, SHORT_S, Histogram


def test_a_bound_belongs_to_its_bucket_and_the_last_bucket_takes_the_rest() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.add(value)
    assert histogram.report() == {"bounds": [1.0, 2.0], "counts": [2, 2, 2], "total": 107.5}


@pytest.mark.parametrize("bounds", [SHORT_S, LONG_S, POWERS])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))

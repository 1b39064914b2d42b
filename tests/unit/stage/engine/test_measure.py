"""What a run took is read from a clock that a container's limit doesn't stop."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from swarm.stage.engine.measure import make_clock  # noqa: E402

STOP_S = 0.2
WORK_S = 0.02
HALF = 0.5


def test_where_cores_are_limited_a_stop_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop, as the limit makes one in the middle of a run, counts for nothing; the work, for as long as it lasts with
    half a core."""
    passed_s = worked_s = 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: passed_s)
    monkeypatch.setattr(time, "process_time", lambda: worked_s)
    now = make_clock(HALF, 1)
    began = now()
    passed_s += STOP_S
    assert now() - began < STOP_S
    began = now()
    passed_s, worked_s = passed_s + WORK_S, worked_s + WORK_S
    assert now() - began >= WORK_S / HALF


@pytest.mark.parametrize(("limit", "threads"), [(None, 2), (2.0, 2), (2.5, 1)])
def test_elsewhere_it_is_the_time(limit: float | None, threads: int) -> None:
    assert make_clock(limit, threads) is time.perf_counter

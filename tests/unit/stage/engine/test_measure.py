"""What a run took is read from a clock that a container's limit doesn't stop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from swarm.stage.engine import measure  # noqa: E402
from swarm.stage.engine.measure import _LayerBench, make_clock  # noqa: E402
from swarm.stage.model.build import ModelSkeleton  # noqa: E402
from swarm.stage.model.weight_formats import PLAIN  # noqa: E402
from tests.model.models import named_config  # noqa: E402

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


def test_a_gpu_is_timed_by_its_own_queue() -> None:
    """Between two events around the run, whatever the host's clock shows."""
    submitted: list[str] = []

    class Queue:
        def mark(self) -> int:
            submitted.append("event")
            return len(submitted)

        def elapsed_s(self, first: int, last: int) -> float:
            return float(last - first)

    bench = _LayerBench.__new__(_LayerBench)
    bench._device_clock = Queue()  # type: ignore[assignment]
    assert bench._time(lambda: submitted.append("kernel")) == 2.0
    assert submitted == ["event", "kernel", "event"]


def test_a_gpu_compiles_before_its_time_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """First runs take seconds there. All sizes are measured none the less."""
    now_s, compiled = 0.0, set[tuple[Any, ...]]()

    def run_batch(stage: Any, arena: Any, batch: Any, **_: Any) -> None:
        nonlocal now_s
        num_rows = sum(row.count for row in batch.rows)
        tile = next(height for height in (16, 64, 256) if num_rows <= height)
        kernel = tile, batch.rows[0].count == 1, batch.rows[0].start >= 512
        now_s += 0.001 if kernel in compiled else 2.0
        compiled.add(kernel)

    class Clock:
        def mark(self) -> float:
            return now_s

        def elapsed_s(self, first: float, last: float) -> float:
            return last - first

    monkeypatch.setattr(measure, "run_batch", run_batch)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now_s))
    bench = _LayerBench(ModelSkeleton(named_config("llama"), torch.device("cpu"), torch.float32), PLAIN)
    bench._device_clock = Clock()  # type: ignore[assignment]
    costs = {(cost.kind, cost.rows, cost.context): cost.seconds for cost in bench.measure(1)}
    chunk = max(rows for kind, rows, _ in costs if kind == "prefill")
    assert {("prefill", chunk, chunk), ("decode", 64, 32), ("decode", 16, 2 * chunk)} <= costs.keys()
    assert max(costs.values()) < 2

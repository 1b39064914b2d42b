"""Figures that no machine has: a worker that measures nothing, or for ever, must not stop the broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite

import pytest

from swarm.broker.planner.load import PlannedLoad, Speeds
from swarm.broker.planner.problem import PlanningProblem, Shortage
from swarm.broker.planner.solve import MAX_EXACT, solve
from swarm.wire.messages import LayerCost, LinkCost
from tests.unit.broker.bench import Bench, ranges
from tests.unit.broker.planner.test_plan_search import device, model_of
from tests.unit.broker.planning.test_plan_wanted import costs, join, plan_of, ruled, why_of


@pytest.mark.parametrize("seconds", [0.0, 1e-320, 1e308, inf])
def test_speeds_are_finite_and_more_than_nothing(seconds: float) -> None:
    found = tuple(LayerCost(kind, rows, 0, seconds, False) for kind in ("decode", "prefill") for rows in (1, 8))
    speeds = Speeds.from_costs(found, alone=False)
    assert speeds is not None
    layer_s = speeds.layer_s(PlannedLoad(64, 4096, 2.0))
    assert isfinite(layer_s)
    assert layer_s > 0


@pytest.mark.parametrize("count", [2, MAX_EXACT + 2])
@pytest.mark.parametrize("host", [None, "here"])
@pytest.mark.parametrize("seconds", [0.0, 1e308, inf])
def test_a_plan_is_made_of_any_figures(
    make_bench: Callable[..., Bench], seconds: float, host: str | None, count: int
) -> None:
    """Of workers that all measured this, there is a plan; what is told about it is plain JSON."""
    bench = make_bench(ruled())
    for index in range(count):
        join(bench, f"w{index}", seconds, **({} if host is None else {"host": host}))
    bench.tick()
    assert ranges(bench)
    json.dumps(plan_of(bench), allow_nan=False)


@pytest.mark.parametrize("seconds", [1e308, inf])
def test_who_measured_for_ever_is_left_out(make_bench: Callable[..., Bench], seconds: float) -> None:
    bench = make_bench(ruled())
    join(bench, "stuck", seconds)
    join(bench, "w1", 0.001)
    bench.tick()
    assert set(ranges(bench)) == {"w1"}
    (why,) = [text for text in why_of(bench) if "stuck is left out" in text]
    assert "a step would be slower with it" in why


def test_a_wire_that_passes_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled(load=PlannedLoad(1, 0, 0.0)))
    for name in ("w0", "w1"):
        worker = bench.add(name)
        bench.tell(name, worker.hello(costs=costs(0.001), link=LinkCost(inf, 1e-320)))
    bench.tick()
    assert len(ranges(bench)) == 1
    json.dumps(plan_of(bench), allow_nan=False)


def test_devices_that_take_no_time_have_a_plan() -> None:
    """The search divides by the best cost: not by nothing."""
    free = replace(device("a"), layer_s=0.0)
    found = solve(PlanningProblem(model_of(1, 1, 1), (free, replace(free, name="b", host="b"))))
    assert not isinstance(found, Shortage)

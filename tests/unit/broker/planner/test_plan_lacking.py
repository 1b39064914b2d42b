"""Why there is no plan: what is said must be the reason, and name it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.planner.problem import PlanningProblem, Shortage
from swarm.broker.planner.solve import MAX_EXACT, solve
from swarm.wire.messages import LayerRange
from tests.unit.broker.bench import Bench
from tests.unit.broker.planner.test_plan_search import device, model_of
from tests.unit.broker.planning.test_plan_wanted import join, ruled

SIX = model_of(1, 1, 1, 1, 1, 1)


def lacking(*devices: dict[str, object]) -> Shortage:
    found = solve(PlanningProblem(SIX, tuple(device(f"w{i}", **fields) for i, fields in enumerate(devices))))  # type: ignore[arg-type]
    assert isinstance(found, Shortage)
    return found


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (
            [{"pinned": LayerRange(0, 4)}, {"pinned": LayerRange(1, 6)}],
            "other pins: w0 and w1 are pinned to layers 0–3 and 1–5, which overlap",
        ),
        (
            [{"pinned": LayerRange(2, 9)}, {}],
            "another pin for w0: it is pinned to layers 2–8, and the model has 0–5",
        ),
        (
            [{"pinned": LayerRange(0, 3), "max_layers": 2}, {}],
            "another pin or cap for w0: it is pinned to layers 0–2, which are 3, and its cap is 2",
        ),
        (
            [{"max_layers": 1}, {"max_layers": 2}],
            "other pins or caps, or another worker: for the 6 layers 0–5 the caps allow 3 (w0 1, w1 2)",
        ),
        (
            [{"pinned": LayerRange(0, 2)}, {"pinned": LayerRange(4, 6)}],
            "other pins or caps, or another worker: "
            "no worker is left for layers 2–3: all workers hold others by their pins",
        ),
        (
            [{"pinned": LayerRange(2, 4)}, {}],
            "other pins or caps, or another worker: "
            "no worker is left for layers 0–1 and 4–5: without a pin there is only w1",
        ),
    ],
)
def test_contradictions_by_hand_are_named(devices: list[dict[str, object]], text: str) -> None:
    """Whoever set it reads what to change; no memory is asked for."""
    found = lacking(*devices)
    assert found.text == text
    assert found.missing_bytes == 0


def test_contradictions_are_named_among_many() -> None:
    found = lacking(*[{"pinned": LayerRange(0, 4)}, {"pinned": LayerRange(1, 6)}, *[{}] * MAX_EXACT])
    assert found.text.startswith("other pins: w0 and w1")


def test_a_harmless_cap_is_not_blamed() -> None:
    """Where the layers don't pack into the memory either way, memory is asked for."""
    model = model_of(5, 5, 5, 5)
    devices = (device("a", 9, max_layers=4), device("b", 9), device("c", 9))
    found = solve(PlanningProblem(model, devices))
    assert isinstance(found, Shortage)
    assert found.text.startswith("workers with more memory each")
    tight = (device("a", 15, max_layers=1), device("b", 10, max_layers=2), device("c", 4))
    found = solve(PlanningProblem(model, tight))
    assert isinstance(found, Shortage)
    assert found.text.startswith("other pins or caps")


@pytest.mark.parametrize("seconds", [1e308, float("inf")])
def test_time_is_not_taken_for_memory(make_bench: Callable[..., Bench], seconds: float) -> None:
    """Workers that are slow beyond measure make a slow swarm; they don't make it wait for memory."""
    bench = make_bench(ruled())
    join(bench, "w0", seconds)
    join(bench, "w1", seconds)
    bench.tick()
    assert not bench.state.plans.waits_for

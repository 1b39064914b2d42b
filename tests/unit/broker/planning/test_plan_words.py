"""A plan in words: plurals, nothing that says nothing, one sentence for each reason, the same reason whoever asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.actions import WriteEpoch
from swarm.broker.planner import explain, solve
from swarm.broker.planner.explain import MAX_NAMED, describe_forecast, make_forecast
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planner.problem import Device, LayerShare, Line, PlanningProblem
from swarm.broker.planning import proposals
from swarm.wire.messages import LayerRange, PlanWhatIf, Query
from tests.unit.broker.bench import Bench, submit
from tests.unit.broker.planner.test_plan_search import device, model_of
from tests.unit.broker.planning.test_plan_wanted import join, plan_of, ruled, why_of

MANY = 14


def words(devices: tuple[Device, ...], line: Line, load: PlannedLoad | None = None, **fields: bool) -> tuple[str, ...]:
    problem = PlanningProblem(model_of(*[1] * line[-1].layers.stop), devices, **fields)
    return describe_forecast(make_forecast(problem, line, load or PlannedLoad(), "throughput", thorough=True))


def test_plurals_and_equals() -> None:
    devices = (device("a"), device("b"))
    line = (LayerShare(0, LayerRange(0, 1)), LayerShare(1, LayerRange(1, 2)))
    told = words(devices, line, PlannedLoad(1, 1, 1.0))
    assert told[0].startswith(
        "objective throughput: for 1 sequence of 1 position that decodes in each of 2 steps in flight, with 1 "
    )
    assert told[1] == "the slowest stage is a, 1 s for layer 0; the next one takes the same time"
    assert words(devices, line, PlannedLoad(2, 9, 0.5))[0].startswith(
        "objective throughput: for 2 sequences of 9 positions that decode together in each of 2 steps in flight, with "
    )


def test_much_quicker_is_told_as_a_multiple() -> None:
    """Up to twice as quick in percent, then as a factor."""
    devices = (device("a"), device("b", layer_s=8.0))
    line = (LayerShare(0, LayerRange(0, 5)), LayerShare(1, LayerRange(5, 6)))
    assert "with even shares a step would take 24 s: this plan is 3.0 × as fast" in words(devices, line)
    line = (LayerShare(0, LayerRange(0, 4)), LayerShare(1, LayerRange(4, 6)))
    told = words((device("a"), device("b", layer_s=2.0)), line)
    assert "with even shares a step would take 6 s: this plan is 50% faster" in told


def test_one_sentence_for_all_with_the_same_reason() -> None:
    devices = tuple(device(f"w{i}") for i in range(MANY))
    told = [text for text in words(devices, (LayerShare(0, LayerRange(0, 2)),)) if "left out" in text]
    first = ", ".join(f"w{i}" for i in range(1, MAX_NAMED))
    assert told == [
        f"{first} and {MANY - MAX_NAMED} more are left out, for the same reason: a step would not be faster with it"
    ]


def test_as_long_is_not_told_as_a_difference() -> None:
    """Two figures that read alike are not set against each other."""
    told = words((device("a"), device("b")), (LayerShare(0, LayerRange(0, 1)),))
    assert told[-1] == "b is left out: a step would take the same time with it: 1 s"


def test_nobody_searches_for_words_while_a_plan_is_waited_for(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a loss and the order of a new epoch nothing is looked for but the plan. Who asks later is told all."""
    bench = make_bench(ruled())
    for name in ("w0", "w1", "w2"):
        join(bench, name, 0.004)
    join(bench, "snail", 0.1)
    bench.tick()
    bench.say(submit())
    (why,) = [text for text in why_of(bench) if "left out" in text]
    assert why.startswith("snail is left out: a step would be slower with it")
    with monkeypatch.context() as patched:
        patched.setattr(explain, "solve", no_search)
        patched.setattr(solve, "solve", no_search)
        patched.setattr(proposals, "find_alternatives", no_search)
        assert any(isinstance(action, WriteEpoch) for action in bench.lose("w1"))
        assert bench.state.plans.upcoming is not None or bench.state.plans.is_serving
    bench.tick()
    assert [text for text in why_of(bench) if text.startswith("snail is left out: ") and "ms" in text]


def no_search(*_: object) -> None:
    raise AssertionError("somebody searches for words")


@pytest.mark.parametrize("host", ["here", "a"])
def test_the_reason_is_the_same_whoever_asks(make_bench: Callable[..., Bench], host: str) -> None:
    """A machine by itself is quicker than with a snail: that is said of the snail in the plan and by a dry run."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.004, alone_s=0.001, host="here")
    join(bench, "w1", 0.004, alone_s=0.001, host=host)
    join(bench, "snail", 0.1, host="there")
    bench.tick()
    answer = bench.ask(Query(what="plan", suppose=PlanWhatIf()))
    why = [text for text in plan_of(bench)["why"] if "left out" in text]  # type: ignore[attr-defined]
    assert why == [text for text in answer.body["why"] if "left out" in text]  # type: ignore[attr-defined]
    assert any(text.startswith("snail is left out: a step would be slower with it: 100 ms instead of") for text in why)

"""Which other plan came near to the one that stands, and why it is not made: told with figures to who asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.planner.tables import HOP_S, STEP_S
from swarm.broker.planning.alternatives import EQUAL_REASON, TAKES_TURNS_REASON
from swarm.wire.messages import LayerRange, Pin, PlanCommand, PlanOverrides, PlanWhatIf, Query
from tests.unit.broker.bench import Bench, ranges
from tests.unit.broker.planning.test_plan_wanted import join, lengths, plan_of, ruled, why_of

S = pytest.approx


def others(bench: Bench) -> list[dict[str, object]]:
    return plan_of(bench)["forecast"]["others"]  # type: ignore[index,no-any-return]


def weighed(bench: Bench) -> list[str]:
    return [text for text in why_of(bench) if text.startswith("alternative, ")]


def test_even_shares_in_turns_stay_though_one_alone_is_quicker(make_bench: Callable[..., Bench]) -> None:
    """By its own figures: each further stage costs a hop. It is said why that doesn't count."""
    bench = make_bench(ruled())
    for name in ("w0", "w1", "w2"):
        join(bench, name, 0.004, alone_s=0.002, host="here")
    bench.tick()
    assert lengths(bench) == {"w0": 2, "w1": 2, "w2": 2}
    (other,) = others(bench)
    assert other["shares"] == {"w0": [0, 6]}
    assert other["step_s"] == S(0.012 + STEP_S)
    assert other["now_step_s"] == S(0.012 + STEP_S + 2 * HOP_S, rel=1e-3)
    assert other["why"] == TAKES_TURNS_REASON
    assert weighed(bench) == [
        f"alternative, all layers on w0: 14 ms a step, this plan takes 15.2 ms; {TAKES_TURNS_REASON}"
    ]


def test_a_plan_stays_where_another_gains_less_than_the_margin(make_bench: Callable[..., Bench]) -> None:
    """The other one is named, by how much it is quicker, by how much it would have to be, and what makes it anyway."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.010)
    join(bench, "w1", 0.010)
    bench.tick()
    first, second = bench.state.plans.current.stages  # type: ignore[union-attr]
    bench.state.workers[second.incarnation].pace = 1.4
    bench.tick(1.0)
    assert list(lengths(bench).values()) == [3, 3]
    (other,) = others(bench)
    assert {name: stop - first for name, (first, stop) in other["shares"].items()} == {first.name: 4, second.name: 2}  # type: ignore[attr-defined]
    assert (other["step_s"], other["now_step_s"]) == (S(0.040), S(0.042))
    assert str(other["why"]).startswith("it is 5% faster, and layers move only for more than 10% (plan.margin), ")


def test_a_plan_stays_where_another_is_as_good(make_bench: Callable[..., Bench]) -> None:
    """Quicker by 1.7 %, which is no more than what measuring is worth: nothing is moved for it."""
    bench = make_bench(ruled(standby="none"))
    join(bench, "w0", 0.010)
    join(bench, "w1", 0.010)
    bench.tick()
    before = ranges(bench)
    second = bench.state.plans.current.stages[1]  # type: ignore[union-attr]
    bench.state.workers[second.incarnation].pace = 1.355
    bench.tick(1.0)
    assert ranges(bench) == before
    (other,) = others(bench)
    assert other["why"] == EQUAL_REASON
    assert (other["step_s"], other["now_step_s"]) == (S(0.040), S(0.04065))


def test_the_quickest_plan_is_told_beside_the_best_with_a_worker_less(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled())
    join(bench, "quick", 0.010)
    join(bench, "slow", 0.020)
    bench.tick()
    (other,) = others(bench)
    assert other["shares"] == {"quick": [0, 6]}
    assert (other["step_s"], other["why"]) == (S(0.060 + STEP_S), "this plan is 50% faster")


def test_one_worker_alone_is_weighed_against_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled())
    join(bench, "w0", 0.010)
    bench.tick()
    assert others(bench) == []
    assert weighed(bench) == []


def test_a_dry_run_says_why_things_would_stay(make_bench: Callable[..., Bench]) -> None:
    """The same as the plan itself."""
    bench = make_bench(ruled(margin=5.0))
    join(bench, "w0", 0.010)
    bench.tick()
    join(bench, "late", 0.010)
    bench.tick(1.0)
    assert lengths(bench) == {"w0": 6}
    answer = bench.ask(Query(what="plan", suppose=PlanWhatIf())).body
    assert answer["state"] == "would stay as it is"
    told = [text for text in answer["why"] if text.startswith("alternative, ")]  # type: ignore[attr-defined]
    assert told == weighed(bench)
    assert "layers move only for more than 500% (plan.margin), or by" in told[0]


def test_a_plan_by_hand_says_so_and_what_it_would_be_otherwise(make_bench: Callable[..., Bench]) -> None:
    """And how to go back; then nothing is said any more."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.010)
    join(bench, "w1", 0.010)
    bench.tick()
    bench.ask(PlanCommand(verb="plan", by_hand=PlanOverrides(pins=(Pin("w1", LayerRange(2, 6)),))))
    bench.tick(1.0)
    bench.ask(PlanCommand(verb="cordon", worker="w0"))
    bench.tick(1.0)
    assert ranges(bench) == {"w0": LayerRange(0, 2), "w1": LayerRange(2, 6)}
    why = why_of(bench)
    assert why[:2] == [
        "by hand: w1 is pinned to layers 2–5; swarmctl plan --apply restores the settings",
        "by hand: w0 is cordoned; swarmctl uncordon reverses it",
    ]
    bench.ask(PlanCommand(verb="uncordon", worker="w0"))
    assert others(bench)[-1]["shares"] == {"w0": [0, 3], "w1": [3, 6]}
    assert "28% faster, but this plan is set by hand" in str(others(bench)[-1]["why"])
    bench.ask(PlanCommand(verb="plan"))
    bench.tick(1.0)
    assert not [text for text in why_of(bench) if "by hand" in text]


def test_a_supposed_plan_is_not_weighed_against_itself(make_bench: Callable[..., Bench]) -> None:
    """Who is only supposed is in every plan; of the others one may be left out."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.010)
    join(bench, "w1", 0.010)
    bench.tick()
    supposed = plan_of(bench, more=1)
    (other,) = supposed["forecast"]["others"]  # type: ignore[index]
    assert len(supposed["stages"]) == 3  # type: ignore[arg-type]
    assert len(other["shares"]) == 2
    assert other["why"] == "this plan is 49% faster"

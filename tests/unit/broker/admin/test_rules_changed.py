"""Settings of plans that are read again while requests run: what may not be any more goes, the rest stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.events import RulesChanged
from swarm.wire.messages import LayerRange, Pin, PlanCommand, PlanOverrides, PlanWhatIf, Query
from tests.unit.broker.bench import Bench, ranges, submit


def change(bench: Bench, **fields: object) -> list[WriteLog]:
    actions = bench.feed(RulesChanged(replace(bench.settings.plan.rules, **fields)))  # type: ignore[arg-type]
    bench.tick(1.0)
    return [action for action in actions if isinstance(action, WriteLog) and action.event == "plan_rules_unmet"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pins": {"w0": LayerRange(0, 1)}}, {"w0": LayerRange(0, 1), "w1": LayerRange(1, 6)}),
        ({"caps": {"w0": 2}}, {"w0": LayerRange(0, 2), "w1": LayerRange(2, 6)}),
        ({"exclude": frozenset({"w1"})}, {"w0": LayerRange(0, 6)}),
    ],
)
def test_layers_move_where_the_plan_may_not_be_so_any_more(
    serving: Bench, fields: dict[str, object], expected: dict[str, LayerRange]
) -> None:
    """Requests go on."""
    serving.say(submit())
    assert change(serving, **fields) == []
    assert ranges(serving) == expected
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_what_the_plan_keeps_to_already_moves_nothing(serving: Bench) -> None:
    epoch = serving.epoch
    change(serving, pins={"w0": LayerRange(0, 3)}, margin=0.5, kv_positions=32)
    assert serving.epoch == epoch


def test_rules_that_allow_no_plan_are_told_and_the_plan_stays(serving: Bench) -> None:
    before = ranges(serving)
    (note,) = change(serving, exclude=frozenset({"w0", "w1"}))
    assert note.level == "warning"
    assert "a worker besides w0, w1" in str(note.fields["waits_for"])
    assert ranges(serving) == before
    assert serving.state.plans.is_serving
    assert change(serving, exclude=frozenset({"w1"})) == []
    assert ranges(serving) == {"w0": LayerRange(0, 6)}


def test_a_swarm_that_waits_goes_on_when_it_may(make_bench) -> None:
    bench: Bench = make_bench()
    assert change(bench, exclude=frozenset({"w0"})) == []  # nobody is here: that is told elsewhere
    bench.join("w0")
    bench.tick(1.0)
    assert not bench.state.plans.is_serving
    change(bench, exclude=frozenset())
    assert ranges(bench) == {"w0": LayerRange(0, 6)}


def test_the_operators_word_still_comes_first(serving: Bench) -> None:
    hand = PlanOverrides(pins=(Pin("w0", LayerRange(0, 1)),))
    assert serving.ask(PlanCommand(verb="plan", by_hand=hand)).ok
    serving.tick(1.0)
    change(serving, pins={"w0": LayerRange(0, 2)})
    assert ranges(serving)["w0"] == LayerRange(0, 1)


def test_newcomers_are_judged_by_them(serving: Bench) -> None:
    change(serving, min_memory_bytes=1 << 60)
    serving.join("w2")
    assert "w2" not in {row["name"] for row in serving.ask(Query(what="nodes")).body["workers"]}  # type: ignore[attr-defined]


def test_what_was_supposed_before_is_asked_anew(serving: Bench) -> None:
    """An answer by the former rules is not given again, also where the plan in force has stayed."""
    asked = Query(what="plan", suppose=PlanWhatIf(without=("w1",)))
    assert "waits_for" not in serving.ask(asked).body
    epoch = serving.epoch
    change(serving, caps={"w0": 3})
    assert serving.epoch == epoch
    assert "6 layers" in str(serving.ask(asked).body)

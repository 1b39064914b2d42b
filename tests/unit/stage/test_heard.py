"""Whose steps a stage takes, where doors go by keys: it comes with the plan, and goes with the fence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from swarm.stage import actions as act
from swarm.stage import epochs
from swarm.stage.epochs import AllowedSenders
from swarm.stage.events import Loaded, LoadFailed, StepArrived, StepRefused
from swarm.wire.messages import (
    Activate,
    AllowKey,
    BlockKey,
    DataPathError,
    Fence,
    KeepWarm,
    Lineage,
    Order,
    Prepare,
    Step,
    Unassign,
)
from swarm.wire.transport.keys import with_key
from tests.unit.stage.bench import CAPACITY, EDGE, WELCOME, StageBench

A, B, C, D = (digit * 64 for digit in "abcd")
OURS = Lineage("ours", 1)


def admitted(actions: list[act.Action]) -> list[set[str]]:
    return [set(action.keys) for action in actions if isinstance(action, act.AllowSenders)]


def prepare(stage: StageBench, epoch: int, before: str | None, relay: str = "") -> Order:
    return Prepare(epoch=epoch, layers=stage.layers, standby=(), edge=EDGE, max_sequences=4, before=before, relay=relay)


@pytest.fixture
def stage(make_stage: Callable[..., StageBench]) -> StageBench:
    """In epoch 1, behind A."""
    found = make_stage()
    assert admitted(found.order(prepare(found, 1, A))) == [{A}]
    found.feed(Loaded(1, CAPACITY))
    found.order(Fence(epoch=1))
    assert admitted(found.order(Activate(epoch=1, first_step=1, live=()))) == []  # it is heard already
    return found


def test_it_is_told_before_anything_else(make_stage: Callable[..., StageBench]) -> None:
    """Who is to be heard may knock as soon as the rest is done."""
    bench = make_stage()
    assert isinstance(bench.order(prepare(bench, 1, A))[0], act.AllowSenders)


def test_the_prepared_one_is_heard_beside_the_one_in_force(stage: StageBench) -> None:
    """The fence takes away what was in force; what was prepared stays, and is in force then."""
    assert admitted(stage.order(prepare(stage, 2, B))) == [{A, B}]
    assert admitted(stage.feed(Loaded(2, CAPACITY))) == []
    assert admitted(stage.order(Fence(epoch=2))) == [{B}]
    assert admitted(stage.order(Activate(epoch=2, first_step=1, live=()))) == []
    assert admitted(stage.order(Fence(epoch=3))) == [set()]


def test_without_a_fence_the_activation_takes_it_away(stage: StageBench) -> None:
    """Orders may be lost."""
    stage.order(prepare(stage, 2, B))
    stage.feed(Loaded(2, CAPACITY))
    assert admitted(stage.order(Activate(epoch=2, first_step=1, live=()))) == [{B}]


def test_a_plan_that_comes_to_nothing_takes_its_key_with_it(stage: StageBench) -> None:
    """Another one in its place, a load that fails, or an order that says that none is under way."""
    stage.order(prepare(stage, 2, B))
    assert admitted(stage.order(prepare(stage, 3, C))) == [{A, C}]
    stage.feed(Loaded(2, CAPACITY))
    assert admitted(stage.feed(LoadFailed(3, "no room"))) == [{A}]
    assert admitted(stage.order(prepare(stage, 4, D))) == [{A, D}]
    assert admitted(stage.order(KeepWarm(epoch=4, layers=()))) == [{A}]


def test_who_is_dismissed_hears_nobody(stage: StageBench) -> None:
    """It has no part in the plan."""
    assert admitted(stage.order(Unassign(epoch=1))) == [set()]


def test_who_is_expected_is_heard_until_the_next_fence(stage: StageBench) -> None:
    """The same fence again is none; what was said before the last one does not count."""
    assert admitted(stage.order(AllowKey(epoch=1, key=C))) == [{A, C}]
    assert admitted(stage.order(AllowKey(epoch=1, key=C))) == []
    assert admitted(stage.order(Fence(epoch=1))) == []
    assert admitted(stage.order(Fence(epoch=2))) == [set()]
    assert admitted(stage.order(AllowKey(epoch=1, key=C))) == []
    assert stage.core.counters["stale_orders"] == 1


def test_who_is_out_for_good_is_heard_no_more_at_once(stage: StageBench) -> None:
    """Whoever it was: the one before in the plan in force, whose steps count no more; in the one that is prepared; or
    in a recheck. There may be no fence."""
    stage.order(prepare(stage, 2, B))
    stage.order(AllowKey(epoch=1, key=C))
    assert admitted(stage.order(BlockKey(epoch=1, key=D))) == []
    assert admitted(stage.order(BlockKey(epoch=1, key=C))) == [{A, B}]
    assert admitted(stage.order(BlockKey(epoch=1, key=B))) == [{A}]
    assert stage.core.active == 1
    actions = stage.order(BlockKey(epoch=1, key=A))
    assert admitted(actions) == [set()]
    assert act.DisconnectKey(A) in actions
    assert stage.core.active is None
    assert admitted(stage.order(prepare(stage, 3, D))) == []  # a former one's order, said again
    assert admitted(stage.order(prepare(stage, 4, "e" * 64))) == [{"e" * 64}]


def test_nothing_goes_to_who_is_out_for_good(make_stage: Callable[..., StageBench]) -> None:
    """What this stage still computes of the plan in force is for nobody."""
    bench = make_stage()
    edge = replace(EDGE, endpoint=with_key("tcp://192.0.2.1:20000", C.encode()))
    bench.order(replace(prepare(bench, 1, A), edge=edge))
    bench.feed(Loaded(1, CAPACITY))
    bench.order(Activate(epoch=1, first_step=1, live=()))
    assert bench.order(BlockKey(epoch=1, key=B)) == [act.DisconnectKey(B)]
    assert bench.core.active == 1
    actions = bench.order(BlockKey(epoch=1, key=C))
    assert act.DisconnectKey(C) in actions
    assert (bench.core.active, admitted(actions)) == (None, [set()])


def test_who_is_expected_sends_no_steps_of_the_plan(stage: StageBench) -> None:
    """Nor who is before this stage in the plan that is prepared; nor does anything damaged that they send end the plan
    in force. Who has shown no key was asked for none."""
    stage.order(AllowKey(epoch=1, key=C))
    stage.order(prepare(stage, 2, B))
    number = 0
    for sender, is_taken in ((C, False), (B, False), (A, True), ("", True)):
        step = Step(epoch=1, step=1 + number, rows=(), tokens=())
        actions = stage.feed(StepArrived(step, None, 7, sender))
        assert any(isinstance(action, act.SendStep | act.SendDone) for action in actions) is is_taken
        number += is_taken
    assert stage.core.counters["foreign_steps"] == 2
    assert stage.feed(StepRefused("it is cut", C)) == []
    ((told,),) = [stage.feed(StepRefused("it is cut", A))[1:]]
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, DataPathError)


def test_a_spare_worker_hears_who_is_expected(make_stage: Callable[..., StageBench]) -> None:
    """It has no plan at all; the next fence ends it."""
    bench = make_stage()
    assert admitted(bench.order(AllowKey(epoch=3, key=C))) == [{C}]
    assert admitted(bench.order(Fence(epoch=4))) == [set()]


def test_another_brokers_welcome_forgets_everybody(stage: StageBench) -> None:
    """Of its own life; the same broker's welcome, which is said again, changes nothing."""
    stage.order(prepare(stage, 2, B))
    stage.order(AllowKey(epoch=2, key=C))
    assert admitted(stage.order(WELCOME)) == []
    assert admitted(stage.order(replace(WELCOME, lineage=OURS))) == [set()]


def test_without_keys_nothing_is_told(make_stage: Callable[..., StageBench]) -> None:
    """Doors don't go by them."""
    bench = make_stage()
    actions = bench.activate(1) + bench.activate(2) + bench.order(Fence(epoch=3))
    assert admitted(actions) == []


def test_no_more_are_expected_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest."""
    monkeypatch.setattr(epochs, "MAX_RECHECK_KEYS", 2)
    some = AllowedSenders()
    for key in (A, B, A, C):
        some.allow(key, 1)
    assert some.build_update(None) == act.AllowSenders(frozenset({A, C}))


def test_where_steps_come_by_relay_they_are_waited_for_there_until_no_plan_says_so(stage: StageBench) -> None:
    relay = f"tcp://*:5704/{'ab' * 16}"
    (told,) = (a for a in stage.order(prepare(stage, 2, B, relay)) if isinstance(a, act.AllowSenders))
    assert told == act.AllowSenders(frozenset({A, B}), relay)
    stage.feed(Loaded(2, CAPACITY))
    stage.order(Activate(epoch=2, first_step=1, live=()))
    assert admitted(stage.order(prepare(stage, 3, B))) == []  # the plan in force has it still
    stage.feed(Loaded(3, CAPACITY))
    (told,) = (a for a in stage.order(Activate(epoch=3, first_step=1, live=())) if isinstance(a, act.AllowSenders))
    assert told == act.AllowSenders(frozenset({B}))

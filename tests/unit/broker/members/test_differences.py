"""A worker whose sequences or memory differ from the plan: no request is to blame, and the worker goes if it lasts."""

from __future__ import annotations

import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.members.blame import GUILTY_AFTER
from swarm.broker.members.differences import MAX_DIFFERENCES, WINDOW_S
from swarm.broker.members.integrity import PAUSE_S
from swarm.broker.state import PlanPhase
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import DataPathError, Fence, Finished, Rejoin, Unassign
from tests.unit.broker.bench import MIB, Bench, orders, said, scheduling, submit
from tests.unit.broker.members.test_blame import fail

KINDS = ["kv_overfull", "misplaced"]
TIGHT = 69 * MIB  # for half of the model


def differ(bench: Bench, kind: str, name: str = "w1") -> None:
    """The worker reports a difference, and the next plan serves if the worker stays."""
    bench.tell(
        name,
        DataPathError(
            epoch=bench.epoch,
            incarnation=bench.workers[name].incarnation,
            reason="sequence 1 stands elsewhere",
            **{kind: True},  # type: ignore[arg-type]
        ),
    )
    while not (bench.state.plans.is_serving or bench.state.workers[bench.workers[name].incarnation].is_gone):
        bench.tick()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_differs_again_and_again_is_put_out(make_bench, kind: str) -> None:
    bench = make_bench(scheduling()).serve(2)
    bench.say(submit())
    for number in range(1, MAX_DIFFERENCES):
        differ(bench, kind)
        assert bench.epoch == 1 + number
        assert not bench.state.workers["w1.1"].is_gone
    differ(bench, kind)
    bench.tick()
    judgement = bench.judgements_of("w1")
    assert judgement.verdict is Verdict.DIFFERS
    assert "its sequences or memory differed from the plan 3 times within 60 s" in judgement.evidence
    assert judgement.evidence.endswith("sequence 1 stands elsewhere")
    assert bench.state.plans.current.members == {"w0.1"}
    assert bench.state.counters["differences"] == MAX_DIFFERENCES
    assert "sequences_at_deaths" not in bench.state.counters
    assert [n.fields["worker"] for n in bench.log if isinstance(n, WriteLog) and n.event == "worker_out"] == ["w1"]
    bench.run_dry()
    assert bench.sequence().reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_differences_that_lie_far_apart_are_forgiven(make_bench, kind: str) -> None:
    bench = make_bench(scheduling()).serve(2)
    for _ in range(3 * MAX_DIFFERENCES):
        differ(bench, kind)
        bench.tick(WINDOW_S / (MAX_DIFFERENCES - 1) + 1)
    assert not bench.state.workers["w1.1"].is_gone


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_worker_goes_as_well_and_what_it_held_does_not_count(make_bench, kind: str) -> None:
    """Otherwise plans would follow each other without end. It comes back at once, later after a pause."""
    bench = make_bench(scheduling()).serve(2, memory_bytes=TIGHT)
    bench.say(submit())
    bench.finish()
    for number in range(3):
        for _ in range(MAX_DIFFERENCES):
            differ(bench, kind)
        assert bench.state.plans.current is None
        assert "w1 is out for a pause" in bench.state.plans.waits_for
        bench.take()
        paused_s = 0.0
        while not orders(bench.log, Rejoin):
            bench.tick()
            paused_s += 0.1
            assert paused_s < 60
        assert paused_s == pytest.approx((0.1, PAUSE_S, 2 * PAUSE_S)[number], abs=0.2)
        assert orders(bench.log, Fence)
        bench.tell("w1", bench.workers["w1"].hello())
        assert bench.state.workers["w1.1"].trusted_positions == {}
        assert bench.state.workers["w1.1"].num_removals == number + 1
        while not bench.state.plans.is_serving:
            bench.tick()
    bench.run_dry()
    assert [end.reason for end in said(bench.log, Finished)] == ["length"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_is_back_is_trusted_like_any_other(make_bench, kind: str) -> None:
    """A difference does not show that anything was computed wrongly: copies and moves of what the worker computes from
    then on count. Only what it held before does not."""
    bench = make_bench(scheduling()).serve(2)
    bench.say(submit(max_tokens=50))
    bench.finish()
    for _ in range(MAX_DIFFERENCES):
        differ(bench, kind)
    hello = bench.workers["w1"].hello()
    bench.take()
    bench.tell("w1", hello)
    worker = bench.state.workers["w1.1"]
    assert worker.trusted_positions == {}
    assert [order for peer, order in orders(bench.take(), Unassign) if peer == "w1.1"]
    assert (worker.num_faults, worker.is_trusted, worker.may_copies_count) == (0, True, True)
    while worker.incarnation not in bench.state.plans.current.members or not bench.state.plans.is_serving:
        bench.tick()
    assert worker.trusted_positions is None


def test_a_worker_whose_steps_fail_after_a_difference_waits_for_its_test(make_bench) -> None:
    """The reason why the swarm waits names what brings the worker back."""
    bench = make_bench(scheduling()).serve(2, memory_bytes=TIGHT)
    bench.say(submit())
    differ(bench, "misplaced")
    for _ in range(GUILTY_AFTER):
        while not bench.pipe:
            bench.tick()
        fail(bench, "w1")
    assert bench.state.workers["w1.1"].verdict is Verdict.FAILED
    assert "w1 is out until a test of its device passes" in bench.state.plans.waits_for


def test_an_old_report_counts_for_nothing(make_bench) -> None:
    bench = make_bench(scheduling()).serve(2)
    report = DataPathError(epoch=bench.epoch, incarnation="w1.1", reason="no mapping", misplaced=True)
    for _ in range(MAX_DIFFERENCES + 1):
        bench.tell("w1", report)
    assert bench.state.counters["differences"] == 1


def test_a_plan_that_is_being_activated_is_replaced_at_once(make_bench) -> None:
    """A stage that can't share what the plan counts drops a sequence, which it may have reported before."""
    bench = make_bench(scheduling()).serve(2, memory_bytes=TIGHT)
    bench.mute.add("w0")
    bench.tell("w1", DataPathError(epoch=1, incarnation="w1.1", reason="lost", damaged=False, misplaced=True))
    bench.tell("w0", bench.workers["w0"].prepared(2))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    bench.mute.clear()
    bench.tell("w1", DataPathError(epoch=2, incarnation="w1.1", reason="no mapping", kv_overfull=True))
    while not bench.state.plans.is_serving:
        bench.tick()
    assert bench.epoch == 3
    assert bench.state.counters["differences"] == 2

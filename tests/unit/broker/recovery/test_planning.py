"""Changing the plan: one procedure for a first plan, a newcomer, a departure and a death."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.broker.actions import (
    ConnectPipeline,
    DisconnectPipeline,
    Dispatch,
    ProbeRoute,
    SendToClient,
    SendToWorker,
    WriteEpoch,
    WriteLog,
)
from swarm.broker.admin.status import report_status
from swarm.broker.core import CoreSettings
from swarm.broker.events import EpochWritten, HeartbeatReceived, WorkerDisconnected, WorkerMessageReceived
from swarm.broker.members.admission import MAX_REMEMBERED
from swarm.broker.members.integrity import QUARANTINE_AFTER
from swarm.broker.planner.takeover import MIN_LOAD_S
from swarm.broker.planning.measurements import LOAD_BYTES_PER_S
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.recovery.worker_orders import ASSUMED_BYTES
from swarm.broker.reports.scheduling import report_scheduler
from swarm.broker.state import PlanPhase, SequenceState, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    Activate,
    Activated,
    DataPathError,
    Denied,
    Describe,
    Description,
    Edge,
    Fence,
    Finished,
    KeptWarm,
    LayerRange,
    LeaseRenewed,
    Leaving,
    LoadProgress,
    Prepare,
    Prepared,
    Query,
    Refused,
    Rejoin,
    Release,
    Report,
    SequencePosition,
    StopWorker,
    Unassign,
    Welcome,
)
from tests.unit.broker.bench import (
    MIB,
    Bench,
    beat_of,
    orders,
    ranges,
    request_settings,
    said,
    scheduling,
    settings,
    steps,
    submit,
)

OVERHEAD = 64 * MIB


def planning(**fields: object) -> CoreSettings:
    return settings(plan=ReconfigurationSettings(**({"settle_s": 0.0} | fields)))  # type: ignore[arg-type]


def orders_to(bench: Bench, name: str) -> list[object]:
    return [o for peer, o in orders(bench.log) if peer == bench.workers[name].incarnation]


# --- the first plan --------------------------------------------------------------------------------------------------


def test_first_plan_from_hello_to_serving(bench: Bench) -> None:
    """Every order of the first plan, in order: the epoch is written before anybody hears of it; everybody is fenced;
    both prepare; when both are ready, fence and activation; when both are active, it serves."""
    bench.held = {WriteEpoch}
    bench.mute = {"w0", "w1"}
    bench.join("w0", "w1")
    bench.log.clear()
    assert bench.tick() == [WriteEpoch(1, ("w0", "w1"))]
    # Written: fence, then the layers and the way to the next stage.
    assert bench.write_out() == [
        SendToWorker(b"w0.1", Fence(epoch=1)),
        SendToWorker(b"w1.1", Fence(epoch=1)),
        SendToWorker(
            b"w0.1",
            Prepare(
                epoch=1,
                layers=LayerRange(0, 3),
                standby=(LayerRange(3, 6),),
                edge=Edge("w1.1", "tcp://w1.1"),
                max_sequences=64,
            ),
        ),
        SendToWorker(
            b"w1.1",
            Prepare(
                epoch=1,
                layers=LayerRange(3, 6),
                standby=(LayerRange(0, 3),),
                edge=Edge("broker", "data"),
                max_sequences=64,
            ),
        ),
        ProbeRoute(1, "tcp://w0.1"),
    ]
    # One is ready: the other is waited for.
    assert bench.tell("w1", bench.workers["w1"].prepared(1)) == []
    assert bench.tell("w0", bench.workers["w0"].prepared(1)) == [
        SendToWorker(b"w0.1", Fence(epoch=1)),
        SendToWorker(b"w1.1", Fence(epoch=1)),
        SendToWorker(b"w0.1", Activate(epoch=1, first_step=1, live=())),
        SendToWorker(b"w1.1", Activate(epoch=1, first_step=1, live=())),
        ConnectPipeline(1, "tcp://w0.1"),
    ]
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    assert not bench.state.plans.is_serving
    activated = [Activated(epoch=1, incarnation=f"w{i}.1", held=(), logs=()) for i in (0, 1)]
    assert bench.tell("w0", activated[0]) == []
    (note,) = bench.tell("w1", activated[1])
    assert isinstance(note, WriteLog)
    assert note.event == "plan_serving"
    assert bench.state.plans.is_serving


def test_nothing_carries_an_epoch_that_is_not_written(bench: Bench) -> None:
    """While the journal is slow, whoever joins, is called back or has its lease renewed hears only of written epochs
    (the bench checks every order)."""
    bench.serve(2)
    bench.held = {WriteEpoch}
    bench.lose("w1")
    assert bench.state.plans.epoch == 2
    bench.join("w2")
    welcome = next(o for o in orders_to(bench, "w2") if isinstance(o, Welcome))
    assert welcome.epoch == 1
    bench.tick(3.0)
    assert {o.epoch for _, o in orders(bench.log, LeaseRenewed)} == {1}
    bench.write_out()
    bench.tick()
    assert bench.state.plans.is_serving


def test_a_written_epoch_that_nobody_wants_any_more_is_not_announced(bench: Bench) -> None:
    """If the plan changed while its epoch was being written, the answer of the journal starts nothing."""
    bench.serve(3)
    bench.held = {WriteEpoch}
    bench.lose("w1")
    bench.lose("w2")  # a second death before the first epoch is written: another epoch
    bench.tick()
    assert bench.feed(EpochWritten(2)) == []
    assert orders(bench.feed(EpochWritten(3)), Prepare)


def test_the_first_plan_waits_for_those_asked_for(make_bench) -> None:
    """A swarm that starts with several workers makes its first plan with all of them, or with whoever came in time."""
    bench = make_bench(planning(min_workers=2, gather_s=5.0))
    bench.join("w0")
    bench.tick(1.0)
    assert bench.state.plans.waits_for == "1 more of 2 workers"
    assert said(make_bench(planning(min_workers=1)).say(Describe()))[0].waits_for == "1 more worker"
    bench.join("w1")
    bench.tick()
    assert ranges(bench) == {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
    # Another swarm, whose second worker never comes.
    bench = make_bench(planning(min_workers=2, gather_s=5.0))
    bench.join("w0")
    bench.tick(4.9)
    assert bench.state.plans.current is None
    bench.tick(0.3)
    assert ranges(bench) == {"w0": LayerRange(0, 6)}


def test_what_is_waited_for_is_told_as_of_now(make_bench) -> None:
    """Each worker that joins is counted in the very next answer, before any tick; when all are there, the first plan is
    made at once."""
    bench = make_bench(planning(min_workers=3, settle_s=1.0))

    def waits_for() -> str:
        (answer,) = said(bench.say(Describe()))
        assert isinstance(answer, Description)
        return answer.waits_for

    assert waits_for() == "3 more of 3 workers"
    for number, rest in enumerate(("2 more of 3 workers", "1 more of 3 workers", "")):
        bench.join(f"w{number}")
        assert waits_for() == rest
    for number in range(3):
        bench.lose(f"w{number}")
    assert waits_for() == "a worker: none is here"
    bench.join("w3")
    assert waits_for() == "a quiet moment: workers have just joined or left"


def test_workers_that_come_together_make_one_plan(make_bench) -> None:
    """Workers that come one after the other make one plan, once it has been quiet for a moment."""
    bench = make_bench(planning(settle_s=1.0))
    for name in ("w0", "w1", "w2"):
        bench.join(name)
        bench.tick(0.5)
    assert bench.state.plans.epoch == 0
    bench.tick(0.6)
    assert bench.state.plans.epoch == 1
    assert len(ranges(bench)) == 3


# --- a newcomer ------------------------------------------------------------------------------------------------------


def test_newcomer_is_planned_for_in_the_background(serving: Bench) -> None:
    """While the new layers load, the old plan runs on, step after step; nobody is fenced before everybody is ready."""
    serving.say(submit(max_tokens=100, ignore_eos=True))
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    assert serving.state.plans.phase is PlanPhase.PREPARING
    assert orders(serving.take(), Fence) == []
    # Steps of the old epoch go on being dispatched.
    for _ in range(5):
        (step,) = steps(serving.finish())
        assert step.epoch == 1
    before = serving.sequence().num_generated
    # The newcomer is ready: one cut, and the sequence goes on from what is acknowledged.
    serving.mute = set()
    serving.take()
    serving.tell("w2", serving.workers["w2"].prepared(2))
    activations = [(peer, o.live) for peer, o in orders(serving.log, Activate)]
    live = (SequencePosition(1, before + 2),)  # three prompt tokens, the last drawn one is not computed yet
    assert activations == [("w0.1", live), ("w2.1", live), ("w1.1", live)]
    # In the middle, so that the others keep what they have.
    assert ranges(serving) == {"w0": LayerRange(0, 2), "w2": LayerRange(2, 4), "w1": LayerRange(4, 6)}
    (step,) = steps(serving.log)
    assert step.epoch == 2
    assert serving.sequence().num_generated == before


def test_results_of_the_old_epoch_are_dropped_after_the_cut(serving: Bench) -> None:
    """What was in the pipe at the cut no longer counts: its late answer is counted and changes nothing."""
    serving.say(submit())
    late = serving.pipe[0]
    serving.join("w2")
    serving.tick()
    serving.take()
    assert serving.finish(late) == []
    assert serving.state.counters["stale_steps"] == 1
    assert serving.sequence().num_generated == 0
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_fence_before_activate_for_everybody(serving: Bench) -> None:
    """At the cut, all workers hear the fence before any hears the activation; the pipe opens after that."""
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    serving.take()
    actions = serving.tell("w2", serving.workers["w2"].prepared(2))
    kinds = [type(a.message) if isinstance(a, SendToWorker) else type(a) for a in actions]
    assert kinds == [Fence] * 3 + [Activate] * 3 + [ConnectPipeline]


def test_a_newcomer_that_dies_while_loading_disturbs_nobody(serving: Bench) -> None:
    """The plan under way is dropped, the one in force stays, with its epoch and its steps."""
    serving.say(submit())
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    serving.take()
    serving.lose("w2")
    serving.tick()
    assert serving.take() == []
    assert serving.epoch == 1
    assert serving.state.plans.phase is PlanPhase.SERVING
    assert serving.state.plans.waits_for == ""
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_no_worker_moves_an_epoch(bench: Bench) -> None:
    """Whatever it says that it has heard of: the next plan's is the one after the last."""
    worker = bench.add("w0")
    worker.epoch = 2**63 - 1
    bench.tell("w0", worker.hello())
    bench.tick()
    assert bench.epoch == 1


# --- refusals and silence --------------------------------------------------------------------------------------------


def test_refusal_takes_the_worker_out_of_the_plan(bench: Bench) -> None:
    """Who can't carry out the plan is not asked again; the others take its layers."""
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.tell("w1", Refused(epoch=1, incarnation="w1.1", reason="a shard is corrupt"))
    bench.tick()
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    assert bench.state.workers["w1.1"].state is WorkerState.REFUSED


def test_if_everybody_refuses_the_reason_is_told(bench: Bench) -> None:
    """Nobody can load the model: the swarm says what it waits for, and why nobody could."""
    bench.mute = {"w0"}
    bench.join("w0")
    bench.tick()
    bench.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="a shard is corrupt"))
    bench.tick()
    assert bench.state.plans.waits_for == "a worker that can load the model: w0 refused: a shard is corrupt"
    assert bench.state.plans.phase is PlanPhase.NONE


def test_what_was_refused_is_forgotten_and_nothing_else(bench: Bench) -> None:
    """Whoever refused is a member again; whoever is on the way out stays so."""
    bench.join("w0", "w1")
    refusing, leaving = bench.state.workers["w0.1"], bench.state.workers["w1.1"]
    for worker in (refusing, leaving):
        worker.record_refusal(LayerRange(0, 3), "no room", bench.now)
        assert worker.state is WorkerState.REFUSED
    leaving.state = WorkerState.LEAVING
    for worker in (refusing, leaving):
        worker.forget_refusals()
        assert not worker.has_refused(LayerRange(0, 3))
    assert (refusing.state, leaving.state) == (WorkerState.MEMBER, WorkerState.LEAVING)


@pytest.mark.slow
def test_who_refused_is_asked_again_later(bench: Bench) -> None:
    """What it refused is asked of it again after half a minute, in the background, then after twice as long, at last
    every ten minutes; the swarm serves meanwhile. When it can load, it is a member like any other."""
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    asked_at = []
    while len(asked_at) < 8:
        bench.tick(1.0)
        for _, prepare in [o for o in orders(bench.log, Prepare) if o[0] == "w1.1"]:
            asked_at.append(bench.now)
            bench.tell("w1", Refused(epoch=prepare.epoch, incarnation="w1.1", reason="no room on the disk"))
        bench.log.clear()
        assert bench.state.plans.is_serving or not asked_at
    waits = [round(b - a) for a, b in itertools.pairwise(asked_at)]
    assert waits == pytest.approx([30, 60, 120, 240, 480, 600, 600], abs=2)
    bench.mute = set()
    bench.tick(700.0)
    assert set(ranges(bench)) == {"w0", "w1"}
    worker = bench.state.workers["w1.1"]
    assert (worker.state, worker.num_retries) == (WorkerState.MEMBER, 0)


def test_who_refused_is_asked_for_other_layers_when_the_members_change(bench: Bench) -> None:
    """It refused three layers; with a third worker its share is two others, and it may well have room for those."""
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.tell("w1", Refused(epoch=1, incarnation="w1.1", reason="no room for three"))
    bench.tick()
    bench.mute = set()
    bench.join("w2")
    bench.tick()
    assert {name: len(layers) for name, layers in ranges(bench).items()} == {"w0": 2, "w1": 2, "w2": 2}
    assert bench.state.workers["w1.1"].state is WorkerState.MEMBER


def test_a_worker_that_refuses_everything_makes_no_loop(bench: Bench) -> None:
    """Whatever the plan asks of it, it refuses: within one patience nobody is asked twice for the same."""
    bench.mute = {"w1"}
    bench.join("w0", "w1", "w2", memory_bytes=OVERHEAD + 6 * MIB)
    for _ in range(200):
        bench.tick()
        for _, prepare in [o for o in orders(bench.log, Prepare) if o[0] == "w1.1"]:
            bench.tell("w1", Refused(epoch=prepare.epoch, incarnation="w1.1", reason="I don't want to"))
        bench.log.clear()
    assert bench.epoch <= 3
    assert set(ranges(bench)) == {"w0", "w2"}


def test_refusal_of_an_old_plan_is_counted(serving: Bench) -> None:
    """A late refusal means nothing."""
    serving.tell("w0", Refused(epoch=1, incarnation="w0.1", reason="late"))
    assert serving.state.counters["stale_control"] == 1
    assert serving.state.workers["w0.1"].state is WorkerState.MEMBER


@pytest.mark.parametrize("late", ["prepare", "activate"])
def test_who_does_not_answer_in_time_is_out(make_bench, late: str) -> None:
    """After the deadline the plan is made again, with a higher epoch, without whoever was late."""
    bench = make_bench(planning(prepare_timeout_s=3.0, activate_timeout_s=3.0))
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    if late == "activate":
        bench.tell("w1", bench.workers["w1"].prepared(1))
    bench.tick(2.8)
    assert bench.state.plans.epoch == 1
    bench.tick(0.5)
    assert bench.epoch == 2
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    worker = bench.state.workers["w1.1"]
    assert (worker.state, worker.reason) == (WorkerState.OUT, f"did not {late} epoch 1 in time")


@pytest.mark.parametrize("asked_to_leave", [False, True])
def test_who_is_late_is_lost_like_others(make_bench, asked_to_leave: bool) -> None:
    """Counted, told and recorded as every loss; of one that has said that it goes, told as that. Two that are late
    make one new plan."""
    bench = make_bench(planning(activate_timeout_s=3.0))
    bench.serve(3)
    bench.say(submit(max_tokens=20))
    bench.take()
    bench.mute = {"w1", "w2"}
    bench.lose("w0")
    for name in bench.mute:
        bench.tell(name, bench.workers[name].prepared(2))
    if asked_to_leave:
        bench.state.workers["w1.1"].wants_to_leave = True
    lost_before = bench.state.counters["workers_lost"]
    told = bench.tick(3.5)
    named = {
        n.fields["worker"]: n.event
        for n in told
        if isinstance(n, WriteLog) and n.event in ("worker_out", "worker_left")
    }
    assert named == {"w1": "worker_left" if asked_to_leave else "worker_out", "w2": "worker_out"}
    assert bench.state.counters["workers_lost"] == lost_before + (1 if asked_to_leave else 2)
    assert bench.state.workers["w1.1"].state is (WorkerState.LEFT if asked_to_leave else WorkerState.OUT)
    assert bench.judgements_of("w2").verdict is Verdict.DEAD
    recovery = bench.state.recoveries.current
    assert recovery is not None
    assert recovery.workers.items == ["w0", "w1", "w2"]
    assert bench.state.plans.epoch == 2, "nobody is left to plan with"


def test_a_long_load_is_waited_for_while_bytes_move(make_bench) -> None:
    """Each word of more bytes gives it the whole time again. The same bytes again, or those of an older plan, don't."""
    bench = make_bench(planning(prepare_timeout_s=3.0))
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()

    def loaded(num_bytes: int, epoch: int = 1) -> None:
        bench.tick(2.8)
        bench.tell("w1", LoadProgress(epoch=epoch, incarnation="w1.1", loaded_bytes=num_bytes, total_bytes=100))

    for num_bytes in (10, 20, 30):
        loaded(num_bytes)
        assert bench.state.plans.epoch == 1
    loaded(30)
    loaded(40, epoch=0)
    assert bench.epoch == 2
    assert bench.state.workers["w1.1"].reason == "did not prepare epoch 1 in time"


def test_answers_to_an_older_plan_are_counted(serving: Bench) -> None:
    """Prepared and Activated of an epoch that is over change nothing."""
    serving.tell("w0", serving.workers["w0"].prepared(0))
    serving.tell("w0", Activated(epoch=0, incarnation="w0.1", held=(), logs=()))
    assert serving.take() == []
    assert serving.state.counters["stale_control"] == 2


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_death_while_serving(serving: Bench) -> None:
    """The pipe is closed at once and a new epoch is made with the others: fence, prepare, activate; the sequence goes
    on from what every stage has acknowledged, or from what is really there."""
    serving.say(submit())
    for _ in range(3):
        serving.finish()
    serving.take()
    serving.workers["w0"].held = {1: 2}  # the survivor has lost most of it
    actions = [a for a in serving.lose("w1") if not isinstance(a, WriteLog)]
    assert actions == [DisconnectPipeline(), WriteEpoch(2, ("w0",))]
    kinds = [type(o) for _, o in orders(serving.log)]
    assert kinds == [Fence, Prepare, Fence, Activate]
    (step,) = steps(serving.log)
    assert (step.epoch, step.truncate) == (2, (SequencePosition(1, 2),))
    assert [(r.start, r.count, r.sample) for r in step.rows] == [(2, 4, True)]
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_death_while_preparing_the_first_plan(bench: Bench) -> None:
    """The plan is made again with those that are left."""
    bench.mute = {"w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.lose("w1")
    bench.tick()
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    assert bench.epoch == 2


def test_death_while_nobody_is_served_is_answered_at_once(make_bench) -> None:
    """Without a plan in force there is nothing to wait for: the next plan does not settle first."""
    bench = make_bench(planning(settle_s=5.0))
    bench.mute = {"w0", "w1"}
    bench.join("w0", "w1")
    bench.tick(5.1)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    bench.take()
    bench.lose("w1")
    assert [peer for peer, _ in orders(bench.log, Prepare)] == ["w0.1"]


def test_death_while_activating(bench: Bench) -> None:
    """A member that dies behind the fence: one more epoch, nothing is dispatched in between."""
    bench.serve(1)
    bench.say(submit())
    bench.mute = {"w1"}
    bench.join("w1")
    bench.tick()
    bench.tell("w1", bench.workers["w1"].prepared(2))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    bench.take()
    bench.lose("w1")
    (step,) = [a.step for a in bench.take() if isinstance(a, Dispatch)]
    assert step.epoch == bench.epoch == 3


def test_death_of_a_member_while_another_plan_is_prepared(serving: Bench) -> None:
    """Both plans rely on the dead one: both are void, and the next is made of who is left; who holds layers keeps
    them."""
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    serving.mute = set()
    serving.lose("w0")
    assert serving.epoch == 3
    assert ranges(serving) == {"w2": LayerRange(0, 3), "w1": LayerRange(3, 6)}


def test_death_of_a_leaving_member_voids_the_plan_under_way(serving: Bench) -> None:
    """The plan in force breaks though the one under way does not rely on the dead: the fence is up at once, and the
    new plan starts afresh."""
    serving.mute = {"w0"}
    serving.say(StopWorker(worker="w1"))
    serving.tick()
    assert serving.state.plans.phase is PlanPhase.PREPARING
    serving.mute = set()
    serving.lose("w1")
    assert serving.epoch == 3
    assert ranges(serving) == {"w0": LayerRange(0, 6)}


def test_a_death_without_replacement_waits_and_says_for_what(make_bench) -> None:
    """If the others can't hold the model, the swarm waits; requests stay, and are served when there is room again."""
    bench = make_bench().serve(2, memory_bytes=OVERHEAD + 5 * MIB)
    bench.say(submit())
    bench.lose("w1")
    book = bench.state.plans
    assert (book.phase, book.current, book.upcoming) == (PlanPhase.NONE, None, None)
    assert "more memory" in book.waits_for
    assert "w0 69 MiB" in book.waits_for
    bench.tick(1.0)
    bench.join("w2", memory_bytes=OVERHEAD + 5 * MIB)
    bench.tick()
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_a_shortage_is_told_once(make_bench) -> None:
    """The log gets a line when what is waited for changes, not at every tick."""
    bench = make_bench()
    bench.join("w0", memory_bytes=MIB)
    bench.tick(2.0)
    waits = [a for a in bench.log if isinstance(a, WriteLog) and a.event == "swarm_waits"]
    assert len(waits) == 1
    # A second small one changes the text.
    bench.join("w1", memory_bytes=MIB)
    bench.tick(2.0)
    assert len([a for a in bench.log if isinstance(a, WriteLog) and a.event == "swarm_waits"]) == 2


def test_trouble_makes_a_new_epoch_with_the_same_workers(serving: Bench) -> None:
    """A stage that meets something impossible keeps its place; the data path is made anew."""
    serving.say(submit())
    serving.take()
    serving.tell("w0", DataPathError(epoch=1, incarnation="w0.1", reason="a step is missing"))
    assert serving.epoch == 2
    assert set(ranges(serving)) == {"w0", "w1"}
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_a_step_that_did_not_come_is_nobodys_fault(serving: Bench) -> None:
    """However often the network loses one: whoever was under way is not quarantined."""
    serving.say(submit(max_tokens=50))
    for _ in range(QUARANTINE_AFTER + 2):
        lost = DataPathError(epoch=serving.epoch, incarnation="w0.1", reason="step 7 is missing", damaged=True)
        serving.tell("w0", lost)
        for _ in range(3):
            serving.finish()
    assert serving.sequence().num_deaths == 0
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_trouble_of_an_older_epoch_is_settled(serving: Bench) -> None:
    """A second stage's Trouble about the same thing must not void the plan that answered the first."""
    serving.say(submit())
    serving.tell("w0", DataPathError(epoch=1, incarnation="w0.1", reason="a step is missing"))
    serving.take()
    assert serving.tell("w1", DataPathError(epoch=1, incarnation="w1.1", reason="a step is missing")) == []
    assert serving.epoch == 2
    assert serving.state.counters["stale_control"] == 1


# --- inventory -------------------------------------------------------------------------------------------------------


def test_the_least_position_decides(serving: Bench) -> None:
    """A sequence resumes from what every layer of every stage holds, whatever the broker hoped for."""
    serving.say(submit())
    for _ in range(4):
        serving.finish()
    assert serving.sequence().kv == 6
    serving.workers["w0"].held = {1: 5}
    serving.workers["w1"].held = {1: 4}
    serving.take()
    serving.join("w2")
    serving.workers["w2"].held = {1: 6}
    serving.tick()
    (step,) = steps(serving.take())
    assert step.truncate == (SequencePosition(1, 4),)
    assert [(r.start, r.count) for r in step.rows] == [(4, 3)]


def test_a_stage_that_knows_nothing_is_rebuilt_from_the_start(serving: Bench) -> None:
    """A sequence that is missing in one inventory is computed again from its first token, through that stage's layers
    and those before them where nobody has a log; the others keep what they hold."""
    serving.say(submit())
    for _ in range(4):
        serving.finish()
    kv = serving.sequence().kv
    serving.workers["w0"].held = {1: 0}
    serving.take()
    serving.join("w2")
    serving.tick()
    (step,) = steps(serving.take())
    assert step.replay
    assert step.through is not None
    assert step.through.first == 0
    assert step.through.stop == ranges(serving)["w0"].stop
    assert [(r.start, r.count) for r in step.rows] == [(0, kv)]
    assert step.open[0].tokens == tuple(serving.sequence().tokens)


def test_sequences_that_no_longer_fit_wait_again_in_their_order(make_bench) -> None:
    """Under a smaller plan the oldest keep their room; the others wait, in order, before whoever has not run yet, and
    are computed again: nothing fails for that."""
    bench = make_bench(scheduling(max_running=4)).serve(1, kv_capacity=4 * 32)
    for name in "abcde":
        bench.say(submit(name, max_tokens=20))
    bench.finish()
    bench.finish()
    assert [s.request.id for s in bench.state.waiting] == ["e"]
    # A newcomer with room for two.
    bench.join("w1", kv_capacity=2 * 32)
    bench.tick()
    assert [s.request.id for s in bench.state.running] == ["a", "b"]
    assert [s.request.id for s in bench.state.waiting] == ["c", "d", "e"]
    bench.run_dry()
    assert {r.id: r.sequences[0].reason for r in bench.state.requests.values()} == dict.fromkeys("abcde", "length")
    assert bench.sequence("c").num_recomputed == 1


def test_what_fits_no_plan_ends_after_a_while(make_bench) -> None:
    """A request taken while no plan was in force, and larger than what the next plan holds, is not left waiting for
    ever: it fails, with the size of the stages, once plans have served for the patience without room for it."""
    bench = make_bench(settings(requests=request_settings(too_large_patience_s=30.0)))
    bench.mute = {"w0"}
    bench.join("w0", kv_capacity=4 * 32)
    bench.say(submit("large", max_tokens=200))
    bench.say(submit("small"))
    bench.tick(60.0)  # nobody knows yet what the plan will hold
    assert bench.sequence("large").reason is None
    bench.tell("w0", bench.workers["w0"].prepared(1))
    bench.tell("w0", bench.workers["w0"].activated(Activate(epoch=1, first_step=1, live=())))
    bench.run_dry()
    assert bench.sequence("small").reason == "length"
    bench.tick(29.0)
    assert bench.sequence("large").reason is None
    bench.take()
    bench.tick(1.5)
    (end,) = said(bench.take(), Finished)
    assert isinstance(end, Finished)
    assert (end.request_id, end.reason) == ("large", "failed")
    assert end.detail.startswith("prompt and max_tokens make 203 positions, the stages hold 128: ask for fewer tokens")


def test_a_plan_that_is_small_for_a_moment_ends_nothing(make_bench) -> None:
    """A sequence that loses its room to a smaller plan waits for a larger one, and goes on where it was."""
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=200))
    bench.finish()
    for number in range(3):  # together longer than the patience
        bench.join("small", incarnation=f"small.{number}", kv_capacity=4 * 32)
        bench.tick(15.0)
        assert bench.sequence().state is SequenceState.WAITING
        bench.lose("small")
        bench.tick()
        assert bench.sequence().state is SequenceState.RUNNING
    bench.run_dry()
    assert bench.sequence().reason == "length"


# --- quarantine ------------------------------------------------------------------------------------------------------


def test_quarantine_after_three_deaths(make_bench) -> None:
    """A request that was in flight at three deaths ends, with that reason. A death counts once, however many steps
    carried the request; one that was not in flight goes on."""
    serving = make_bench(scheduling(prefill_chunk=32))
    serving.join("w0", "w1")
    serving.tick(1.0)
    serving.say(submit("poison", num_prompt=90, max_tokens=50))
    for death in range(1, QUARANTINE_AFTER + 1):
        assert len(serving.pipe) == 2  # two chunks of the poison are under way
        serving.take()
        if death == QUARANTINE_AFTER:
            serving.held = {WriteEpoch}
        serving.lose("w1")
        if death < QUARANTINE_AFTER:
            assert serving.sequence("poison").num_deaths == death
            serving.join("w1", incarnation=f"w1.{death + 1}")
            serving.tick()
    (end,) = said(serving.take(), Finished)
    assert isinstance(end, Finished)
    assert (end.reason, end.detail) == ("failed", "quarantined: it was in flight at 3 worker deaths or losses of steps")
    # Others are served as before.
    serving.held = set()
    serving.write_out()
    serving.say(submit("good"))
    serving.run_dry()
    assert serving.sequence("good").reason == "length"


def test_only_deaths_count(serving: Bench) -> None:
    """A newcomer, a departure, a re-plan: none of these is held against a request."""
    serving.say(submit(max_tokens=50))
    serving.join("w2")
    serving.tick()
    serving.say(StopWorker(worker="w2"))
    serving.tick()
    serving.tick()
    assert serving.epoch == 3
    assert serving.sequence().num_deaths == 0


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_who_leaves_hands_its_layers_over_first(serving: Bench) -> None:
    """First the others take its layers, then it is released; nothing that runs is lost."""
    serving.say(submit())
    serving.mute = {"w1"}
    serving.take()
    report = serving.ask(StopWorker(worker="w0"))
    assert report == Report(what="stop", ok=True, body={"worker": "w0", "state": "leaving"})
    serving.tick()
    assert orders(serving.log, Release) == []
    serving.finish()  # the old plan runs on
    serving.tell("w1", serving.workers["w1"].prepared(2))
    serving.tell("w1", serving.workers["w1"].activated(Activate(epoch=2, first_step=1, live=())))
    assert ranges(serving) == {"w1": LayerRange(0, 6)}
    assert [peer for peer, _ in orders(serving.log, Release)] == ["w0.1"]
    serving.run_dry()
    assert serving.sequence().reason == "length"
    # Its process ends: that is no loss.
    serving.take()
    assert serving.lose("w0") == []
    assert serving.state.counters.get("workers_lost", 0) == 0


def test_a_worker_that_wants_to_leave(serving: Bench) -> None:
    """A worker's own Leaving is the same procedure."""
    serving.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM"))
    serving.tick()
    assert ranges(serving) == {"w1": LayerRange(0, 6)}
    assert [peer for peer, _ in orders(serving.log, Release)] == ["w0.1"]


def test_a_worker_that_leaves_before_it_is_let_go_is_no_loss(serving: Bench) -> None:
    """It said that it wants to go, and did not wait: nobody is blamed, nothing is counted, and it has left."""
    serving.say(submit(max_tokens=100))
    serving.mute = {"w0", "w1"}
    serving.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM"))
    serving.tick()
    assert serving.state.plans.phase is PlanPhase.PREPARING
    serving.mute = set()
    assert not [a for a in serving.lose("w0") if isinstance(a, WriteLog) and a.level != "info"]
    assert serving.state.counters.get("workers_lost", 0) == 0
    assert serving.sequence().num_deaths == 0
    assert serving.state.workers["w0.1"].state is WorkerState.LEFT
    serving.run_dry()
    assert serving.sequence().num_generated == 100


def test_a_plan_under_way_is_dropped_when_one_of_it_wants_to_leave(serving: Bench) -> None:
    """The newcomer of a plan that is being prepared asks to leave: the plan in force stays, and it is released."""
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    assert serving.state.plans.phase is PlanPhase.PREPARING
    serving.tell("w2", Leaving(incarnation="w2.1", reason="SIGTERM"))
    serving.tick()
    assert serving.epoch == 1
    assert [peer for peer, _ in orders(serving.log, Release)] == ["w2.1"]


def test_a_stranger_may_leave_at_once(serving: Bench) -> None:
    """Who is no member (any more) need not wait for a plan."""
    serving.add("w9")
    answer = orders(serving.tell("w9", Leaving(incarnation="w9.1", reason="SIGTERM")))
    assert answer == [("w9.1", Release(epoch=1, reason="no plan needs it"))]


def test_the_last_worker_may_leave(make_bench) -> None:
    """It is let go at once; the swarm waits for another, and says so."""
    bench = make_bench().serve(1)
    bench.say(submit())
    bench.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM"))
    assert [peer for peer, _ in orders(bench.log, Release)] == ["w0.1"]
    assert bench.state.plans.current is None
    assert bench.state.plans.waits_for == "a worker: none is here"
    assert report_status(bench.state, bench.now)["kv_capacity"] == 0  # nor has it any room
    assert report_scheduler(bench.state)["kv_capacity"] == 0
    bench.join("w1")
    bench.tick()
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_stopping_an_indispensable_worker_needs_force(make_bench) -> None:
    """The answer says what the swarm would wait for; with force it goes at once."""
    bench = make_bench().serve(2, memory_bytes=OVERHEAD + 5 * MIB)
    refused = bench.ask(StopWorker(worker="w0"))
    assert not refused.ok
    assert "can't do without w0" in str(refused.body["error"])
    assert bench.state.plans.is_serving
    done = bench.ask(StopWorker(worker="w0", force=True))
    assert done == Report(what="stop", ok=True, body={"worker": "w0", "state": "left"})
    assert bench.state.plans.current is None


def test_stopping_the_only_worker(make_bench) -> None:
    """The answer does not deny that it has joined."""
    refused = make_bench().serve(1).ask(StopWorker(worker="w0"))
    assert refused.body["error"] == (
        "the swarm can't do without w0, it would wait for another worker, since this is the only one "
        "(--force stops it anyway)"
    )


def test_a_name_that_nobody_has_is_answered_with_those_there_are(serving: Bench) -> None:
    """A name that nobody has is answered with those there are."""
    report = serving.ask(StopWorker(worker="w7"))
    assert report == Report(what="stop", ok=False, body={"error": "no worker 'w7': the workers are w0, w1"})


def test_a_released_worker_is_not_called_back(serving: Bench) -> None:
    """Beats that were on their way when it was released mean nothing; it has left, and is not dead. If it goes on
    beating, or knocks again, it has not heard of its release and is told again."""
    serving.say(StopWorker(worker="w0"))
    serving.tick()
    assert serving.state.workers["w0.1"].state is WorkerState.LEFT
    assert serving.judgements_of("w0").verdict is Verdict.LEFT
    serving.take()
    assert serving.beat("w0") == []
    serving.tick(1.5)
    assert orders(serving.take(), Rejoin) == []
    serving.tick(1.0)
    again = [("w0.1", Release(epoch=2, reason="it was asked to leave, and no plan needs it"))]
    assert [(peer, o) for peer, o in orders(serving.take()) if peer == "w0.1"] == again
    assert orders(serving.tell("w0", serving.workers["w0"].hello())) == again
    serving.tick(1.0)
    assert set(ranges(serving)) == {"w1"}


# --- coming back -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_that_beats_again_is_called_back(make_bench) -> None:
    """Declared out, it is fenced and asked to say Hello; it is asked again only after a while; after its Hello it is a
    member like any other."""
    bench = make_bench(settings(plan=ReconfigurationSettings(settle_s=0.0))).serve(2)
    bench.silent = {"w1"}
    bench.tick(1.0)
    assert ranges(bench) == {"w0": LayerRange(0, 6)}
    assert "no heartbeat" in bench.state.workers["w1.1"].reason
    bench.take()
    # It was only frozen. The first beat calls it back.
    assert bench.beat("w1") == [
        SendToWorker(b"w1.1", Fence(epoch=2)),
        SendToWorker(b"w1.1", Rejoin(epoch=2, reason=bench.state.workers["w1.1"].reason)),
    ]
    assert bench.beat("w1") == []
    bench.tick(1.0)
    assert bench.beat("w1") == []
    bench.tick(1.5)
    assert [type(o) for _, o in orders(bench.beat("w1"))] == [Fence, Rejoin]
    bench.silent = set()
    bench.take()
    bench.tell("w1", bench.workers["w1"].hello())
    bench.tick()
    assert set(ranges(bench)) == {"w0", "w1"}


def test_whoever_the_plan_does_without_is_dismissed(serving: Bench) -> None:
    """A worker that the plan does not need is told to forget all sequences: at once if it joins a serving swarm, and
    whenever a plan without it begins to serve."""
    serving.join("w2", memory_bytes=MIB)  # too small for a single layer
    kinds = [type(o) for o in orders_to(serving, "w2")]
    assert kinds == [Welcome, Unassign]
    serving.tick()
    serving.take()
    serving.lose("w1")
    assert [o for o in orders_to(serving, "w2") if isinstance(o, Unassign)] == [Unassign(epoch=2)]


def test_a_second_hello_voids_what_was_under_way(serving: Bench) -> None:
    """A member that says Hello again has lost its connection, and with it perhaps orders: a new epoch is made."""
    serving.take()
    serving.tell("w1", serving.workers["w1"].hello())
    serving.tick()
    assert serving.epoch > 1
    assert set(ranges(serving)) == {"w0", "w1"}


def test_a_restarted_worker_takes_its_formers_place(serving: Bench) -> None:
    """A new process with the same name replaces the old one; nothing of the former is kept. (``test_names`` has who may
    do that, and when.)"""
    serving.lose("w1")
    serving.join("w1", incarnation="w1.2")
    serving.tick()
    assert {s.incarnation for s in serving.state.plans.current.stages} == {"w0.1", "w1.2"}
    assert "w1.1" not in serving.state.workers
    # What the former still says is a stranger's.
    assert serving.feed(HeartbeatReceived(beat_of("w1.1"))) == []
    assert serving.state.counters["strangers"] == 1


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_worker_of_the_brokers_machine_is_not_replaced_from_elsewhere(serving: Bench, is_gone: bool) -> None:
    """Who joins from elsewhere chose its name itself; whoever has it here stays, or may come back. The other way round
    the machine's own is taken."""
    if is_gone:
        serving.lose("w1")
    serving.take()
    stranger = serving.add("w1", "w1.2")
    serving.feed(WorkerMessageReceived(stranger.peer, stranger.hello(), "w1"))
    ((peer, denied),) = orders(serving.take(), Denied)
    assert (peer, "w1-SOMETHING" in str(denied)) == ("w1.2", True)
    assert serving.state.workers["w1.1"].is_gone is is_gone
    far = serving.add("far", "far.1")
    serving.feed(WorkerMessageReceived(far.peer, far.hello(), "far"))
    serving.join("far", incarnation="far.2")
    assert [peer for peer, _ in orders(serving.take(), Denied)] == ["far.1"]
    assert not serving.state.workers["far.2"].is_gone


def test_a_member_replaces_its_own_worker(serving: Bench) -> None:
    """Started anew, before anybody has noticed the end of the former."""
    for number in (1, 2):
        far = serving.add("far", f"far.{number}")
        serving.feed(WorkerMessageReceived(far.peer, far.hello(), "far"))
    serving.feed(WorkerDisconnected(b"far.1"))
    assert "far.1" not in serving.state.workers
    assert not serving.state.workers["far.2"].is_gone


def test_a_former_that_was_out_already_is_not_denied(serving: Bench) -> None:
    """Its connection has closed: there is nobody to tell."""
    serving.lose("w1")
    serving.join("w1", incarnation="w1.2")
    assert orders(serving.log, Denied) == []


def test_a_stranger_that_beats_is_called(serving: Bench) -> None:
    """A worker that the broker does not know (it was forgotten, or the broker is a new one) may say Hello; it is not
    asked at every beat, and there is an end to how many are remembered."""
    call = [SendToWorker(b"w9.1", Rejoin(epoch=1, reason="the broker has no record of this worker"))]
    assert serving.feed(HeartbeatReceived(beat_of("w9.1"))) == call
    assert serving.feed(HeartbeatReceived(beat_of("w9.1"))) == []
    serving.tick(2.5)
    assert serving.feed(HeartbeatReceived(beat_of("w9.1"))) == call
    for number in range(3 * MAX_REMEMBERED):
        serving.feed(HeartbeatReceived(beat_of(f"x.{number}")))
    assert len(serving.state.non_members) == MAX_REMEMBERED


# --- who may join ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"wire_versions": (70, 71)}, "upgrade the older one"),
        ({"schema": "0123456789abcdef"}, "install the same version on both"),
        ({"manifest": fake_manifest(num_layers=7)}, "another model"),
        ({"device": "abacus"}, "device 'abacus' is none of cpu, cuda, mps"),
    ],
)
def test_who_cannot_be_a_member_is_told_why(serving: Bench, changes: dict, text: str) -> None:
    """Who can't be a member is told why and changes nothing."""
    worker = serving.add("w2")
    (order,) = [a for a in serving.tell("w2", worker.hello(**changes)) if isinstance(a, SendToWorker)]
    assert isinstance(order.message, Denied)
    assert text in order.message.reason
    assert "w2.1" not in serving.state.workers
    serving.tick()
    assert serving.epoch == 1


def test_strangers_are_counted(serving: Bench) -> None:
    """Messages of a peer that never said Hello change nothing."""
    serving.add("w9")
    assert (
        serving.tell(
            "w9", Prepared(incarnation="w9.1", kv_capacity=1, max_sequences=1, load_s=0, warm_up_s=0, resident_bytes=0)
        )
        == []
    )
    assert serving.state.counters["strangers"] == 1


def test_who_says_twice_that_it_leaves_is_heard_once(serving: Bench) -> None:
    """What to do without it is found out once, and told once."""
    serving.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM"))
    serving.log.clear()
    assert serving.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM")) == []


def why_of(bench: Bench) -> list[str]:
    return bench.ask(Query(what="plan")).body["why"]


def test_the_plan_explains_itself(serving: Bench) -> None:
    """One sentence per stage: who, which layers, how much memory. Then the objective, the slowest stage, what it was
    weighed against, and what one more worker would change."""
    assert why_of(serving)[:8] == [
        "w0 holds layers 0–2: 3 of 6, 4.0 MiB of its 200 MiB",
        "w1 holds layers 3–5: 3 of 6, 4.0 MiB of its 200 MiB",
        "objective throughput: for 8 sequences of 512 positions that decode together in each of 2 steps in flight, "
        "with 1 position of prompt per token, a step is 8.6 ms in transit through all stages, so 2 in flight take "
        "4.3 ms a step: 1860 tokens/s",
        "the slowest stage is w0, 3 ms for layers 0–2; the next one takes the same time",
        "alternative, all layers on w1: 8 ms a step, this plan takes 4.3 ms; this plan is 86% faster",
        "w0 keeps layers 3–5 warm in case their holder dies: 4.0 MiB (plan.standby)",
        "w1 keeps layers 0–2 warm in case their holder dies: 4.0 MiB (plan.standby)",
        "one more worker like w0, on a machine of its own, would give no faster step",
    ]


def test_layers_that_are_being_warmed_have_a_forecast(make_bench: Callable[..., Bench]) -> None:
    """Beside steps, they load slowly: the plan says how far that is, and when it ends at the rate so far."""
    bench = make_bench()
    bench.join("w0", "w1")
    bench.tick()
    bench.mute.add("w0")
    bench.tick()
    waits = "w0 keeps layers 3–5 warm in case their holder dies: 4.0 MiB (plan.standby); 0 % of it is loaded, "
    assert waits + "the rest as far as steps leave time for it" in why_of(bench)
    bench.tick(6.0)
    first = LayerRange(3, 4)
    bench.tell("w0", KeptWarm(epoch=1, incarnation="w0.1", layers=(first,), wanted=(first,), load_s=0.2))
    size = bench.state.manifest.weight_bytes
    loaded = size(first) / size(LayerRange(3, 6))
    warming = bench.ask(Query(what="nodes")).body["workers"][0]["warming"]
    assert (warming["warm_bytes"], warming["wanted_bytes"]) == (size(first), size(LayerRange(3, 6)))
    assert warming["ready_in_s"] == pytest.approx(6.0 * (1 - loaded) / loaded, rel=0.1)
    assert any(f"{100 * loaded:.0f} % of it is loaded, the rest in about" in line for line in why_of(bench))
    rated_s = 0.2 - MIN_LOAD_S + ASSUMED_BYTES / LOAD_BYTES_PER_S
    assert bench.state.workers["w0.1"].load_bytes_per_s == pytest.approx((size(first) + ASSUMED_BYTES) / rated_s)
    both = (LayerRange(3, 6),)
    bench.tell("w0", KeptWarm(epoch=1, incarnation="w0.1", layers=both, wanted=both, load_s=0.4))
    assert bench.ask(Query(what="nodes")).body["workers"][0]["warming"] is None


def test_the_plan_says_when_stages_share_cores(make_bench: Callable[..., Bench]) -> None:
    """Why only one step is in flight at a time on one machine, or on one GPU; not with a GPU for each."""
    together = make_bench().serve(2, host="here")
    assert together.state.plans.current.shares_cores
    assert (
        "all stages share the cores of here: in mode auto one step is in flight at a time, "
        "and each stage uses all of them in turn"
    ) in why_of(together)
    on_gpu = make_bench().serve(2, host="here", device="cuda:0")
    assert any(line.startswith("all stages share cuda:0 of here: ") for line in why_of(on_gpu))
    plan = on_gpu.state.plans.current
    stages = tuple(replace(stage, device=f"cuda:{index}") for index, stage in enumerate(plan.stages))
    assert not replace(plan, stages=stages).shares_cores


def test_clients_of_a_dead_plan_are_not_told(serving: Bench) -> None:
    """A re-plan is no end: the client hears nothing of it."""
    serving.say(submit())
    serving.take()
    serving.lose("w1")
    assert [a for a in serving.take() if isinstance(a, SendToClient)] == []


def test_an_answer_about_an_older_plan_does_not_count(bench: Bench) -> None:
    """Prepared and Activated are for one epoch: what comes late says nothing about the plan under way."""
    bench.mute = {"w0", "w1"}
    bench.join("w0", "w1")
    bench.tick()
    first = bench.workers["w0"].prepared(1)
    bench.lose("w1")
    assert bench.state.plans.epoch == 2
    bench.tell("w0", first)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    bench.tell("w0", bench.workers["w0"].prepared(2))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    bench.tell("w0", Activated(epoch=1, incarnation="w0.1", held=(), logs=()))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    bench.tell("w0", Activated(epoch=2, incarnation="w0.1", held=(), logs=()))
    assert bench.state.plans.is_serving


@pytest.mark.parametrize("kind", [Prepare, Activate])
def test_an_order_that_is_not_answered_is_said_again(make_bench, kind: type) -> None:
    """To whom it or whose answer was lost, a second later, word for word; nobody is out for it, and the plan serves as
    soon as the answer comes."""
    bench = make_bench(planning(activate_timeout_s=5.0))
    bench.join("w0", "w1")
    if kind is Prepare:
        bench.mute = {"w1"}
        bench.tick()
    else:
        bench.mute = {"w0", "w1"}
        bench.tick()
        bench.tell("w0", bench.workers["w0"].prepared(1))
        bench.mute = {"w1"}
        bench.tell("w1", bench.workers["w1"].prepared(1))
    (first,) = (order for order in orders_to(bench, "w1") if isinstance(order, kind))
    bench.take()
    bench.tick(1.5)
    assert [order for order in orders_to(bench, "w1") if isinstance(order, kind)] == [first]
    assert not any(isinstance(order, kind) for order in orders_to(bench, "w0")), "it has answered"
    bench.mute = set()
    bench.tick(1.0)
    assert bench.state.plans.is_serving
    assert bench.epoch == 1
    assert not bench.state.counters.get("workers_lost")
    bench.take()
    bench.tick(5.0)
    assert not any(isinstance(order, kind) for order in (*orders_to(bench, "w0"), *orders_to(bench, "w1")))

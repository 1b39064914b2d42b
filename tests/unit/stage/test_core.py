"""The stage's core: order, duplicates, epochs, positions, rooms, parking."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from swarm.stage import actions as act
from swarm.stage.actions import EX_CONFIG
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import (
    BrokerConnected,
    Computed,
    ComputeFenced,
    Loaded,
    LoadFailed,
    OrderArrived,
    StageTick,
)
from swarm.stage.executor import ForwardResult
from swarm.stage.replay import MAX_WAITING
from swarm.stage.step_order import GAP_PATIENCE_S, MAX_EARLY
from swarm.wire.messages import (
    REPLAY_STEP,
    Activate,
    Activated,
    DataPathError,
    Denied,
    Fence,
    HeldSequence,
    Hop,
    LayerRange,
    LeaseRenewed,
    LogRange,
    Prepare,
    Prepared,
    RangePosition,
    Refused,
    Rejoin,
    Release,
    Replay,
    ReplayMissing,
    Row,
    SequencePosition,
    Step,
    StepDone,
    Unassign,
    Welcome,
)
from tests.unit.stage.bench import CAPACITY, EDGE, WELCOME, StageBench, hidden_of, opened, step_of

MakeStage = Callable[..., StageBench]


def troubles(actions: list[act.Action]) -> list[str]:
    return [
        a.message.reason for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)
    ]


def misplaced(actions: list[act.Action]) -> list[bool]:
    """Of each report of trouble: whether what arrived does not fit what is stored."""
    return [
        a.message.misplaced for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)
    ]


def sent(actions: list[act.Action]) -> list[int]:
    """Numbers of the steps that were passed on."""
    return [a.step.step for a in actions if isinstance(a, act.SendStep)] + [
        a.done.step for a in actions if isinstance(a, act.SendDone)
    ]


def position(stage: StageBench, sequence: int = 1) -> int | None:
    return stage.core.sequences[sequence].position()


# --- joining ---------------------------------------------------------------------------------------------------------


def test_hello_welcome_and_release(make_stage: MakeStage) -> None:
    """Connected: it introduces itself. Welcomed: it beats, and sends the wanted files. Released: it ends in order."""
    stage = make_stage()
    assert stage.feed(BrokerConnected()) == [act.SendHello()]
    assert stage.order(WELCOME) == [act.StartHeartbeats("beats", 0.1), act.SendAssets(("tokenizer.json",))]
    assert stage.order(LeaseRenewed()) == []
    assert stage.order(Release(reason="thank you")) == [act.Exit(0, "thank you")]


def test_nothing_wanted_nothing_sent(make_stage: MakeStage) -> None:
    """A broker that has all files asks for none."""
    welcome = Welcome(beat_endpoint="b", data_endpoint="d", beat_interval_s=0.1, lease_s=10.0, wants=())
    assert make_stage().order(welcome) == [act.StartHeartbeats("b", 0.1)]


def test_denied_ends_with_the_code_that_means_never(make_stage: MakeStage) -> None:
    """A supervisor that sees 78 does not start it again."""
    (action,) = make_stage().order(Denied(reason="another model"))
    assert action == act.Exit(EX_CONFIG, "the broker does not take this worker: another model")
    assert EX_CONFIG == 78


def test_a_worker_comes_back_in_the_dtype_of_the_swarm() -> None:
    """If its settings and its device allow that; else it ends, and says why."""
    core = StageCore(StageSettings("w0", "w0.1", 6, dtypes=("float32", "bfloat16")))
    assert core.handle(OrderArrived(Denied(reason="another", dtype="bfloat16")), 0.0) == [
        act.RestartWithDtype("bfloat16", "another")
    ]
    assert core.handle(OrderArrived(Denied(reason="another", dtype="float16")), 0.0) == [
        act.Exit(EX_CONFIG, "the broker does not take this worker: another; this device can't compute in float16")
    ]


def test_a_worker_set_to_one_dtype_keeps_it() -> None:
    core = StageCore(StageSettings("w0", "w0.1", 6, dtypes=("float32",)))
    assert core.handle(OrderArrived(Denied(reason="another", dtype="bfloat16")), 0.0) == [
        act.Exit(EX_CONFIG, "the broker does not take this worker: another")
    ]


def test_rejoin_is_a_hello_with_all_it_holds(stage: StageBench) -> None:
    """Asked to come back, it introduces itself again; the inventory is what it really holds."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert act.SendHello() in stage.order(Rejoin(reason="no heartbeat for 900 ms"))
    assert stage.core.inventory() == (HeldSequence(1, (RangePosition(LayerRange(0, 3), 3),)),)


# --- preparing and activating ----------------------------------------------------------------------------------------


def test_prepare_then_activate(make_stage: MakeStage) -> None:
    """Loading is asked for, its result told; the activation switches the layers, opens the edge, and answers with the
    inventory, in this order."""
    stage = make_stage()
    prepare = Prepare(epoch=3, layers=LayerRange(0, 3), standby=(LayerRange(4, 5),), edge=EDGE, max_sequences=4)
    assert stage.order(prepare) == [
        act.LoadLayers(3, LayerRange(0, 3), (LayerRange(4, 5),), 4, prepare.edge, gently=True)
    ]
    note, told = stage.feed(Loaded(3, CAPACITY))
    assert isinstance(note, act.WriteStageLog)
    assert (note.event, note.fields["epoch"], note.fields["layers"]) == ("plan_prepared", 3, "0–2")
    assert told == act.SendToBroker(
        Prepared(
            epoch=3,
            incarnation="w0.1",
            kv_capacity=1024,
            max_sequences=4,
            load_s=0.5,
            warm_up_s=0.1,
            resident_bytes=9,
            kernels="plain float32, exact",
        )
    )
    assert stage.order(Fence(epoch=3)) == []
    assert stage.order(Activate(epoch=3, first_step=17, live=())) == [
        act.UseLayers(LayerRange(0, 3), ()),
        act.OpenEdge(3, EDGE),
        act.WriteStageLog("plan_activated", "info", {"epoch": 3, "layers": "0–2", "sequences": 0}),
        act.SendToBroker(Activated(epoch=3, incarnation="w0.1", held=(), logs=())),
    ]
    # Steps are numbered from 17 on.
    actions = stage.run(step_of(17, Row(1, 0, 3, True), epoch=3, open=(opened(1),)))
    assert sent(actions) == [17]


def test_activate_without_prepare_is_ignored(make_stage: MakeStage) -> None:
    """Neither an activation out of the blue, nor one before the layers are loaded, nor one of another epoch counts."""
    stage = make_stage()
    assert stage.order(Activate(epoch=1, first_step=1, live=())) == []
    stage.order(Prepare(epoch=2, layers=stage.layers, standby=(), edge=EDGE, max_sequences=4))
    assert stage.order(Activate(epoch=2, first_step=1, live=())) == []  # still loading
    stage.feed(Loaded(2, CAPACITY))
    assert stage.order(Activate(epoch=1, first_step=1, live=())) == []
    assert stage.core.active is None
    assert stage.core.counters["stale_orders"] == 3


def test_stale_orders_are_counted(stage: StageBench) -> None:
    """Orders of epochs that are over change nothing."""
    stage.order(Fence(epoch=5))
    for order in (
        Prepare(epoch=4, layers=stage.layers, standby=(), edge=EDGE, max_sequences=4),
        Fence(epoch=4),
        Activate(epoch=4, first_step=1, live=()),
        Unassign(epoch=4),
    ):
        assert stage.order(order) == []
    assert stage.core.counters["stale_orders"] == 4


def test_a_plan_that_everybody_waits_for_is_loaded_in_haste(make_stage: MakeStage) -> None:
    """The broker raises the fence before it asks for a plan where none is in force any more."""
    stage = make_stage()
    stage.order(Fence(epoch=3))
    (load,) = stage.order(Prepare(epoch=3, layers=LayerRange(0, 3), standby=(), edge=EDGE, max_sequences=4))
    assert load == act.LoadLayers(3, LayerRange(0, 3), (), 4, EDGE, gently=False)


def test_a_load_that_fails_is_refused(make_stage: MakeStage) -> None:
    """The broker is told in the loader's words; an activation of it is ignored then."""
    stage = make_stage()
    stage.order(Prepare(epoch=1, layers=stage.layers, standby=(), edge=EDGE, max_sequences=4))
    *_, told = stage.feed(LoadFailed(1, "shard 2 is corrupt"))
    assert told == act.SendToBroker(Refused(epoch=1, incarnation="w0.1", reason="shard 2 is corrupt"))
    assert stage.order(Activate(epoch=1, first_step=1, live=())) == []


@pytest.mark.parametrize("first_fails", [False, True])
def test_a_load_that_is_overtaken(make_stage: MakeStage, first_fails: bool) -> None:
    """A newer plan while layers load: one load at a time, and only the newest is answered, whatever the first gave."""
    stage = make_stage()
    stage.order(Prepare(epoch=1, layers=LayerRange(0, 3), standby=(), edge=EDGE, max_sequences=4))
    assert stage.order(Prepare(epoch=2, layers=LayerRange(0, 2), standby=(), edge=EDGE, max_sequences=4)) == []
    done = LoadFailed(1, "no room") if first_fails else Loaded(1, CAPACITY)
    assert stage.feed(done) == [act.LoadLayers(2, LayerRange(0, 2), (), 4, EDGE, gently=True)]
    *_, told = stage.feed(Loaded(2, CAPACITY))
    assert isinstance(told, act.SendToBroker)
    assert told.message.epoch == 2
    # The older plan is not wanted any more.
    assert stage.order(Prepare(epoch=1, layers=LayerRange(0, 3), standby=(), edge=EDGE, max_sequences=4)) == []


def test_loading_does_not_stop_the_old_plan(stage: StageBench) -> None:
    """Between Prepare and Fence, steps of the epoch in force are computed as ever."""
    stage.order(Prepare(epoch=2, layers=LayerRange(0, 2), standby=(), edge=EDGE, max_sequences=4))
    assert sent(stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))) == [1]
    stage.feed(Loaded(2, CAPACITY))
    assert sent(stage.run(step_of(2, Row(1, 3, 1, True)))) == [2]


def test_activation_keeps_the_live_and_drops_the_others(stage: StageBench) -> None:
    """Live sequences are cut to what counts, in keys, values, history and log; the others go."""
    stage.run(step_of(1, Row(1, 0, 3, True), Row(2, 0, 3, True), open=(opened(1), opened(2))))
    stage.run(step_of(2, Row(1, 3, 1, True)))
    actions = stage.activate(epoch=2, first_step=9, live=((1, 3), (5, 8)))
    assert actions == [
        act.ReleaseSequence(2),
        act.UseLayers(LayerRange(0, 3), ()),
        act.TruncateSequence(1, 3),
        act.OpenEdge(2, EDGE),
        act.WriteStageLog("plan_activated", "info", {"epoch": 2, "layers": "0–2", "sequences": 1}),
        act.SendToBroker(
            Activated(
                epoch=2,
                incarnation="w0.1",
                held=(HeldSequence(1, (RangePosition(LayerRange(0, 3), 3),)),),
                logs=(LogRange(1, 3, 0, 3),),
            )
        ),
    ]
    # Told again what the sequence is, it goes on from there; the token at position 3 is another one now.
    again = opened(1, tokens=(1, 2, 3, 77))
    actions = stage.run(
        step_of(9, Row(1, 3, 1, True), epoch=2, tokens=(77,), open=(again,), truncate=(SequencePosition(1, 3),))
    )
    assert sent(actions) == [9]
    assert stage.core.sequences[1].history == [1, 2, 3, 77]


def test_taking_over_layers(make_stage: MakeStage) -> None:
    """Layers that stay keep their keys and values; new ones hold nothing, and the sequence waits for them."""
    stage = make_stage(1, 3)
    stage.activate()
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    # The range grows at both ends and loses nothing.
    stage.first, stage.stop = 0, 4
    stage.activate(epoch=2, live=((1, 3),))
    assert stage.core.inventory() == (
        HeldSequence(
            1,
            (
                RangePosition(LayerRange(0, 1), 0),
                RangePosition(LayerRange(1, 3), 3),
                RangePosition(LayerRange(3, 4), 0),
            ),
        ),
    )
    assert position(stage) is None
    # A row from anywhere but the start would be wrong in some layer.
    assert "stands at" in troubles(stage.step(step_of(1, Row(1, 3, 1, True), epoch=2)))[0]


def test_giving_up_layers(make_stage: MakeStage) -> None:
    """A range that shrinks or moves away keeps only what is in both."""
    stage = make_stage(0, 4)
    stage.activate()
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.first, stage.stop = 2, 6
    stage.activate(epoch=2, live=((1, 3),))
    assert stage.core.inventory()[0].kv == (
        RangePosition(LayerRange(2, 4), 3),
        RangePosition(LayerRange(4, 6), 0),
    )
    stage.first, stage.stop = 0, 2
    stage.activate(epoch=3, live=((1, 3),))
    assert stage.core.inventory()[0].kv == (RangePosition(LayerRange(0, 2), 0),)


def test_what_was_retired_counts_for_nobody_else(stage: StageBench) -> None:
    """It has room for its beginning only. A broker that starts again and did not hear of its end is told nothing of it,
    and if another stage still has it all, this one begins anew."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.run(step_of(2, Row(2, 0, 1, True), open=(opened(2),), retire=(SequencePosition(1, 2),)))
    assert [held.sequence for held in stage.core.inventory()] == [2]
    stage.activate(epoch=2, live=((1, 3), (2, 1)))
    assert sorted(stage.core.sequences) == [2]


def test_dismissal_forgets_all_sequences_and_keeps_the_layers(stage: StageBench) -> None:
    """The plan does without it: rooms and logs are emptied, steps no longer taken."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert stage.order(Unassign(epoch=2)) == [act.ReleaseSequence(1)]
    assert stage.core.log.num_bytes == 0
    assert stage.core.layers == LayerRange(0, 3)
    assert stage.step(step_of(2, Row(1, 3, 1, True))) == []
    assert stage.core.counters["stale_steps"] == 1


# --- order of steps --------------------------------------------------------------------------------------------------


def test_a_step_through_the_first_stage(stage: StageBench) -> None:
    """The room is opened, the rows computed; what goes on is the same step with the hop and the hidden states."""
    stage.core.runner.idle_since = stage.now
    stage.now += 2.0
    arrived = step_of(1, Row(1, 0, 3, True), open=(opened(1),))
    first, compute = stage.step(arrived)
    assert first == act.OpenSequence(1, 64)
    assert isinstance(compute, act.Compute)
    assert compute.batch.rows == arrived.rows
    assert compute.batch.tokens.tolist() == [10, 11, 12]
    assert compute.batch.hidden is None
    assert compute.batch.samples == ()  # only the last stage draws
    (out,) = stage.compute()
    assert isinstance(out, act.SendStep)
    assert out.step.hops == (Hop("w0", LayerRange(0, 3), 0.0, 0.001, 0.0, 2.0, 7),)
    assert (out.step.rows, out.step.open, out.step.tokens) == (arrived.rows, arrived.open, arrived.tokens)
    assert out.hidden is not None
    assert out.hidden.shape == (3, 2)
    # The log holds exactly what was sent.
    logged = stage.core.log.read(1, 3, 0, 3)
    assert logged is not None
    assert logged.tobytes() == out.hidden.tobytes()


def test_the_last_stage_answers_every_step(last: StageBench) -> None:
    """One that draws, one that doesn't, and one without rows."""
    (out,) = [a for a in last.run(step_of(1, Row(1, 0, 2, False), open=(opened(1),))) if isinstance(a, act.SendDone)]
    assert (out.done.kv, out.done.sampled) == ((SequencePosition(1, 2),), ())
    (out,) = last.run(step_of(2, Row(1, 2, 1, True)))[-1:]
    assert isinstance(out, act.SendDone)
    (drawn,) = out.done.sampled
    assert (drawn.sequence, drawn.position) == (1, 3)
    (release, out) = last.step(step_of(3, release=(1,)))
    assert release == act.ReleaseSequence(1)
    assert isinstance(out, act.SendDone)
    assert out.done == StepDone(epoch=1, step=3, kv=(), sampled=(), failed=(), hops=out.done.hops)
    assert last.core.log.num_bytes == 0


def test_a_draw_that_is_put_off_is_told(last: StageBench) -> None:
    """With the positions that are computed all the same; when the last of them comes again, the token is what it would
    have been."""
    twin = StageBench(first=last.first, stop=last.stop)
    twin.activate()
    drawn = []
    for stage in (last, twin):
        stage.executor.defer_every = 0 if stage is twin else 2
        stage.executor.num_draws = 1
        out = stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),), tokens=(1, 2, 3)))[-1]
        assert isinstance(out, act.SendDone)
        assert out.done.kv == (SequencePosition(1, 3),)
        if stage is last:
            assert (out.done.sampled, out.done.late) == ((), (1,))
            again = step_of(2, Row(1, 2, 1, True), truncate=(SequencePosition(1, 2),), tokens=(3,))
            out = stage.run(again)[-1]
            assert isinstance(out, act.SendDone)
        assert out.done.late == ()
        drawn.append(out.done.sampled)
    assert drawn[0] == drawn[1] != ()


def test_the_draw_sees_the_whole_history(last: StageBench) -> None:
    """Parameters, seed and every token so far, whatever the chunks in which they came."""
    last.run(step_of(1, Row(1, 0, 2, False), open=(opened(1, (1, 2, 3)),), tokens=(1, 2)))
    last.step(step_of(2, Row(1, 2, 1, True), tokens=(3,)))
    assert last.computing is not None
    (job,) = last.computing.batch.samples
    assert (job.row, job.seed, list(job.history), job.num_prompt) == (0, 5, [1, 2, 3], 3)


@pytest.mark.parametrize("alone", [True, False])
def test_the_device_is_told_whether_a_step_is_alone(last: StageBench, alone: bool) -> None:
    """The broker knows whether other steps are in flight; how many cores to use is the device's business."""
    last.step(step_of(1, Row(1, 0, 1, False), open=(opened(1),), alone=alone))
    assert last.computing is not None
    assert last.computing.batch.alone is alone


def test_early_steps_wait(stage: StageBench) -> None:
    """Steps 3 and 2 before 1: nothing is computed until 1 is there, then all in order."""
    rows = [Row(1, start, 1, True) for start in range(3)]
    one, two, three = (step_of(i + 1, row, open=(opened(1),) if i == 0 else ()) for i, row in enumerate(rows))
    assert stage.step(three) == []
    assert stage.step(two) == []
    actions = stage.run(one)
    actions += stage.compute() + stage.compute()
    assert sent(actions) == [1, 2, 3]
    assert position(stage) == 3


def test_duplicates_are_counted(stage: StageBench) -> None:
    """A step that was done, that waits for its turn or for an earlier one: its second copy is dropped."""
    one = step_of(1, Row(1, 0, 3, True), open=(opened(1),))
    stage.step(one)
    two, four = step_of(2, Row(1, 3, 1, True)), step_of(4, Row(1, 5, 1, True))
    stage.step(two)
    stage.step(four)
    for step in (one, two, four):
        assert stage.step(step) == []
    assert stage.core.counters["duplicate_steps"] == 3
    assert sent(stage.compute() + stage.compute()) == [1, 2]


def test_a_gap_is_told_after_a_while(stage: StageBench) -> None:
    """A missing step is given time; then the broker is told which, once, and that no request is to blame."""
    stage.order(WELCOME)
    stage.step(step_of(2, Row(1, 0, 3, True)))
    stage.now += GAP_PATIENCE_S
    assert stage.feed(StageTick()) == []
    stage.now += 0.1
    actions = stage.feed(StageTick())
    assert troubles(actions) == ["step 1 is missing, later ones are here: [2]"]
    assert [
        a.message.damaged for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, DataPathError)
    ] == [True]
    assert stage.feed(StageTick()) == []


def test_a_new_epoch_begins_without_a_gap(stage: StageBench) -> None:
    """What was missing in the one before it will never come, and nobody waits for it."""
    stage.order(WELCOME)
    stage.step(step_of(2, Row(1, 0, 3, True)))
    stage.activate(epoch=2)
    stage.now += GAP_PATIENCE_S + 0.1
    assert troubles(stage.feed(StageTick())) == []


def test_each_gap_has_its_own_patience(stage: StageBench) -> None:
    """When what was missing comes, and something else is missing now, the clock starts anew."""
    stage.order(WELCOME)
    stage.step(step_of(4, Row(1, 0, 3, True)))
    stage.now += 0.9
    stage.step(step_of(1))
    stage.now += 0.9
    assert stage.feed(StageTick()) == []
    stage.now += 0.2
    assert troubles(stage.feed(StageTick())) == ["step 2 is missing, later ones are here: [4]"]


def test_a_filled_gap_is_no_trouble(stage: StageBench) -> None:
    """All steps are there: nothing is missing however long it takes."""
    stage.order(WELCOME)
    stage.step(step_of(2))
    assert sent(stage.step(step_of(1))) == [1, 2]
    stage.now += 5.0
    assert stage.feed(StageTick()) == []


def test_waiting_steps_are_bounded(stage: StageBench) -> None:
    """More early steps than can be in flight are dropped; the one that all wait for is always taken."""
    for number in range(2, MAX_EARLY + 5):
        stage.step(step_of(number))
    assert stage.core.counters["dropped_steps"] == 3
    assert sent(stage.step(step_of(1))) == list(range(1, MAX_EARLY + 2))


def test_steps_of_other_epochs_are_dropped(stage: StageBench) -> None:
    """Older ones, and newer ones before their activation: counted, without effect."""
    stage.activate(epoch=2)
    for epoch in (1, 3):
        assert stage.step(step_of(1, Row(1, 0, 3, True), epoch=epoch, open=(opened(1),))) == []
    assert stage.core.counters["stale_steps"] == 2
    assert not stage.core.sequences


def test_one_step_at_a_time(stage: StageBench) -> None:
    """While one is computed, the next waits; its header is applied only at its turn."""
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert stage.step(step_of(2, Row(2, 0, 3, True), open=(opened(2),), release=(1,))) == []
    assert set(stage.core.sequences) == {1}
    actions = stage.compute()
    assert [type(a) for a in actions] == [act.SendStep, act.ReleaseSequence, act.OpenSequence, act.Compute]


# --- the header ------------------------------------------------------------------------------------------------------


def test_release_open_truncate_in_this_order(stage: StageBench) -> None:
    """A room that is given back and taken again in one step is a fresh one; truncation finds it open."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    actions = stage.step(
        step_of(2, Row(1, 0, 2, True), release=(1,), open=(opened(1, (8, 9)),), truncate=(SequencePosition(1, 0),))
    )
    assert actions[:3] == [act.ReleaseSequence(1), act.OpenSequence(1, 64), act.TruncateSequence(1, 0)]
    stage.compute()
    assert position(stage) == 2


def test_what_is_told_again_counts_as_it_is_told_now(stage: StageBench) -> None:
    """In a new epoch: the limit, say, or what is known of its tokens; what it holds stays."""
    stage.run(step_of(1, Row(1, 0, 3, False), tokens=(1, 2, 3), open=(opened(1),)))
    stage.activate(epoch=2, live=((1, 3),))
    again = opened(1, (1, 2, 3, 4), limit=128)
    stage.run(step_of(1, Row(1, 3, 1, True), epoch=2, tokens=(4,), open=(again,)))
    assert stage.core.sequences[1].open == again
    assert position(stage) == 4


def test_who_begins_as_another_has_the_log_of_it(stage: StageBench) -> None:
    """The layers behind can be rebuilt for both."""
    stage.run(step_of(1, Row(1, 0, 3, False), tokens=(1, 2, 3), open=(opened(1),)))
    fork = msgspec.structs.replace(opened(2, (1, 2, 4)), source=1, shared=2)
    stage.run(step_of(2, Row(2, 2, 1, True), tokens=(4,), open=(fork,)))
    logged = {(entry.sequence, entry.start, entry.stop) for entry in stage.core.store.log.ranges()}
    assert logged == {(1, 0, 3), (2, 0, 3)}


def test_truncation_cuts_keys_history_and_log(stage: StageBench) -> None:
    """From the position on, nothing is left anywhere."""
    stage.run(step_of(1, Row(1, 0, 5, True), open=(opened(1, (1, 2, 3, 4, 5)),), tokens=(1, 2, 3, 4, 5)))
    stage.step(step_of(2, truncate=(SequencePosition(1, 2),)))
    assert position(stage) == 2
    assert stage.core.sequences[1].history == [1, 2]
    assert list(stage.core.log.ranges()) == [LogRange(1, 3, 0, 2)]


def test_releasing_the_unknown_is_no_error(stage: StageBench) -> None:
    """A sequence that never got here is released all the same: nothing happens, the step goes on."""
    assert sent(stage.step(step_of(1, release=(42,)))) == [1]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (step_of(2, Row(1, 2, 1, True)), "sequence 1 stands at"),
        (step_of(2, Row(1, 4, 1, True)), "sequence 1 stands at"),
        (step_of(2, Row(9, 0, 1, True)), "sequence 9 is not open here"),
        (step_of(2, Row(1, 3, 1, True), Row(1, 3, 70, True)), "sequence 1 would outgrow its limit of 64"),
        (step_of(2, truncate=(SequencePosition(9, 0),)), "sequence 9 is to be cut, but it is not open here"),
    ],
)
def test_what_can_not_be_is_trouble(stage: StageBench, step: object, text: str) -> None:
    """A row that begins elsewhere, an unknown sequence, one that outgrows its room: never a guess, the broker is told;
    nothing is computed or sent."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    actions = stage.step(step)  # type: ignore[arg-type]
    (reason,) = troubles(actions)
    assert reason.startswith("step 2 of epoch 1: ")
    assert text in reason
    assert misplaced(actions) == [True]
    assert stage.computing is None
    assert sent(actions) == []
    assert stage.core.counters["steps_refused"] == 1


@pytest.mark.parametrize("through", [LayerRange(0, 3), LayerRange(3, 6)])
def test_a_replay_that_does_not_fit_blames_no_request_either(stage: StageBench, through: LayerRange) -> None:
    """It begins behind what is held, or goes through layers of others."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    actions = stage.step(step_of(0, Row(1, 5, 1, False), replay=True, through=through, alone=True))
    assert misplaced(actions) == [True]
    assert stage.computing is None


# --- fences ----------------------------------------------------------------------------------------------------------


def test_a_fence_during_compute(stage: StageBench) -> None:
    """What is computed behind the fence counts for nothing: not sent, not logged, no position moved."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.step(step_of(2, Row(1, 3, 1, True)))
    stage.step(step_of(3))
    assert stage.order(Fence(epoch=2)) == []
    assert stage.compute() == []
    assert stage.core.counters["steps_fenced"] == 1
    assert position(stage) == 3
    assert list(stage.core.log.ranges()) == [LogRange(1, 3, 0, 3)]
    # The next epoch starts clean.
    stage.activate(epoch=2, live=((1, 3),))
    assert sent(stage.run(step_of(1, Row(1, 3, 1, True), epoch=2))) == [1]


def test_a_fence_and_an_activation_during_compute(stage: StageBench) -> None:
    """A result of the old epoch after the new one has begun is the old one's; the new epoch's first step follows it."""
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.activate(epoch=2, first_step=2, live=((1, 0),))
    # The new step waits: the device is busy.
    assert stage.step(step_of(2, Row(1, 0, 3, True), epoch=2, open=(opened(1),))) == []
    old, stage.computing = stage.computing, None
    assert old is not None
    actions = stage.feed(Computed(old.epoch, old.step, ForwardResult(hidden_of(3), (), (), 0.0, 0.0)))
    assert [type(a) for a in actions] == [act.Compute]
    assert sent(stage.compute()) == [2]
    assert position(stage) == 3


def test_a_step_that_the_fence_ended(stage: StageBench) -> None:
    """The device looked at the fence between two layers and stopped: as if the step had never been."""
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.order(Fence(epoch=2))
    stage.computing = None
    assert stage.feed(ComputeFenced(1, 1)) == []
    assert position(stage) == 0


def test_a_device_that_fails_is_trouble(stage: StageBench) -> None:
    """The broker hears the device's words; the stage lives."""
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    assert troubles(stage.fail("device lost")) == ["step 1 of epoch 1 failed: device lost"]
    assert stage.core.runner.running is None


def test_a_fence_of_the_epoch_in_force_changes_nothing(stage: StageBench) -> None:
    """It is the same epoch."""
    stage.order(Fence(epoch=1))
    assert sent(stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))) == [1]


# --- the lease -------------------------------------------------------------------------------------------------------


def test_parking_after_the_lease_and_unparking(stage: StageBench) -> None:
    """Nothing heard for the lease: it keeps everything and sends nothing; the next order wakes it, and what waited is
    done then."""
    stage.order(WELCOME)
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.now += 10.0
    assert stage.feed(StageTick()) == []
    stage.now += 0.1
    (note,) = stage.feed(StageTick())
    assert isinstance(note, act.WriteStageLog)
    assert (note.event, note.fields) == ("parked", {"reason": "no message from the broker for 10 s"})
    assert stage.feed(StageTick()) == []  # it says so once
    # A step that was on its way is kept, not computed.
    assert stage.step(step_of(2, Row(1, 3, 1, True))) == []
    assert position(stage) == 3
    # The broker is back.
    assert [type(a) for a in stage.order(LeaseRenewed())] == [act.WriteStageLog, act.Compute]
    assert sent(stage.compute()) == [2]


def test_hearing_renews_the_lease(stage: StageBench) -> None:
    """Any order will do."""
    stage.order(WELCOME)
    for _ in range(5):
        stage.now += 9.0
        stage.order(LeaseRenewed())
        assert stage.feed(StageTick()) == []


def test_who_was_never_welcomed_does_not_park(make_stage: MakeStage) -> None:
    """Before the first Welcome there is no lease."""
    stage = make_stage()
    stage.now += 100.0
    assert stage.feed(StageTick()) == []


def test_knocking_again_while_parked(stage: StageBench) -> None:
    """A connection is no word of the broker: the stage introduces itself, still parked."""
    stage.order(WELCOME)
    stage.now += 10.1
    stage.feed(StageTick())
    assert stage.core.is_parked
    assert stage.feed(BrokerConnected()) == [act.SendHello()]
    assert stage.core.is_parked


# --- the rest --------------------------------------------------------------------------------------------------------


def test_replay_is_answered_honestly(stage: StageBench) -> None:
    """It can't be served yet: the answer says that nothing is there, so that the next tier serves."""
    order = Replay(epoch=1, sequence=1, boundary=3, start=0, stop=9, through=LayerRange(3, 6))
    (told,) = stage.order(order)
    assert told == act.SendToBroker(ReplayMissing(epoch=1, incarnation="w0.1", sequence=1, boundary=3, has_from=9))


def test_a_release_overtakes_a_replay(stage: StageBench) -> None:
    """Replays have no number, so a sequence may be released while one is still on its way: it must not be opened again,
    since nobody would ever release it. In the next epoch its number is a number like any other."""
    replay = step_of(REPLAY_STEP, Row(1, 0, 3, False), open=(opened(1),), replay=True, through=LayerRange(0, 3))
    stage.run(step_of(1, Row(2, 0, 3, True), release=(1,), open=(opened(2),)))
    assert stage.step(replay) == []
    assert set(stage.core.sequences) == {2}
    assert stage.core.counters["stale_replays"] == 1
    stage.activate(epoch=2)
    assert act.OpenSequence(1, 64) in stage.step(msgspec.structs.replace(replay, epoch=2))


def test_a_release_overtakes_the_order_to_replay(stage: StageBench) -> None:
    """Orders come another way than steps. The sequence has given its room away and is computed anew by steps: what was
    to be replayed of its former stay must not be put over that."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    order = Replay(epoch=1, sequence=1, boundary=3, start=0, stop=3, through=LayerRange(3, 6))
    assert [type(action) for action in stage.order(order)] == [act.SendStep]
    stage.run(step_of(2, Row(1, 0, 4, True), release=(1,), open=(opened(1),)))
    missing = ReplayMissing(epoch=1, incarnation="w0.1", sequence=1, boundary=3, has_from=3)
    assert stage.order(order) == [act.SendToBroker(missing)]
    stage.activate(epoch=2, live=((1, 4),))
    assert [type(action) for action in stage.order(msgspec.structs.replace(order, epoch=2))] == [act.SendStep]


def test_many_late_replays_are_let_go_at_once(stage: StageBench) -> None:
    """As many as may wait at most, of sequences that are gone, and behind them one that is wanted."""
    layers = LayerRange(0, 3)
    late = step_of(REPLAY_STEP, Row(1, 3, 3, False), replay=True, through=layers)
    wanted = step_of(REPLAY_STEP, Row(2, 0, 3, False), open=(opened(2),), replay=True, through=layers)
    stage.step(step_of(1, Row(3, 0, 3, True), open=(opened(3),)))
    for _ in range(MAX_WAITING - 1):
        assert stage.step(late) == []
    assert stage.step(wanted) == []
    stage.compute()
    assert stage.computing is not None
    assert stage.computing.batch.rows == wanted.rows
    assert stage.core.counters["late_replays"] == MAX_WAITING - 1


def chunk(start: int, count: int, epoch: int = 1) -> Step:
    first = (opened(1),) if start == 0 else ()
    rows = Row(1, start, count, False)
    return step_of(REPLAY_STEP, rows, open=first, replay=True, through=LayerRange(0, 3), epoch=epoch)


def test_a_chunk_that_comes_again_after_a_step_does_not_run(stage: StageBench) -> None:
    """It would write over the end of what it belongs to, and of the position behind it nothing would be left. In the
    next epoch it is wanted again."""
    stage.run(chunk(0, 3))
    stage.run(step_of(1, Row(1, 3, 1, True)))
    assert stage.step(chunk(0, 3)) == []
    assert stage.computing is None
    assert stage.core.counters["duplicate_replays"] == 1
    stage.activate(epoch=2, live=((1, 4),))
    stage.step(chunk(0, 3, epoch=2))
    assert stage.computing is not None


def test_a_chunk_that_comes_again_after_the_next_one_does_not_run(stage: StageBench) -> None:
    """Chunks go forward only; one that waits while the step is on the device is late, too."""
    for start in (0, 3):
        stage.run(chunk(start, 3))
    assert stage.step(chunk(0, 3)) == stage.step(chunk(3, 3)) == []
    stage.step(step_of(1, Row(1, 6, 1, True)))
    assert stage.step(chunk(6, 3)) == []  # behind what the broker ordered: nobody else sends such, but it must not run
    stage.compute()
    assert stage.computing is None
    assert stage.core.counters["duplicate_replays"] == 3


def test_nobody_counts_on_what_lies_behind_a_chunk_that_is_written_again(stage: StageBench) -> None:
    """Layers that a replay from tokens only passes through are written again, in units: if the plan falls before the
    replay has come to its end, what they held behind it may be gone."""
    stage.run(step_of(1, Row(1, 0, 9, True), open=(opened(1),)))
    stage.activate(epoch=2, live=((1, 9),))
    stage.run(chunk(0, 3, epoch=2))
    assert position(stage) == 3
    stage.step(chunk(3, 3, epoch=2))  # and this one is on the device when the plan falls
    stage.activate(epoch=3, live=((1, 9),))
    assert position(stage) == 3


def test_chunks_by_another_way_begin_anew(stage: StageBench) -> None:
    """The log was gone, and the tokens serve, through more layers: from where the sequence stands."""
    stage.run(chunk(0, 3))
    stage.step(msgspec.structs.replace(chunk(0, 3), through=LayerRange(0, 6)))
    assert stage.computing is not None


def test_the_log_is_bounded(make_stage: MakeStage) -> None:
    """However much is sent, the log stays within its bytes (the bench checks after every event); sequences go on."""
    segment = 32 * 2 * 4
    stage = make_stage(log_bytes=3 * segment)
    stage.activate()
    for number in range(1, 9):
        stage.run(step_of(number, Row(number, 0, 20, True), open=(opened(number),)))
    assert stage.core.log.num_evicted == 5
    assert [r.sequence for r in stage.core.log.ranges()] == [6, 7, 8]
    assert sent(stage.run(step_of(9, Row(1, 20, 1, True)))) == [9]


def test_a_middle_stage_passes_what_it_got(make_stage: MakeStage) -> None:
    """Hops add up along the way; the input tensor reaches the executor untouched."""
    stage = make_stage(2, 4)
    stage.activate()
    before = Hop("w9", LayerRange(0, 2), 0.0, 0.1, 0.0, 0.0, 3)
    hidden = hidden_of(3, 0.5)
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),), hops=(before,)), hidden)
    assert stage.computing is not None
    assert stage.computing.batch.hidden is hidden
    (out,) = stage.compute()
    assert isinstance(out, act.SendStep)
    assert [h.worker for h in out.step.hops] == ["w9", "w0"]
    assert out.hidden is not None
    assert not np.array_equal(out.hidden, hidden)


def test_an_activation_that_comes_again_is_told_again(stage: StageBench) -> None:
    """The broker has not heard that it is done: nothing is truncated or opened a second time."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    (first,) = (a.message for a in stage.activate(epoch=2, live=((1, 3),)) if isinstance(a, act.SendToBroker))
    again = stage.order(Activate(epoch=2, first_step=1, live=(SequencePosition(1, 3),)))
    assert again == [act.SendToBroker(first)]


@pytest.mark.parametrize("unshared", [(), (2,)])
def test_the_broker_decides_whether_a_fork_shares(stage: StageBench, unshared: tuple[int, ...]) -> None:
    stage.executor.shared.clear(2)
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    fork = msgspec.structs.replace(opened(2, (1, 2, 4)), source=1, shared=2)
    actions = stage.step(step_of(2, Row(2, 2, 1, True), open=(fork,), unshared=unshared))
    assert act.ForkSequence(2, 1, 2, 64, not unshared) in actions
    assert stage.executor.shared.saved == (0 if unshared else 2)


def test_hello_is_said_again_until_it_is_answered(make_stage: MakeStage) -> None:
    """It may have been lost on its way, or the welcome. Once welcome, never without being asked."""
    stage = make_stage()
    assert stage.feed(BrokerConnected()) == [act.SendHello()]
    said_again = 0
    for _ in range(120):
        stage.now += 0.1
        said_again += stage.feed(StageTick()).count(act.SendHello())
    assert said_again == 5
    stage.order(WELCOME)
    for _ in range(120):
        stage.now += 0.1
        assert act.SendHello() not in stage.feed(StageTick())

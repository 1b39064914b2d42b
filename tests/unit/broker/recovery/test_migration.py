"""Changes of a whole plan: what is copied before, when dispatching pauses, and what every interruption leads to."""

from __future__ import annotations

from typing import Literal, TypeVar

import pytest

from swarm.broker.actions import WriteEpoch
from swarm.broker.journal.records import RequestRecord, SequenceRecord
from swarm.broker.planner.standby import StandbyPolicy
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.migration import DRAIN_S, GRACE_S, LEAVING_S, MAX_COPY_S, NEAR_POSITIONS, STALLED_S, TAIL_S
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import PlanPhase, WorkerState
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.stage.shell.shutdown import RELEASE_TIMEOUT_S
from swarm.wire.messages import (
    BLOCK,
    Activate,
    Cancel,
    DataPathError,
    HeldSequence,
    KvHeld,
    KvSource,
    KvTarget,
    LayerRange,
    Leaving,
    Order,
    PlanCommand,
    RangePosition,
    ReceiveKv,
    Refused,
    Release,
    Replay,
    ReplayDone,
    SendKv,
    SequencePosition,
)
from tests.unit.broker.bench import MIB, Bench, holds, orders, ranges, settings, steps, submit

FIRST, LAST = LayerRange(0, 3), LayerRange(3, 6)
LONG, NUM_TOKENS = 300, 200  # tokens of the prompt and of the answer

KvOrder = TypeVar("KvOrder", bound=Order)


def serving(standby_kv: StandbyPolicy = "none", standby: StandbyPolicy = "none", **fields: object) -> Bench:
    """w0 and w1 serve the request ``r`` with a long prompt; w2 has no part in the plan. All support copies."""
    rules = PlanRules(pins={"w0": FIRST, "w1": LAST}, standby_kv=standby_kv, standby=standby)
    bench = Bench(settings(plan=ReconfigurationSettings(settle_s=0.0, rules=rules)))
    for name in ("w0", "w1"):
        join(bench, name)
    bench.tick(0.2)
    bench.say(submit(num_prompt=LONG, max_tokens=NUM_TOKENS, ignore_eos=True))
    while bench.sequence().num_generated < 2:
        bench.finish()
    join(bench, "w2", **fields)
    bench.tick(0.5)
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert ranges(bench) == {"w0": FIRST, "w1": LAST}
    bench.take()
    return bench


def join(bench: Bench, name: str, **fields: object) -> None:
    bench.join(name, **({"bits": "alike", "kv_endpoint": f"tcp://{name}-kv"} | fields))


def drain(bench: Bench, name: str = "w1") -> None:
    """Take the layers of a worker away: w2 is to get those of w1."""
    assert bench.ask(PlanCommand(verb="drain", worker=name)).ok
    bench.tick()


def loading(**fields: object) -> Bench:
    """w2 loads the layers of w1."""
    bench = serving(**fields)  # type: ignore[arg-type]
    bench.mute = {"w2"}
    drain(bench)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    return bench


def load(bench: Bench, name: str = "w2", **fields: object) -> None:
    """The worker has loaded its layers."""
    bench.mute = set()
    worker = bench.workers[name]
    for field, value in fields.items():
        setattr(worker, field, value)
    bench.tell(name, worker.prepared(bench.state.plans.epoch))


def report(bench: Bench, position: int | None = None, name: str = "w2", layers: LayerRange = LAST) -> None:
    """The receiver reports copies up to this position (all, by default) of every running sequence."""
    positions = [(s.id, s.kv if position is None else position) for s in bench.state.running]
    held = tuple(HeldSequence(s, (RangePosition(layers, at),)) for s, at in positions if at)
    bench.tell(name, KvHeld(epoch=bench.epoch, incarnation=f"{name}.1", held=held))


def stopped(bench: Bench) -> Bench:
    """All workers have loaded and copies are near: nothing is dispatched any more, but a step is in flight."""
    report(bench)
    load(bench)
    assert bench.state.plans.phase is PlanPhase.COPYING
    assert len(bench.pipe) == 1
    return bench


def copying(bench: Bench) -> Bench:
    """The step in flight has ended too: the last positions are on their way."""
    stopped(bench)
    bench.take()
    bench.finish()
    assert bench.state.plans.phase is PlanPhase.COPYING
    return bench


def last_order(bench: Bench, name: str, kind: type[KvOrder]) -> KvOrder:
    order = [order for peer, order in orders(bench.log, kind) if peer == f"{name}.1"][-1]
    assert isinstance(order, kind)
    return order


def assert_ends(bench: Bench) -> None:
    """The request ends with all its tokens."""
    for _ in range(3000):
        if bench.pipe:
            bench.finish()
        elif bench.sequence().reason is None:
            bench.tick()
    assert bench.sequence().reason == "length"
    assert bench.sequence().num_generated == NUM_TOKENS


def end_chunk(bench: Bench, name: str) -> None:
    """The replay ordered last is done, in layers that this worker holds."""
    (_, order) = orders(bench.log, Replay)[-1]
    assert isinstance(order, Replay)
    done = ReplayDone(
        epoch=order.epoch, incarnation=f"{name}.1", sequence=order.sequence, layers=order.through, kv=order.stop
    )
    bench.tell(name, done)


# --- the usual course -------------------------------------------------------------------------------------------------


def test_moved_layers_are_copied_while_the_next_plan_loads() -> None:
    """The receiver is ordered before the sender, and both under the epoch of the active plan, which runs on."""
    bench = loading()
    kv_orders = [(peer, order) for peer, order in orders(bench.log) if isinstance(order, SendKv | ReceiveKv)]
    assert [(peer, type(order), order.epoch) for peer, order in kv_orders] == [
        ("w2.1", ReceiveKv, bench.epoch),
        ("w1.1", SendKv, bench.epoch),
    ]
    assert last_order(bench, "w2", ReceiveKv).sources == (KvSource("w1.1", LAST, is_awaited=False),)
    (target,) = last_order(bench, "w1", SendKv).targets
    assert (target.to.to, target.to.endpoint) == ("w2.1", "tcp://w2-kv")
    assert target == KvTarget(target.to, LAST, is_urgent=True)
    for _ in range(5):
        (step,) = steps(bench.finish())
        assert step.epoch == bench.epoch


def test_nothing_is_computed_again() -> None:
    """The steps in flight end, exact positions are copied, and then the plan is activated with all of them."""
    bench = copying(loading())
    sequence = bench.sequence()
    assert steps(bench.log) == []  # nothing is dispatched, although a token could be computed
    assert sequence.kv == sequence.sampled - 1
    exact = (SequencePosition(sequence.id, sequence.kv),)
    assert last_order(bench, "w2", ReceiveKv).awaited == exact
    assert last_order(bench, "w2", ReceiveKv).sources == (KvSource("w1.1", LAST),)
    (target,) = last_order(bench, "w1", SendKv).targets
    assert target.until == exact
    assert not orders(bench.log, Activate)
    report(bench)
    activations = dict(orders(bench.log, Activate))
    assert {peer: order.live for peer, order in activations.items()} == {"w0.1": exact, "w2.1": exact}  # type: ignore[attr-defined]
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.state.counters["migrations"] == 1
    assert bench.state.counters["migrations_incomplete"] == 0
    assert sequence.num_recomputed == 0
    assert "replayed_positions" not in bench.state.counters
    assert [(r.start, r.count) for r in bench.pipe[0].rows] == [(sequence.kv, 1)]
    bench.run_dry()
    assert sequence.reason == "length"


def test_the_change_waits_for_copies_that_are_far_behind() -> None:
    bench = loading()
    load(bench)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    report(bench, bench.sequence().kv - NEAR_POSITIONS - 1)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    assert steps(bench.finish())
    report(bench, bench.sequence().kv - NEAR_POSITIONS)
    assert bench.state.plans.phase is PlanPhase.COPYING


def test_a_report_counts_by_the_positions_at_its_time() -> None:
    """Reports come once a second; a quick model is far further by the next one."""
    bench = loading()
    report(bench)
    for _ in range(2 * NEAR_POSITIONS):
        bench.finish()
    load(bench)
    assert bench.state.plans.phase is PlanPhase.COPYING


def test_late_copies_are_not_waited_for() -> None:
    """The active plan serves for some seconds; then dispatching pauses for at most one."""
    bench = loading()
    load(bench)
    bench.tick(GRACE_S - 0.3)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    bench.tick(0.5)
    assert bench.state.plans.phase is PlanPhase.COPYING
    bench.finish()
    bench.tick(TAIL_S - 0.2)
    assert bench.state.plans.phase is PlanPhase.COPYING
    assert bench.state.plans.current is not None
    bench.workers["w2"].held = {bench.sequence().id: 0}
    bench.tick(0.3)
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert bench.state.counters["migrations_incomplete"] == 1
    assert_ends(bench)


def test_the_wait_grows_with_the_size_and_the_measured_rate() -> None:
    """64 positions in a second: the rest of 400 takes its time, but there is an upper limit."""
    bench = loading()
    began = bench.now
    bench.tick(1.0)
    report(bench, 2 * BLOCK)
    rate = 2 * BLOCK / (bench.now - began + 0.1)
    assert bench.state.migration.wait_until - began == pytest.approx(GRACE_S + 3 * bench.sequence().kv / rate, rel=0.2)
    bench.tick(60.0)
    report(bench, 3 * BLOCK)
    assert bench.state.migration.wait_until - began == pytest.approx(MAX_COPY_S, abs=1.0)


def test_replicas_go_on_beside_the_copies() -> None:
    """The receiver keeps what it holds for others, and a layer is not sent twice."""
    bench = serving("neighbours", "neighbours", memory_bytes=200 * MIB)
    bench.tick(1.0)
    before = {(t.to.to, t.layers) for source in ("w0", "w1") for t in bench.state.kv_copies.targets[f"{source}.1"]}
    assert before
    bench.mute = {"w2"}
    drain(bench)
    layers: dict[tuple[str, str], list[int]] = {}
    for source, targets in bench.state.kv_copies.targets.items():
        for target in targets:
            own = layers.setdefault((source, target.to.to), [])
            own += range(target.layers.first, target.layers.stop)
    assert all(len(own) == len(set(own)) for own in layers.values())
    assert set(layers["w1.1", "w2.1"]) >= {3, 4, 5}
    for holder, named in before:
        source = "w0.1" if named.first < 3 else "w1.1"
        assert set(range(named.first, named.stop)) <= set(layers[source, holder])


def test_replicas_are_cared_for_while_the_next_plan_loads() -> None:
    """Loading may take long. A route that stands still is ordered again, and ended sequences are dropped; the copies of
    the change of plan go on as they are."""
    bench = loading(standby_kv="neighbours", standby="neighbours")
    sequence = bench.sequence().id
    (replica,) = [route for route in bench.state.kv_copies.replicas if route.source == "w0.1"]
    assert replica.holder == "w1.1"

    def tell(name: str, position: int, layers: LayerRange, *ended: int) -> None:
        held = tuple(HeldSequence(each, (RangePosition(layers, position),)) for each in (sequence, *ended))
        bench.tell(name, KvHeld(epoch=bench.epoch, incarnation=f"{name}.1", held=held, free_bytes=1 << 30))

    tell("w1", BLOCK, replica.layers)
    tell("w0", LONG + NUM_TOKENS, LAST)  # the other direction is complete
    bench.take()
    for second in range(8):
        tell("w2", 2 * BLOCK + second, LAST)
        bench.tick(1.0)
    assert bench.state.plans.phase is PlanPhase.PREPARING
    assert bench.state.counters["kv_copies_reordered"] >= 1
    (target,) = last_order(bench, "w0", SendKv).targets
    assert target.to.to == "w1.1"
    assert target.held == (SequencePosition(sequence, BLOCK),)
    assert not [peer for peer, _ in orders(bench.log, SendKv) if peer == "w1.1"]
    tell("w1", 2 * BLOCK, replica.layers, 999)
    bench.tick(0.6)
    order = last_order(bench, "w1", ReceiveKv)
    assert order.ended == (999,)
    assert [source.layers for source in order.sources] == [replica.layers]
    load(bench)
    assert_ends(bench)


def test_copies_that_a_receiver_has_already_are_not_sent_again() -> None:
    bench = serving()
    bench.state.kv_copies.held.clear()
    report(bench, 8 * BLOCK)
    drain(bench)
    (target,) = last_order(bench, "w1", SendKv).targets
    assert target.held == (SequencePosition(bench.sequence().id, 8 * BLOCK),)


def test_copies_without_progress_are_ordered_again() -> None:
    """From what is held: a part has been lost on its way."""
    bench = loading()
    report(bench, 2 * BLOCK)
    bench.take()
    bench.tick(STALLED_S - 0.2)
    assert not orders(bench.log, SendKv)
    bench.tick(0.5)
    (target,) = last_order(bench, "w1", SendKv).targets
    assert target.held == (SequencePosition(bench.sequence().id, 2 * BLOCK),)
    assert last_order(bench, "w2", ReceiveKv).sources == (KvSource("w1.1", LAST, is_awaited=False),)
    assert bench.state.counters["copies_ordered_again"] == 1


def test_a_worker_that_came_back_keeps_its_copies() -> None:
    """What it held before counts for nothing; what it was ordered to hold does."""
    bench = serving()
    worker = bench.add("w3", bits="alike", kv_endpoint="tcp://w3-kv")
    foreign = holds(bench.sequence().id, 8, LAST)
    bench.tell("w3", worker.hello(lineage=worker.lineage, held=(foreign,)))
    bench.lose("w2")
    bench.mute = {"w3"}
    drain(bench)
    report(bench, name="w3")
    load(bench, "w3")
    bench.finish()
    report(bench, name="w3")
    (live,) = [order.live for peer, order in orders(bench.log, Activate) if peer == "w3.1"]  # type: ignore[attr-defined]
    assert live == (SequencePosition(bench.sequence().id, bench.sequence().kv),)


def test_without_sequences_there_is_nothing_to_wait_for() -> None:
    bench = serving()
    bench.say(Cancel(request_id="r"))
    bench.run_dry()
    drain(bench)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.state.plans.phase is PlanPhase.SERVING


# --- what can't be copied ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"kv_endpoint": ""}, {"bits": "other"}])
def test_layers_that_cannot_be_copied_are_replayed(fields: dict[str, object]) -> None:
    """The receiver takes no copies, or computes other bits, as shows once it has loaded."""
    bench = loading(**fields)
    bench.workers["w2"].held = {bench.sequence().id: 0}
    load(bench)
    if "bits" in fields:
        assert last_order(bench, "w2", ReceiveKv).sources == ()
        assert last_order(bench, "w1", SendKv).targets == ()
        bench.finish()
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert_ends(bench)


@pytest.mark.parametrize("bits", ["alike", "other"])
def test_copies_of_a_sender_that_dies_count_only_with_equal_bits(bits: str) -> None:
    """The receiver reports its bits when it has loaded the layers for the recovery, and drops what it has received
    before it takes them over (simulated seed 30564)."""
    bench = loading(bits=bits)
    report(bench, 2 * BLOCK)
    bench.lose("w1")
    bench.tick(0.5)
    bench.take()
    bench.workers["w2"].held = {bench.sequence().id: 0}
    load(bench)
    told = [order for peer, order in orders(bench.log) if peer == "w2.1"]
    before = told[: next(place for place, order in enumerate(told) if isinstance(order, Activate))]
    assert [order.sources for order in before if isinstance(order, ReceiveKv)] == ([] if bits == "alike" else [()])
    assert_ends(bench)


def test_a_blocked_route_carries_no_copies() -> None:
    bench = serving()
    bench.state.routes.block("w1.1", bench.state.workers["w2.1"], "no route to host", bench.now)
    drain(bench)
    assert not orders(bench.log, SendKv)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}


def test_a_sequence_whose_layers_are_being_rebuilt_is_not_waited_for() -> None:
    """The stages of the active plan don't hold it completely. The chunk in flight is the last one under this plan."""
    bench = loading()
    bench.workers["w0"].logged = {bench.sequence().id: LONG + NUM_TOKENS}
    bench.workers["w2"].held = {bench.sequence().id: 0}
    bench.mute = set()
    bench.lose("w1")
    bench.tick(0.3)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.sequence().rebuilds
    bench.workers["w1"] = bench.add("w1", "w1.2", bits="alike", kv_endpoint="tcp://w1-kv")
    bench.workers["w1"].held = {bench.sequence().id: 0}
    bench.tell("w1", bench.workers["w1"].hello())
    assert bench.ask(PlanCommand(verb="uncordon", worker="w1")).ok
    drain(bench, "w2")
    assert bench.state.plans.phase is PlanPhase.COPYING
    end_chunk(bench, "w2")
    assert ranges(bench) == {"w0": FIRST, "w1": LAST}
    assert not bench.state.counters.get("migrations_incomplete")
    for _ in range(2):
        end_chunk(bench, "w1")
    assert not bench.sequence().rebuilds
    assert_ends(bench)


# --- interruptions ----------------------------------------------------------------------------------------------------

Moment = Literal["loading", "stopped", "copying"]
MOMENTS: tuple[Moment, ...] = ("loading", "stopped", "copying")


def at(moment: Moment) -> Bench:
    bench = loading()
    if moment == "stopped":
        stopped(bench)
    if moment == "copying":
        copying(bench)
    return bench


@pytest.mark.parametrize("moment", MOMENTS)
def test_receiver_dies(moment: Moment) -> None:
    """The active plan goes on as if nothing had been planned, until another worker can take the layers."""
    bench = at(moment)
    bench.take()
    epoch = bench.epoch
    bench.lose("w2")
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert bench.epoch == epoch
    assert bench.state.migration.routes == ()
    assert last_order(bench, "w1", SendKv).targets == ()
    assert bench.pipe  # dispatching goes on
    assert_ends(bench)
    assert bench.sequence().num_recomputed == 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_sender_dies(moment: Moment) -> None:
    """A loss like any other; steps in flight are lost with it."""
    bench = at(moment)
    bench.workers["w2"].held = {bench.sequence().id: 0}
    bench.mute = set()
    bench.lose("w1")
    assert bench.state.migration.routes == ()
    bench.tick(0.3)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.state.recoveries.num + (bench.state.recoveries.current is not None) == 1
    assert_ends(bench)


@pytest.mark.parametrize("moment", MOMENTS)
def test_stage_that_stays_dies(moment: Moment) -> None:
    """It is in both plans."""
    bench = at(moment)
    bench.mute = set()
    join(bench, "w3")
    for name in ("w2", "w3"):
        bench.workers[name].held = {bench.sequence().id: 0}
    bench.lose("w0")
    bench.tick(0.3)
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert bench.sequence().state.value == "running"
    assert bench.state.migration.routes == ()


@pytest.mark.parametrize("moment", ["stopped", "copying"])
def test_data_path_breaks(moment: Moment) -> None:
    bench = at(moment)
    bench.tell("w0", DataPathError(epoch=bench.epoch, incarnation="w0.1", reason="a step was lost"))
    assert bench.state.migration.routes == ()
    bench.workers["w2"].held = {bench.sequence().id: 0}
    for _ in range(6):
        bench.tick(0.3)
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert_ends(bench)


@pytest.mark.parametrize("moment", MOMENTS)
def test_receiver_leaves(moment: Moment) -> None:
    """It is released, since the active plan does not need it."""
    bench = at(moment)
    bench.take()
    bench.tell("w2", Leaving(incarnation="w2.1", reason="SIGTERM"))
    bench.tick()
    assert [peer for peer, _ in orders(bench.log, Release)] == ["w2.1"]
    assert ranges(bench) == {"w0": FIRST, "w1": LAST}
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert_ends(bench)


def test_receiver_refuses() -> None:
    bench = loading()
    bench.tell("w2", Refused(epoch=bench.state.plans.epoch, incarnation="w2.1", reason="no memory"))
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert last_order(bench, "w1", SendKv).targets == ()
    assert last_order(bench, "w2", ReceiveKv).sources == ()
    assert_ends(bench)


def test_leaving_worker_is_released_after_its_keys_and_values_have_moved() -> None:
    bench = serving()
    bench.mute = {"w2"}
    bench.tell("w1", Leaving(incarnation="w1.1", reason="SIGTERM"))
    bench.tick()
    copying(bench)
    assert not orders(bench.log, Release)
    report(bench)
    assert [peer for peer, _ in orders(bench.log, Release)] == ["w1.1"]
    assert bench.state.workers["w1.1"].state is WorkerState.LEFT
    assert bench.sequence().num_recomputed == 0


def test_leaving_worker_is_released_before_its_process_ends() -> None:
    """It waits for eight seconds at most; what is not copied in half of that is replayed."""
    bench = serving()
    bench.mute = {"w2"}
    bench.tell("w1", Leaving(incarnation="w1.1", reason="SIGTERM"))
    bench.tick()
    load(bench)
    bench.workers["w2"].held = {bench.sequence().id: 0}
    for _ in range(int((LEAVING_S + TAIL_S) / 0.1) + 2):
        if bench.pipe:
            bench.finish()
        bench.tick()
    assert [peer for peer, _ in orders(bench.log, Release)] == ["w1.1"]
    assert LEAVING_S + TAIL_S < RELEASE_TIMEOUT_S - 2
    assert bench.state.recoveries.num == 0
    assert_ends(bench)


@pytest.mark.parametrize("moment", MOMENTS)
def test_request_is_cancelled(moment: Moment) -> None:
    """Its copies are not waited for beyond the deadline; another request goes on."""
    bench = at(moment)
    bench.say(submit("s", num_prompt=3, max_tokens=5, ignore_eos=True))
    bench.say(Cancel(request_id="r"))
    bench.mute = set()
    if moment == "loading":
        load(bench)
    while bench.pipe and bench.state.plans.phase is not PlanPhase.SERVING:
        bench.finish()
    bench.tick(TAIL_S + 0.2)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    bench.run_dry()
    assert bench.sequence("s").reason == "length"


@pytest.mark.parametrize("moment", ["stopped", "copying"])
def test_new_request_waits_for_the_next_plan(moment: Moment) -> None:
    """It is accepted; its first step goes to the stages of the next plan."""
    bench = at(moment)
    bench.take()
    bench.say(submit("s", num_prompt=3, max_tokens=5, ignore_eos=True))
    assert steps(bench.log) == []
    if moment == "stopped":
        bench.finish()
    epoch = bench.epoch
    report(bench)
    assert bench.epoch > epoch
    bench.run_dry()
    assert bench.sequence("s").reason == "length"
    assert bench.sequence("r").num_recomputed == 0


def test_step_that_never_ends_does_not_block_the_change() -> None:
    """It is computed again, as after any change."""
    bench = stopped(loading())
    lost = bench.sequence().kv
    bench.tick(DRAIN_S - 0.5)
    assert bench.state.plans.phase is PlanPhase.COPYING
    assert bench.state.migration.tail == {}
    bench.tick(10.0)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.sequence().kv == lost
    bench.run_dry()
    assert bench.sequence().num_generated == NUM_TOKENS


def test_pause_of_the_broker_shortens_no_wait() -> None:
    """A broker that is stopped for a minute has read no report."""
    bench = copying(loading())
    bench.now += 60.0
    for name in bench.workers:
        bench.beat(name)
    assert bench.state.plans.phase is PlanPhase.COPYING
    report(bench)
    assert ranges(bench) == {"w0": FIRST, "w2": LAST}
    assert bench.state.counters["migrations_incomplete"] == 0


def test_reports_of_an_older_plan_do_not_count() -> None:
    bench = copying(loading())
    kv = bench.sequence().kv
    held = (HeldSequence(bench.sequence().id, (RangePosition(LAST, kv),)),)
    bench.tell("w2", KvHeld(epoch=bench.epoch - 1, incarnation="w2.1", held=held, is_complete=True))
    assert bench.state.plans.phase is PlanPhase.COPYING
    assert bench.state.migration.incomplete == {"w2.1"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_broker_restarts(moment: Moment) -> None:
    """Its successor waits for the present holders as well as for the next ones, and goes on with what those hold."""
    bench = loading()
    (epoch,) = [action for action in bench.log if isinstance(action, WriteEpoch)]
    assert set(epoch.workers) == {"w0", "w1", "w2"}
    if moment == "stopped":
        stopped(bench)
    if moment == "copying":
        copying(bench)
    sequence = bench.sequence()
    record = SequenceRecord(sequence.id, 0, sequence.tokens[LONG:])
    request = RequestRecord(sequence.request.submit, "tenant", 0.0, [record])
    past = JournalSnapshot(epoch.epoch, epoch.workers, sequence.id + 1, (request,), epoch.manifest)
    after = Bench(bench.settings, past)
    for name, layers in (("w2", None), ("w0", FIRST), ("w1", LAST)):
        assert after.state.plans.current is None
        held = (
            () if layers is None else (holds(sequence.id, sequence.kv, layers, tuple(sequence.tokens), sequence.limit),)
        )
        worker = after.add(name, bits="alike", kv_endpoint=f"tcp://{name}-kv")
        after.tell(name, worker.hello(epoch=epoch.epoch, held_layers=layers, held=held))
    after.tick()
    assert ranges(after) == {"w0": FIRST, "w1": LAST}
    assert [(r.start, r.count) for r in after.pipe[0].rows] == [(sequence.kv, 1)]
    assert_ends(after)

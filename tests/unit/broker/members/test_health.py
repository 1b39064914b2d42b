"""Beats in, verdicts out: hung is not slow is not loading is not dead."""

from __future__ import annotations

import random

import msgspec
import pytest

from swarm.broker.core import PAUSE_S
from swarm.broker.events import MessageRefused, Tick, WorkerDisconnected
from swarm.broker.members.health import ExpectedTimes, HealthLimits, judge
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import WorkerState
from swarm.broker.state.workers import HeartbeatHistory, Judgement, Verdict
from swarm.wire.messages import Fence, Heartbeat, LayerCost, LeaseRenewed, LinkCost, Rejoin, Stats, Unassign, Welcome
from tests.unit.broker.bench import Bench, beat_of, orders, settings, submit

CALL_AGAIN_TICKS = 19  # of a tenth of a second: just less than it takes until somebody is called (again)
RULES = HealthLimits(beat_timeout_s=0.7, hang_factor=10.0, hang_min_s=2.0)


def beat(state: str = "idle", progress: int = 0, blocked_on: str = "", since_s: float = 0.0) -> Heartbeat:
    return beat_of("w.1", progress=progress, state=state, blocked_on=blocked_on, since_s=since_s)


def after(*beats: tuple[float, Heartbeat]) -> HeartbeatHistory:
    """A pulse that began at 0 and took these beats."""
    pulse = HeartbeatHistory(0.0)
    for now, one in beats:
        pulse.record(one, now)
    return pulse


@pytest.mark.parametrize(
    ("pulse", "usual_step_s", "now", "verdict", "evidence"),
    [
        # It has just joined: its welcome and then its first beat may both be late.
        (after(), 0.0, 1.4, Verdict.WELL, "just joined"),
        (after(), 0.0, 1.41, Verdict.SILENT, "no heartbeat for 1410 ms"),
        # It beats, and does nothing.
        (after((1.0, beat())), 0.0, 1.6, Verdict.WELL, "idle, last heartbeat 600 ms ago"),
        (after((1.0, beat())), 0.0, 1.8, Verdict.SILENT, "no heartbeat for 800 ms"),
        # It loads, however long, if the counter moves every now and then.
        (
            after(*((float(t), beat("loading", progress=t // 25, since_s=t)) for t in range(200))),
            0.0,
            199.5,
            Verdict.LOADING,
            "loading for 199.5 s",
        ),
        # It loads, and the counter stands still.
        (after((5.0, beat("loading")), (34.9, beat("loading"))), 0.0, 35.0, Verdict.LOADING, "loading"),
        (
            after((5.0, beat("loading")), (35.1, beat("loading"))),
            0.0,
            35.1,
            Verdict.HUNG,
            "loading, no progress for 30.1 s (allowed 30.0 s)",
        ),
        # What it did not do while it loaded is not held against it when it computes.
        (
            after((5.0, beat("loading")), (20.0, beat("loading")), (21.0, beat("computing"))),
            0.0,
            21.5,
            Verdict.WELL,
            "computing",
        ),
        # It waits for another.
        (
            after((60.0, beat("blocked", blocked_on="w2", since_s=9.0))),
            0.0,
            60.0,
            Verdict.BLOCKED,
            "blocked on w2 for 9.0 s",
        ),
        # It computes, and the counter moves.
        (
            after(*((t / 2, beat("computing", progress=t)) for t in range(40))),
            0.01,
            20.0,
            Verdict.WELL,
            "computing, last heartbeat 500 ms ago",
        ),
        # It computes, and the counter stands still: for a short while, for the longest allowed, for longer.
        (
            after((1.0, beat("computing")), (3.0, beat("computing"))),
            0.01,
            3.0,
            Verdict.WELL,
            "computing, last heartbeat",
        ),
        (
            after((1.0, beat("computing")), (3.1, beat("computing"))),
            0.01,
            3.1,
            Verdict.HUNG,
            "computing, no progress for 2.1 s (allowed 2.0 s)",
        ),
        # Steps that usually take a second are given ten.
        (after((1.0, beat("computing")), (10.9, beat("computing"))), 1.0, 10.9, Verdict.WELL, "computing"),
        (
            after((1.0, beat("computing")), (11.1, beat("computing"))),
            1.0,
            11.1,
            Verdict.HUNG,
            "computing, no progress for 10.1 s (allowed 10.0 s)",
        ),
        # It was idle in between: the clock starts when it begins to compute.
        (
            after((1.0, beat("computing")), (9.0, beat("idle")), (10.5, beat("computing"))),
            0.0,
            10.5,
            Verdict.WELL,
            "computing",
        ),
        # Parked workers are well: they wait for us.
        (after((1.0, beat("parked", since_s=9.0))), 0.0, 1.0, Verdict.WELL, "parked"),
    ],
)
def test_each_evidence_has_its_verdict(
    pulse: HeartbeatHistory, usual_step_s: float, now: float, verdict: Verdict, evidence: str
) -> None:
    """The table of verdicts, each with its evidence in words."""
    found = judge(pulse, RULES, ExpectedTimes(usual_step_s), now)
    assert found.verdict is verdict
    assert found.evidence.startswith(evidence)


COMPUTING = [(1.0 + t / 10, beat("computing", since_s=t / 10)) for t in range(31)]  # nothing moves for 3 s


def test_a_worker_that_is_stopped_while_it_computes_is_silent() -> None:
    """Also where silence is allowed for longer than a standstill: without heartbeats the counter is unknown, and a hang
    would blame its requests."""
    pulse = after(*((t / 10, beat("computing", progress=t)) for t in range(21)))  # the last one at 2.0
    rules = HealthLimits(beat_timeout_s=3.0, beat_least_s=2.5, hang_min_s=2.0)
    assert judge(pulse, rules, ExpectedTimes(), 4.4).evidence == "computing, last heartbeat 2400 ms ago"
    assert judge(pulse, rules, ExpectedTimes(), 4.6).verdict is Verdict.SILENT


@pytest.mark.parametrize(
    ("expected", "verdict", "evidence"),
    [
        # Nothing is known of the step in hand: at least two seconds, ten times the usual time.
        (ExpectedTimes(0.1), Verdict.HUNG, "computing, no progress for 3.0 s (allowed 2.0 s)"),
        # A long prompt: what is usual says nothing about it.
        (ExpectedTimes(0.1, in_hand_s=0.31, num_layers=0), Verdict.WELL, "computing"),
        # The same step on a worker that is known to be slow, as far as the steps before showed.
        (ExpectedTimes(0.1, in_hand_s=0.2, num_layers=0, pace=1.0), Verdict.HUNG, "computing, no progress for 3.0 s"),
        (ExpectedTimes(0.1, in_hand_s=0.2, num_layers=0, pace=2.0), Verdict.WELL, "computing"),
        # One that was quicker than predicted until now gets no less for that.
        (ExpectedTimes(0.1, in_hand_s=0.31, num_layers=0, pace=0.5), Verdict.WELL, "computing"),
    ],
)
def test_a_hang_is_told_by_what_the_step_in_hand_should_take(
    expected: ExpectedTimes, verdict: Verdict, evidence: str
) -> None:
    """Ten times the larger of what is usual and what was predicted for this step."""
    found = judge(after(*COMPUTING), RULES, expected, 4.0)
    assert (found.verdict, found.evidence[: len(evidence)]) == (verdict, evidence)


def test_a_step_may_take_minutes() -> None:
    """A layer every 1.9 seconds where fifty in a second were predicted: slow, with its measured pace, and never out."""
    pulse, expected = HeartbeatHistory(0.0), ExpectedTimes(0.1, in_hand_s=0.16, num_layers=8)
    for tenth in range(1, 3000):
        now = tenth / 10
        pulse.record(beat("computing", progress=int(now / 1.9), since_s=now), now)
        found = judge(pulse, RULES, expected, now)
        assert not found.verdict.is_out, (now, found)
        if now > 10.0:
            assert found.verdict is Verdict.SLOW
    assert found.evidence.startswith("computing for 299.9 s at 0.")
    assert found.evidence.endswith("layers per second, predicted: 50")


def test_slow_by_the_steps_before() -> None:
    """Three times longer than predicted is slow, and kept; less is what a busy machine does."""
    pulse = after((1.0, beat()))
    found = judge(pulse, RULES, ExpectedTimes(0.1, pace=3.5), 1.1)
    assert found == Judgement(Verdict.SLOW, "idle, its steps take 3.5 times as long as predicted")
    assert judge(pulse, RULES, ExpectedTimes(0.1, pace=2.9), 1.1).verdict is Verdict.WELL


def test_a_control_loop_that_stands_still_is_a_hang() -> None:
    """Three seconds are nobody's business, more than ten are a hang. A process that was stopped and goes on says once
    that its loop stood still: that is none."""

    def lagging(*lags: float) -> Verdict:
        pulse = after(*((i / 10, msgspec.structs.replace(beat(), loop_lag_s=lag)) for i, lag in enumerate(lags)))
        return judge(pulse, RULES, ExpectedTimes(), len(lags) / 10).verdict

    assert lagging(3.0, 3.1) is Verdict.WELL
    assert lagging(9.9, 10.0) is Verdict.WELL
    assert lagging(10.1, 10.2) is Verdict.HUNG
    assert lagging(0.0, 60.0) is Verdict.WELL
    assert lagging(60.0, 0.0) is Verdict.WELL


def test_half_a_second_of_jitter_gives_no_verdict() -> None:
    """Beats that come up to 500 ms late, each by chance, in order: nobody is out."""
    chance, pulse, came_at = random.Random(5), HeartbeatHistory(0.0), 0.0
    for number in range(1, 20_000):
        came_at = max(came_at, number / 10 + chance.uniform(0.0, 0.5))
        assert judge(pulse, RULES, ExpectedTimes(), came_at).verdict is Verdict.WELL
        pulse.record(beat(), came_at)


def test_which_verdicts_put_out() -> None:
    """Loading, blocked and well workers stay."""
    out = {Verdict.SILENT, Verdict.HUNG, Verdict.DEAD, Verdict.CORRUPT, Verdict.FAILED, Verdict.DIFFERS}
    assert {v for v in Verdict if v.is_out} == out


def test_forgiving_moves_every_deadline() -> None:
    """What the broker missed while it stood still itself is nobody's fault."""
    pulse = after((1.0, beat("computing")), (2.5, beat("computing")))
    assert judge(pulse, RULES, ExpectedTimes(), 5.0).verdict is Verdict.SILENT
    pulse.shift_deadlines(3.0, 5.0)
    assert judge(pulse, RULES, ExpectedTimes(), 5.0).verdict is Verdict.WELL
    pulse.record(beat("computing"), 6.5)
    # Still for 5.5 s, 3.0 of which are forgiven.
    assert judge(pulse, RULES, ExpectedTimes(), 6.5) == Judgement(
        Verdict.HUNG, "computing, no progress for 2.5 s (allowed 2.0 s)"
    )


# --- in the core -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_out(serving: Bench) -> None:
    """No beat for 700 ms: out, with the evidence in its record; the plan is made without it."""
    serving.silent = {"w1"}
    serving.tick(0.6)
    assert serving.state.workers["w1.1"].state is WorkerState.MEMBER
    serving.tick(0.3)
    worker = serving.state.workers["w1.1"]
    assert worker.state is WorkerState.OUT
    assert worker.reason.startswith("no heartbeat for")
    assert serving.judgements_of("w1") == Judgement(Verdict.SILENT, worker.reason)


def test_a_hung_worker_is_out_and_its_sequences_are_blamed(serving: Bench) -> None:
    """It beats, and computes nothing: what it was given may be the cause."""
    serving.say(submit())
    serving.silent = {"w1"}
    for _ in range(25):
        serving.beat("w1", state="computing")
        serving.tick(0.1)
    worker = serving.state.workers["w1.1"]
    assert worker.state is WorkerState.OUT
    assert "no progress" in worker.reason
    assert serving.sequence().num_deaths == 1


def test_a_frozen_worker_blames_nobody(serving: Bench) -> None:
    """A process that was stopped from outside says nothing about the requests it held."""
    serving.say(submit())
    serving.silent = {"w1"}
    serving.tick(1.0)
    assert serving.state.workers["w1.1"].state is WorkerState.OUT
    assert serving.sequence().num_deaths == 0


def test_a_closed_connection_is_a_death_at_once(serving: Bench) -> None:
    """No waiting for beats."""
    serving.say(submit())
    serving.feed(WorkerDisconnected(b"w1.1"))
    assert serving.state.workers["w1.1"].reason == "its connection closed"
    assert serving.epoch == 2
    assert serving.sequence().num_deaths == 1
    # The same connection can't die twice, nor can a stranger's.
    serving.take()
    assert serving.feed(WorkerDisconnected(b"w1.1")) == []
    assert serving.feed(WorkerDisconnected(b"nobody")) == []


def test_the_brokers_own_pause_is_forgiven(make_bench) -> None:
    """The broker stood still for a minute. Nobody is out for it, no deadline passed, no step is lost."""
    bench = make_bench().serve(2)
    bench.say(submit(deadline_s=5.0))
    bench.tick(0.5)
    bench.now += 60.0
    bench.take()
    assert {type(o) for _, o in orders(bench.feed(Tick()))} == {LeaseRenewed}  # leases are renewed, nothing else
    assert bench.state.counters["own_pauses"] == 1
    assert all(w.state is WorkerState.MEMBER for w in bench.state.workers.values())
    assert bench.sequence().reason is None
    # The beats that were waiting are read now: idle for all that time. The step's answer is among what is read next.
    for name in ("w0", "w1"):
        assert bench.beat(name, since_s=60.0) == []
    assert bench.feed(Tick()) == []
    bench.finish()
    assert bench.state.counters["step_seconds"] < 1.0
    # From here on time counts as ever: 4.5 s are left.
    bench.tick(4.2)
    assert bench.sequence().reason is None
    bench.tick(0.5)
    assert bench.sequence().reason == "failed"


def test_the_brokers_own_pause_gives_workers_more_time_to_load(make_bench) -> None:
    """Who is to load layers has the time that it was promised, without the minute in which nobody listened."""
    bench = make_bench(settings(plan=ReconfigurationSettings(settle_s=0.0, prepare_timeout_s=2.0)))
    bench.mute = {"w0"}
    bench.join("w0")
    bench.tick(1.5)
    bench.now += 60.0
    bench.feed(Tick())
    assert bench.state.workers["w0.1"].state is WorkerState.MEMBER
    bench.tick(0.3)
    assert bench.state.workers["w0.1"].state is WorkerState.MEMBER
    bench.tick(1.0)
    assert bench.state.workers["w0.1"].state is WorkerState.OUT


def test_a_beat_that_is_heard_before_the_pause_is_noticed(serving: Bench) -> None:
    """It is no younger than the moment in which it was heard: a worker that stops right then is out in time."""
    serving.silent = {"w1"}
    for _ in range(4):  # four times a fifth of a second, and a beat each time: only the tick can tell that it was late
        serving.now += 0.2
        serving.beat("w0")
    serving.beat("w1")
    serving.feed(Tick())
    assert serving.state.counters["own_pauses"] == 1
    serving.tick(0.6)
    assert serving.state.workers["w1.1"].state is WorkerState.MEMBER
    serving.tick(0.3)
    assert serving.state.workers["w1.1"].state is WorkerState.OUT


def test_many_short_pauses_are_one(serving: Bench) -> None:
    """The broker is late again and again between two ticks, each time by less than a pause: nobody is blamed."""
    for _ in range(10):
        serving.now += 0.2
        serving.feed(MessageRefused("client"))
    serving.feed(Tick())
    assert serving.state.counters["own_pauses"] == 1
    assert all(w.state is WorkerState.MEMBER for w in serving.state.workers.values())


def test_a_broker_that_is_always_late_misses_the_dead_all_the_same(serving: Bench) -> None:
    """Half a second between any two ticks: who beats is kept, who doesn't is out, only later."""
    serving.silent = {"w1"}
    for _ in range(20):
        serving.now += 0.5
        serving.beat("w0")
        serving.feed(Tick())
    assert serving.state.workers["w0.1"].state is WorkerState.MEMBER
    assert serving.state.workers["w1.1"].state is WorkerState.OUT


def test_a_short_gap_is_no_pause(serving: Bench) -> None:
    """What a busy loop loses now and then is not counted."""
    serving.now += PAUSE_S
    serving.feed(Tick())
    assert "own_pauses" not in serving.state.counters


def test_a_lost_step_is_noticed(serving: Bench) -> None:
    """A step is under way, yet every stage has long been idle: the data path is made anew, nobody is blamed."""
    serving.say(submit())
    serving.silent = {"w0", "w1"}
    for tenth in range(12):
        for name in ("w0", "w1"):
            serving.beat(name, since_s=tenth / 10)
        serving.tick(0.1)
    assert serving.epoch == 2
    assert serving.state.counters["steps_lost"] == 1
    assert serving.sequence().num_deaths == 0
    assert all(w.state is WorkerState.MEMBER for w in serving.state.workers.values())


def test_each_loss_in_a_row_is_waited_for_longer(serving: Bench) -> None:
    """Where packets are lost TCP sends them again, each time later: a step that was lost once gets more time than the
    first, so that a bad wire is not taken for a bad request."""
    serving.say(submit())
    serving.silent = {"w0", "w1"}
    lost_at: list[int] = []
    for tenth in range(90):
        for name in ("w0", "w1"):
            serving.beat(name, since_s=tenth / 10)
        serving.tick(0.1)
        if serving.state.counters.get("steps_lost", 0) > len(lost_at):
            lost_at.append(tenth)
    assert lost_at[1] - lost_at[0] >= 20
    assert lost_at[2] - lost_at[1] >= 40


def test_a_step_that_never_comes_through_ends(serving: Bench) -> None:
    """If a stage refuses what a request's steps carry, again and again, the request fails with that reason instead of
    having plans made for it for ever; the swarm goes on."""
    serving.say(submit())
    serving.silent = {"w0", "w1"}
    for tenth in range(400):
        for name in ("w0", "w1"):
            serving.beat(name, since_s=tenth / 10)
        serving.tick(0.1)
        if serving.sequence().reason is not None:
            break
    assert serving.sequence().reason == "failed"
    assert "quarantined" in serving.sequence().detail
    assert serving.state.counters["steps_lost"] <= 6
    serving.silent = set()
    serving.tick()
    serving.say(submit("other"))
    serving.run_dry()
    assert serving.sequence("other").reason == "length"


def test_what_is_on_a_slow_wire_is_not_lost(make_bench) -> None:
    """Nobody computes, since a prompt's hidden states are on their way over a slow link: waited for three times as long
    as that should take."""
    bench = make_bench()
    size = bench.add("w0").manifest.hidden_size * 4
    for name in ("w0", "w1"):
        worker = bench.add(name)
        bench.tell(name, worker.hello(link=LinkCost(0.01, 100.0 * size)))
    bench.tick()
    bench.say(submit(num_prompt=128))
    (num_positions,) = (flight.num_tokens for flight in bench.state.in_flight.values())
    bench.silent = {"w0", "w1"}
    tenths = 0
    while bench.epoch == 1:
        for name in ("w0", "w1"):
            bench.beat(name, since_s=tenths / 10)
        bench.tick(0.1)
        tenths += 1
        assert tenths < 100
    assert tenths / 10 == pytest.approx(3 * (num_positions / 100 + 0.01), abs=0.3)


def test_two_that_cannot_reach_each_other(make_bench) -> None:
    """w0 is blocked on w1, which lives and has nothing to do. Edges made anew twice don't help: then the plan does
    without w1 for a while, the answer goes on, and no request is blamed."""
    bench = make_bench().serve(2)
    bench.say(submit())
    bench.silent = {"w0", "w1"}
    for tenth in range(100):
        bench.beat("w0", state="blocked", blocked_on="w1.1", since_s=tenth / 10)
        bench.beat("w1", since_s=tenth / 10)
        bench.tick(0.1)
        if bench.state.plans.current is not None and bench.state.plans.current.members == {"w0.1"}:
            break
    assert bench.state.plans.current is not None
    assert bench.state.plans.current.members == {"w0.1"}
    worker = bench.state.workers["w1.1"]
    assert (worker.state, worker.reason) == (WorkerState.REFUSED, "w0 can't reach it, although both are alive")
    assert bench.sequence().num_deaths == 0
    bench.silent = set()
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_a_slow_step_is_not_a_lost_one(serving: Bench) -> None:
    """As long as one stage does anything, the step is on its way."""
    serving.say(submit())
    serving.silent = {"w1"}
    for tenth in range(60):
        serving.beat("w0", since_s=tenth / 10)
        serving.beat("w1", state="computing", progress=tenth)
        serving.tick(0.1)
    assert serving.epoch == 1


def test_a_survivor_is_never_out_for_a_frozen_neighbour(serving: Bench) -> None:
    """It is blocked on the frozen one for as long as that lasts, and judged by it: the evidence names it and its
    verdict, before and after that one is out."""
    serving.silent = {"w0", "w1"}
    for tenth in range(100):
        serving.beat("w0", state="blocked", blocked_on="w1.1", since_s=tenth / 10)
        if serving.judgements_of("w1").verdict is Verdict.WELL:
            text = f"blocked on w1 for {tenth / 10:.1f} s; it is judged by w1, which is well: "
            assert serving.judgements_of("w0").evidence.startswith(text)
        serving.tick(0.1)
    assert serving.state.workers["w1.1"].state is WorkerState.OUT
    assert serving.state.workers["w0.1"].state is WorkerState.MEMBER
    found = serving.judgements_of("w0")
    assert found.verdict is Verdict.BLOCKED
    assert "it is judged by w1, which is silent: no heartbeat for" in found.evidence


def test_a_chain_of_blocked_ones_is_judged_by_its_end(make_bench) -> None:
    """w0 waits for w1, which waits for w2, which is loading. Who waits for the broker, or in a circle, is told so."""
    bench = make_bench().serve(3)
    bench.beat("w0", state="blocked", blocked_on="w1.1", since_s=1.0)
    bench.beat("w1", state="blocked", blocked_on="w2.1", since_s=1.0)
    bench.beat("w2", state="loading", since_s=2.0)
    assert bench.judgements_of("w0").evidence == (
        "blocked on w1 for 1.0 s; it is judged by w2, which is loading: loading for 2.0 s"
    )
    bench.beat("w2", state="blocked", blocked_on="broker")
    assert bench.judgements_of("w0").evidence == "blocked on w1 for 1.0 s; it is judged by the broker"
    bench.beat("w2", state="blocked", blocked_on="w0.1")
    assert bench.judgements_of("w0").verdict is Verdict.BLOCKED


def test_a_reconnection_is_no_life_without_a_hello(serving: Bench) -> None:
    """Its connection was cut and its beats go on: dead at once, and nothing it says counts before it says Hello. It is
    not called at once, since it says Hello by itself over its next connection; only if that takes long."""
    serving.feed(WorkerDisconnected(b"w1.1"))
    assert serving.state.workers["w1.1"].state is WorkerState.OUT
    serving.take()
    for _ in range(CALL_AGAIN_TICKS):
        serving.tick(0.1)
        serving.tell("w1", Stats(incarnation="w1.1", values={}))
        assert serving.state.workers["w1.1"].state is WorkerState.OUT
    assert orders(serving.take(), Rejoin) == []
    assert serving.judgements_of("w1") == Judgement(Verdict.DEAD, "its connection closed")
    serving.tick(0.3)
    assert len(orders(serving.take(), Rejoin)) == 1
    serving.tell("w1", serving.workers["w1"].hello())
    assert serving.state.workers["w1.1"].state is WorkerState.MEMBER
    assert serving.judgements_of("w1").verdict is Verdict.WELL


def test_one_that_was_frozen_is_called_at_once_and_joins_anew(serving: Bench) -> None:
    """The first beat after the verdict: fence and call. It says Hello, is told to drop what it holds, and gets its part
    again; how slow it was is not forgotten."""
    serving.state.workers["w1.1"].pace = 2.5
    serving.silent = {"w1"}
    serving.tick(1.0)
    assert serving.state.workers["w1.1"].state is WorkerState.OUT
    serving.take()
    serving.beat("w1")
    assert [type(order) for _, order in orders(serving.take())] == [Fence, Rejoin]
    serving.silent = set()
    serving.tell("w1", serving.workers["w1"].hello())
    kinds = [type(order) for peer, order in orders(serving.take()) if peer == "w1.1"]
    assert kinds[:2] == [Welcome, Unassign]
    serving.tick(0.2)
    assert serving.state.plans.current is not None
    assert "w1.1" in serving.state.plans.current.members
    assert serving.state.workers["w1.1"].pace == 2.5


def test_a_long_prompt_on_a_slow_worker_is_no_hang(make_bench) -> None:
    """The time that is allowed follows from the step in flight and the worker's measured costs, not from the quick
    steps before; without the prompt in flight, the same stillness is a hang."""
    costs = tuple(
        LayerCost(kind, rows, 0, rows * 1e-3, True) for kind in ("decode", "prefill") for rows in (1, 64, 256)
    )
    bench = make_bench()
    for name in ("w0", "w1"):
        worker = bench.add(name)
        bench.tell(name, worker.hello(costs=costs))
    bench.tick()
    bench.say(submit("quick"))
    bench.run_dry()
    bench.say(submit("long", num_prompt=256, max_tokens=2))
    bench.silent = {"w0"}
    for tenth in range(37):  # 128 positions of it are in the first step, at 1 ms for each of three layers: 3.8 s
        bench.beat("w0", state="computing", progress=5, since_s=tenth / 10)
        bench.tick(0.1)
        assert bench.state.workers["w0.1"].state is WorkerState.MEMBER, (tenth, bench.judgements_of("w0"))
    for tenth in range(37, 50):
        bench.beat("w0", state="computing", progress=5, since_s=tenth / 10)
        bench.tick(0.1)
    assert bench.state.workers["w0.1"].state is WorkerState.OUT
    assert "(allowed 3.8 s)" in bench.state.workers["w0.1"].reason


def test_a_verdict_tells_since_when(serving: Bench) -> None:
    """As long as it is the same one, however the evidence changes; an end keeps its own."""
    began = serving.judgements_of("w1").since
    serving.tick(3.0)
    assert serving.judgements_of("w1").since == began
    serving.silent = {"w1"}
    serving.tick(5.0)
    found = serving.judgements_of("w1")
    assert found.verdict is Verdict.SILENT
    assert serving.now - found.since == pytest.approx(4.6, abs=0.11)  # its beats had come evenly


def test_leases_are_renewed(serving: Bench) -> None:
    """Every member hears from the broker several times per lease, even if there is nothing to say."""
    serving.take()
    serving.tick(10.5)
    assert len(orders(serving.take(), LeaseRenewed)) == 2 * 5


def test_the_long_gone_are_forgotten(serving: Bench) -> None:
    """A crash loop must not fill the memory: only the last sixteen that went are remembered."""
    for number in range(40):
        serving.join(f"x{number}", memory_bytes=1)
        serving.lose(f"x{number}")
    serving.tick()
    gone = [w for w in serving.state.workers.values() if w.state is WorkerState.OUT]
    assert len(gone) == 16
    for number in range(40):
        serving.join("again", incarnation=f"again.{number}", memory_bytes=1)
    serving.tick()
    assert len(serving.state.workers) <= 20


def evenly(stop: float, every_s: float = 0.1) -> list[tuple[float, Heartbeat]]:
    return [(i * every_s, beat()) for i in range(1, round(stop / every_s) + 1)]


@pytest.mark.parametrize(
    ("times", "allowed_s"),
    [
        (evenly(5.0), 0.4),  # never less than that
        (evenly(1.4), 0.7),  # nobody knows yet how evenly they come
        ([*evenly(5.0), (5.2, beat())], 0.6),  # one of late was late
        ([*evenly(5.0), (5.5, beat())], 0.7),  # and no more than that, however late
        ([*evenly(5.0), (5.2, beat()), *((t + 5.2, b) for t, b in evenly(61.0))], 0.4),  # that is long ago
        ([*evenly(5.0), (5.2, beat()), *((t + 5.2, b) for t, b in evenly(20.0))], 0.6),
    ],
)
def test_whose_beats_come_evenly_is_missed_sooner(times: list[tuple[float, Heartbeat]], allowed_s: float) -> None:
    pulse, last = after(*times), times[-1][0]
    assert judge(pulse, RULES, ExpectedTimes(), last + allowed_s - 0.01).verdict is Verdict.WELL
    assert judge(pulse, RULES, ExpectedTimes(), last + allowed_s + 0.01).verdict is Verdict.SILENT


def test_a_pause_of_the_broker_makes_no_beats_uneven() -> None:
    pulse = after(*evenly(5.0))
    pulse.shift_deadlines(3.0, 8.05)
    pulse.record(beat(), 8.1)
    assert pulse.longest_gap_s == pytest.approx(0.1)


def test_who_computes_and_only_sleeps_is_hung_before_who_runs() -> None:
    """Whatever its step should take: nobody computes asleep. One that loads waits for a disk or a network."""

    def asleep(state: str, for_s: float) -> HeartbeatHistory:
        return after((1.0, msgspec.structs.replace(beat(state), asleep_s=for_s)))

    expected = ExpectedTimes(usual_s=60.0)
    assert judge(asleep("computing", 0.7), RULES, expected, 1.1).verdict is Verdict.WELL
    assert judge(asleep("computing", 0.8), RULES, expected, 1.1) == Judgement(
        Verdict.HUNG, "computing, but none of its threads has run for 0.8 s"
    )
    assert judge(asleep("loading", 5.0), RULES, expected, 1.1).verdict is Verdict.LOADING

"""Beats in, verdicts out: hung is not slow is not loading is not dead."""

from __future__ import annotations

import pytest

from swarm.broker.core import PAUSE_S
from swarm.broker.events import Tick, WorkerDisconnected
from swarm.broker.health import HealthSettings, Judgement, Pulse, Verdict, judge
from swarm.broker.state import WorkerState
from swarm.wire.messages import Alive, Beat
from tests.unit.broker.bench import Bench, orders, submit

RULES = HealthSettings(beat_timeout_s=0.7, hang_factor=10.0, hang_min_s=2.0)


def beat(state: str = "idle", progress: int = 0, blocked_on: str = "", since_s: float = 0.0) -> Beat:
    return Beat(
        incarnation="w.1",
        progress=progress,
        state=state,  # type: ignore[arg-type]
        blocked_on=blocked_on,
        since_s=since_s,
        loop_lag_s=0.0,
        memory_bytes=0,
        kv_used=0,
        kv_capacity=0,
    )


def after(*beats: tuple[float, Beat]) -> Pulse:
    """A pulse that began at 0 and took these beats."""
    pulse = Pulse(0.0)
    for now, one in beats:
        pulse.take(one, now)
    return pulse


@pytest.mark.parametrize(
    ("pulse", "usual_step_s", "now", "verdict", "evidence"),
    [
        # It has just joined; its first beat may take as long as any other.
        (after(), 0.0, 0.7, Verdict.WELL, "just joined"),
        (after(), 0.0, 0.71, Verdict.SILENT, "no beat for 710 ms"),
        # It beats, and does nothing.
        (after((1.0, beat())), 0.0, 1.6, Verdict.WELL, "idle, last beat 600 ms ago"),
        (after((1.0, beat())), 0.0, 1.8, Verdict.SILENT, "no beat for 800 ms"),
        # It loads, however long, if the counter moves every now and then.
        (
            after(*((float(t), beat("loading", progress=t // 25, since_s=t)) for t in range(200))),
            0.0,
            199.5,
            Verdict.LOADING,
            "loading for 199.0 s",
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
            "computing, last beat 500 ms ago",
        ),
        # It computes, and the counter stands still: for a short while, for the longest allowed, for longer.
        (after((1.0, beat("computing")), (3.0, beat("computing"))), 0.01, 3.0, Verdict.WELL, "computing, last beat"),
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
def test_verdicts(pulse: Pulse, usual_step_s: float, now: float, verdict: Verdict, evidence: str) -> None:
    """The table of verdicts, each with its evidence in words."""
    found = judge(pulse, RULES, usual_step_s, now)
    assert found.verdict is verdict
    assert found.evidence.startswith(evidence)


def test_which_verdicts_put_out() -> None:
    """Loading, blocked and well workers stay."""
    assert {v for v in Verdict if v.is_out} == {Verdict.SILENT, Verdict.HUNG, Verdict.DEAD}


def test_forgiving_moves_every_deadline() -> None:
    """What the broker missed while it stood still itself is nobody's fault."""
    pulse = after((1.0, beat("computing")), (2.5, beat("computing")))
    assert judge(pulse, RULES, 0.0, 5.0).verdict is Verdict.SILENT
    pulse.forgive(3.0)
    assert judge(pulse, RULES, 0.0, 5.0).verdict is Verdict.WELL
    pulse.take(beat("computing"), 6.5)
    # Still for 5.5 s, 3.0 of which are forgiven.
    assert judge(pulse, RULES, 0.0, 6.5) == Judgement(Verdict.HUNG, "computing, no progress for 2.5 s (allowed 2.0 s)")


# --- in the core -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_out(serving: Bench) -> None:
    """No beat for 700 ms: out, with the evidence in its record; the plan is made without it."""
    serving.silent = {"w1"}
    serving.tick(0.6)
    assert serving.state.workers["w1.1"].state is WorkerState.MEMBER
    serving.tick(0.3)
    worker = serving.state.workers["w1.1"]
    assert worker.state is WorkerState.OUT
    assert worker.reason.startswith("no beat for")
    assert serving.judgements_of("w1") == Judgement(Verdict.DEAD, worker.reason)


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
    assert {type(o) for _, o in orders(bench.feed(Tick()))} == {Alive}  # leases are renewed, nothing else
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


def test_a_step_that_never_comes_through_ends(serving: Bench) -> None:
    """If a stage refuses what a request's steps carry, again and again, the request fails with that reason instead of
    having plans made for it for ever; the swarm goes on."""
    serving.say(submit())
    serving.silent = {"w0", "w1"}
    for tenth in range(400):
        for name in ("w0", "w1"):
            serving.beat(name, since_s=(tenth % 12) / 10)
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


def test_a_slow_step_is_not_a_lost_one(serving: Bench) -> None:
    """As long as one stage does anything, the step is on its way."""
    serving.say(submit())
    serving.silent = {"w1"}
    for tenth in range(60):
        serving.beat("w0", since_s=tenth / 10)
        serving.beat("w1", state="computing", progress=tenth)
        serving.tick(0.1)
    assert serving.epoch == 1


def test_leases_are_renewed(serving: Bench) -> None:
    """Every member hears from the broker several times per lease, even if there is nothing to say."""
    serving.take()
    serving.tick(10.5)
    assert len(orders(serving.take(), Alive)) == 2 * 5


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
    assert len(serving.core._members._pulses) == len(serving.state.workers) <= 20

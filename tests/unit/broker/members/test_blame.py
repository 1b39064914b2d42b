"""Who is to blame for a step that raised: the worker at which steps fail, or the request that makes them fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from swarm.broker.actions import SendToWorker, WriteLog
from swarm.broker.events import WorkerMessageReceived
from swarm.broker.members.blame import FAILED_AFTER, GUILTY_AFTER, OFTEN
from swarm.broker.members.integrity import MAX_PAUSE_S, PAUSE_S
from swarm.broker.state import WorkerState
from swarm.broker.state.evidence import KEEP_S, MAX_FAILURES, Evidence, FailedStep
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import (
    Cancel,
    DataPathError,
    Fence,
    Finished,
    LayerRange,
    Order,
    Prepare,
    Query,
    Rejoin,
    Replay,
    ReplayDone,
    SelfTested,
    SequencePosition,
    Step,
    StepFailure,
    Unassign,
)
from tests.unit.broker.bench import MIB, Bench, orders, ranges, row, said, submit

TIGHT = 69 * MIB  # for half of the model
BOOM = "RuntimeError: device-side assert triggered"


def fail(bench: Bench, name: str, step: Step | None = None) -> None:
    """The oldest step (or this one) raises at this worker."""
    step = bench.pipe[0] if step is None else step
    rows = tuple(SequencePosition(r.sequence, r.start + r.count) for r in step.rows)
    failed = StepFailure(ranges(bench)[name], rows, is_memory=False)
    bench.tell(
        name, DataPathError(epoch=bench.epoch, incarnation=bench.workers[name].incarnation, reason=BOOM, failed=failed)
    )


def of_test(bench: Bench, name: str, problem: str = "") -> SelfTested:
    worker = bench.workers[name]
    return SelfTested(epoch=0, incarnation=worker.incarnation, lineage=worker.lineage, problem=problem)


@dataclass(slots=True)
class Play:
    """A swarm of which some workers, or some requests, make steps raise; workers obey when they are called.

    ``broken``: workers at which every step raises; ``poison``: requests that make the holder of layer 2 raise.
    ``problems``: what the tests of these workers' devices find.
    """

    bench: Bench
    broken: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    failed_at: list[str] = field(default_factory=list)
    ends: dict[str, Finished] = field(default_factory=dict)
    num_tests: int = 0

    def run(self, until: Callable[[], bool], limit: int = 3000) -> None:
        """Play until this holds."""
        for _ in range(limit):
            if until():
                return
            self.turn()
        raise AssertionError(f"it never comes to that: {self.failed_at}, {self.bench.state.plans}")

    def turn(self) -> None:
        """One step goes through or raises, or time passes; who is called tests its device and says Hello."""
        bench = self.bench
        if bench.state.plans.current is None:
            bench.pipe.clear()
        if bench.state.plans.current is None:
            bench.pipe.clear()
        replays = orders(bench.log, Replay)
        if replays or (bench.pipe and bench.pipe[0].replay):
            self._replay(replays)
        elif not bench.pipe:
            bench.tick(0.1)
        elif (name := self._raises_at(bench.pipe[0])) is not None:
            self.failed_at.append(name)
            fail(bench, name)
            bench.tick(0.1)
        else:
            bench.finish()
        self.obey()

    def _replay(self, replays: list[tuple[str, Order]]) -> None:
        """Chunks go through all layers that they are for."""
        bench, last = self.bench, list(ranges(self.bench))[-1]
        found = []
        for _, order in replays:
            assert isinstance(order, Replay)
            found.append((order.sequence, order.through, order.stop))
            found += [(part.sequence, order.through, part.stop) for part in order.more]
        for step in [step for step in bench.pipe if step.replay]:
            bench.pipe.remove(step)
            assert step.through is not None
            found += [(each.sequence, step.through, each.start + each.count) for each in step.rows]
        for sequence, layers, stop in found:
            incarnation = bench.workers[last].incarnation
            bench.tell(
                last,
                ReplayDone(epoch=bench.epoch, incarnation=incarnation, sequence=sequence, layers=layers, kv=stop),
            )

    def obey(self) -> None:
        bench = self.bench
        self.ends |= {end.request_id: end for end in said(bench.log, Finished) if isinstance(end, Finished)}
        called = {peer.partition(".")[0] for peer, _ in orders(bench.log, Rejoin)}
        bench.take()
        for name in sorted(called):
            problem = self.problems.get(name, "")
            self.num_tests += 1
            bench.tell(name, of_test(bench, name, problem))
            if not problem:
                bench.tell(name, bench.workers[name].hello())

    def _raises_at(self, step: Step) -> str | None:
        held = ranges(self.bench)
        for name, layers in sorted(held.items(), key=lambda item: item[1].first):
            if name in self.broken:
                return name
            sequences = {self.bench.sequence(r).id for r in self.poison if r in self.bench.state.requests}
            if layers.first <= 2 < layers.stop and sequences & {r.sequence for r in step.rows}:
                return name
        return None

    def reason(self, request_id: str) -> str | None:
        """How it ended, as its client was told."""
        return self.ends[request_id].reason if request_id in self.ends else None

    def worker(self, name: str) -> WorkerState:
        return self.bench.state.workers[f"{name}.1"].state


@pytest.fixture
def play(make_bench: Callable[..., Bench]) -> Callable[..., Play]:
    def make(num_workers: int = 3, **fields: object) -> Play:
        return Play(make_bench().serve(num_workers, **fields))

    return make


def in_word(bench: Bench, kind: str) -> list[dict[str, object]]:
    """The notes of this kind."""
    return [action.fields for action in bench.log if isinstance(action, WriteLog) and action.event == kind]


# --- a broken worker --------------------------------------------------------------------------------------------------


def test_a_worker_whose_steps_fail_goes_and_no_request_with_it(play: Callable[..., Play]) -> None:
    """It is out after two failures, with a verdict of its own and the evidence; the requests end well with the
    others, and none of them is suspected."""
    swarm = play()
    for number in range(4):
        swarm.bench.say(submit(f"r{number}"))
    name = list(ranges(swarm.bench))[1]
    swarm.broken, swarm.problems = {name}, {name: BOOM}
    swarm.run(lambda: all(swarm.reason(f"r{number}") == "length" for number in range(4)))
    assert swarm.failed_at == [name] * FAILED_AFTER
    judgement = swarm.bench.judgements_of(name)
    assert judgement.verdict is Verdict.FAILED
    assert BOOM in judgement.evidence
    assert name not in ranges(swarm.bench)
    assert all(swarm.bench.sequence(f"r{number}").num_deaths == 0 for number in range(4))
    assert swarm.bench.state.counters["steps_failed"] == FAILED_AFTER


def test_one_failure_costs_nobody_anything(serving: Bench) -> None:
    """Whatever it was, it is over: the same workers go on, in a new epoch."""
    serving.say(submit())
    fail(serving, "w0")
    assert serving.epoch == 2
    assert set(ranges(serving)) == {"w0", "w1"}
    serving.run_dry()
    assert serving.sequence().reason == "length"
    assert serving.state.evidence.suspects == frozenset()


def test_a_suspect_s_step_is_alone_in_flight(serving: Bench) -> None:
    """Its failure would discard the steps of others, which show that the workers are sound: with two steps in flight,
    the others' one could always be the second (simulated seed 20831)."""
    serving.say(submit("a", max_tokens=4))
    fail(serving, "w0")
    serving.say(submit("b", max_tokens=20))
    fail(serving, "w1")
    suspect, num_alone = serving.sequence("a").id, 0
    assert serving.state.evidence.suspects == {suspect}
    while serving.state.evidence.suspects:
        steps = [{each.sequence for each in step.rows} for step in serving.pipe]
        if {suspect} in steps:
            assert steps == [{suspect}]
            num_alone += 1
        serving.finish()
    assert num_alone
    serving.run_dry()
    assert serving.sequence("a").reason == serving.sequence("b").reason == "length"


def test_a_worker_that_fails_whatever_it_computes_goes_though_it_is_needed(play: Callable[..., Play]) -> None:
    """Nobody else can take its layers: requests wait, what is waited for names the worker, and it is called, the first
    time at once. Each failed test makes the next one come later."""
    swarm = play(2, memory_bytes=TIGHT)
    swarm.bench.say(submit("a", max_tokens=40))
    swarm.bench.say(submit("b", max_tokens=40))
    swarm.run(lambda: swarm.bench.sequence("a").num_generated > 3)
    swarm.broken, swarm.problems = {"w0"}, {"w0": BOOM}
    swarm.run(lambda: swarm.worker("w0") is WorkerState.OUT)
    assert swarm.reason("a") is None is swarm.reason("b")
    swarm.bench.ask(Query(what="status"))
    waits_for = swarm.bench.state.plans.waits_for
    assert "w0 is out until a test of its device passes" in waits_for
    assert BOOM in waits_for
    swarm.run(lambda: swarm.num_tests == 1)
    assert "so did a test of its device" in swarm.bench.state.plans.waits_for
    for number, pause_s in enumerate((PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S), start=1):
        since = swarm.bench.now
        swarm.run(lambda number=number: swarm.num_tests == number + 1)  # type: ignore[misc]
        assert swarm.bench.now - since == pytest.approx(pause_s, abs=0.5)
    swarm.broken, swarm.problems = set(), {}
    swarm.run(lambda: swarm.reason("a") == "length" == swarm.reason("b"))
    assert swarm.bench.judgements_of("w0").verdict is Verdict.WELL


def test_a_worker_that_fails_only_in_steps_ends_no_more_than_one_request(play: Callable[..., Play]) -> None:
    """It passes every test, and nobody can stand in for it. The first request may be taken for the culprit; no other
    one is, and it is not called again and again."""
    swarm = play(1)
    swarm.broken = {"w0"}
    for number in range(3):
        swarm.bench.say(submit(f"r{number}"))
        for _ in range(600):
            swarm.turn()
    assert sum(swarm.reason(f"r{number}") is not None for number in range(3)) <= 1
    assert len(swarm.failed_at) < 40
    swarm.broken = set()
    swarm.run(lambda: all(swarm.reason(f"r{number}") is not None for number in range(3)), limit=10_000)
    assert [swarm.reason(f"r{number}") for number in (1, 2)] == ["length", "length"]


def test_a_worker_that_fails_now_and_then_goes(play: Callable[..., Play]) -> None:
    """Its failures are far from each other, and the requests in them go on well."""
    swarm = play(2)
    for number in range(OFTEN):
        assert swarm.worker("w1") is WorkerState.MEMBER
        swarm.bench.say(submit(f"r{number}"))
        while not swarm.bench.pipe[0].rows:
            swarm.bench.finish()
        fail(swarm.bench, "w1")
        swarm.run(lambda number=number: swarm.reason(f"r{number}") == "length")  # type: ignore[misc]
    assert swarm.worker("w1") is WorkerState.OUT
    assert "of its steps failed within 10 minutes, with different requests" in swarm.bench.judgements_of("w1").evidence


def test_it_comes_back_after_a_test_and_nothing_that_it_holds_is_used(serving: Bench) -> None:
    """It is told why it is out, fenced, tests its device, and its Hello is answered with an order to forget all."""
    serving.say(submit(max_tokens=50))
    for _ in range(FAILED_AFTER):
        fail(serving, "w0")
    serving.take()
    serving.tick(0.2)
    told = [order for peer, order in orders(serving.take()) if peer == "w0.1"]
    assert [type(order) for order in told[:2]] == [Fence, Rejoin]
    assert BOOM in told[1].reason  # type: ignore[union-attr]
    serving.tell("w0", of_test(serving, "w0"))
    assert serving.state.workers["w0.1"].is_gone, "only a Hello makes it a member"
    serving.tell("w0", serving.workers["w0"].hello())
    mine = [type(a.message) for a in serving.take() if isinstance(a, SendToWorker) and a.peer == b"w0.1"]
    assert Unassign in mine
    assert Prepare not in mine[: mine.index(Unassign)]
    serving.tick(0.3)
    assert "w0" in ranges(serving)


def test_a_new_process_of_its_name_is_not_believed_to_be_better(serving: Bench) -> None:
    """Whoever starts it anew may start it on the same broken device: the pauses go on."""
    for process in (1, 2, 3):
        serving.say(submit(f"r{process}", max_tokens=300))
        while "w0" in ranges(serving):
            fail(serving, "w0")
        worker = serving.state.workers[f"w0.{process}"]
        assert worker.num_faults == process
        assert worker.call_after - serving.now == pytest.approx((0.0, PAUSE_S, 2 * PAUSE_S)[process - 1])
        serving.join("w0", incarnation=f"w0.{process + 1}")
        serving.tick(0.3)
        assert "w0" in ranges(serving)


def test_the_pause_has_an_end_and_is_forgotten(serving: Bench) -> None:
    for _ in range(20):
        serving.core._members.failure_judge.record_test(serving.state.workers["w0.1"], BOOM)
    worker = serving.state.workers["w0.1"]
    assert worker.call_after - serving.now == MAX_PAUSE_S
    serving.state.now = worker.call_after + KEEP_S + 1.0
    serving.core._members.failure_judge.record_test(worker, BOOM)
    assert worker.num_faults == 1


# --- a request that makes steps fail ----------------------------------------------------------------------------------


def test_a_poisonous_request_ends_and_no_other_one(play: Callable[..., Play]) -> None:
    """Whoever holds the layer that it makes fail: it ends after it has failed on different workers, with where and how
    often; the others end well, and all workers are members again."""
    swarm = play()
    for name in ("a", "poison", "b"):
        swarm.bench.say(submit(name, max_tokens=30))
    swarm.poison = {"poison"}
    swarm.run(lambda: swarm.reason("poison") is not None)
    detail = swarm.ends["poison"].detail
    assert swarm.reason("poison") == "failed"
    assert detail.startswith(f"quarantined: its steps failed {len(swarm.failed_at)} times (on ")
    assert len(set(swarm.failed_at)) == 2
    assert all(name in detail for name in swarm.failed_at)
    assert len(swarm.failed_at) <= GUILTY_AFTER + 2
    swarm.run(lambda: swarm.reason("a") == "length" == swarm.reason("b"))
    swarm.run(lambda: all(swarm.worker(name) is WorkerState.MEMBER for name in ("w0", "w1", "w2")))
    assert all(worker.num_faults == 0 for worker in swarm.bench.state.workers.values())
    assert swarm.bench.state.evidence.steps == []


def test_a_poisonous_request_alone_ends(play: Callable[..., Play]) -> None:
    """Nobody else computes anything: what vouches for the workers is the test of the one that had to go."""
    swarm = play()
    swarm.bench.say(submit("poison"))
    swarm.poison = {"poison"}
    swarm.run(lambda: swarm.reason("poison") == "failed")
    assert len(set(swarm.failed_at)) >= 2
    assert len(swarm.failed_at) <= 2 * GUILTY_AFTER
    swarm.run(lambda: all(swarm.worker(name) is WorkerState.MEMBER for name in ("w0", "w1", "w2")))


def test_with_one_worker_others_requests_tell(play: Callable[..., Play]) -> None:
    """It computes another request's steps well between the failures: it stays, and the request ends."""
    swarm = play(1)
    swarm.bench.say(submit("good", max_tokens=200))
    swarm.bench.say(submit("poison"))
    swarm.poison = {"poison"}
    swarm.run(lambda: swarm.reason("poison") == "failed")
    assert swarm.failed_at == ["w0"] * GUILTY_AFTER
    assert swarm.worker("w0") is WorkerState.MEMBER
    swarm.run(lambda: swarm.reason("good") == "length")


def test_with_one_worker_and_one_request_its_test_tells(play: Callable[..., Play]) -> None:
    """After three failures the worker goes, passes its test, and fails with that request once more: then it ends. The
    next one is served."""
    swarm = play(1)
    swarm.bench.say(submit("poison"))
    swarm.poison = {"poison"}
    swarm.run(lambda: swarm.reason("poison") == "failed")
    assert swarm.failed_at == ["w0"] * (GUILTY_AFTER + 1)
    assert swarm.num_tests == 1
    swarm.bench.say(submit("good"))
    swarm.run(lambda: swarm.reason("good") == "length")


def test_two_processes_of_one_name_don_t_hide_each_other_s_tests(play: Callable[..., Play]) -> None:
    """Each takes over the name while the other one's device is tested. The result arrives from a process that is no
    member any more, and counts for the worker of that name: so the request is convicted in the end."""
    swarm = play(1)
    bench = swarm.bench
    bench.say(submit("poison"))
    for process in range(2, 6):
        while (out := bench.state.workers[f"w0.{process - 1}"]).state is WorkerState.MEMBER and bench.pipe:
            fail(bench, "w0")
        swarm.obey()
        if swarm.reason("poison") is not None:
            break
        test = of_test(bench, "w0")
        bench.join("w0", incarnation=f"w0.{process}")
        assert out.incarnation not in bench.state.workers
        bench.feed(WorkerMessageReceived(out.peer, test))
        bench.tick(0.3)
    assert swarm.reason("poison") == "failed"
    assert not bench.state.counters.get("stale_control")
    bench.say(submit("good"))
    swarm.run(lambda: swarm.reason("good") == "length")


def test_a_late_test_counts_once_and_only_if_steps_had_failed(serving: Bench) -> None:
    """A process that was replaced for another reason has nothing to test."""
    test = of_test(serving, "w0")
    serving.lose("w0")
    serving.join("w0", incarnation="w0.2")
    serving.feed(WorkerMessageReceived(b"w0.1", test))
    assert serving.state.counters["stale_control"] == 1
    serving.state.evidence.record_replaced("w0.1", "w0")
    for count in (1, 2):
        serving.feed(WorkerMessageReceived(b"w0.1", test))
        assert serving.state.counters["stale_control"] == count


def test_what_failed_is_computed_alone_in_turns_with_the_others(play: Callable[..., Play]) -> None:
    """A step's sequences after it has raised: one at a time, and between them a step of all others, until each has
    come as far as before."""
    swarm = play(1)
    bench = swarm.bench
    for name in ("a", "b"):
        bench.say(submit(name, max_tokens=50))
    swarm.run(lambda: bench.sequence("b").num_generated > 2)
    a, b = bench.sequence("a").id, bench.sequence("b").id
    assert {r[0] for r in row(bench.pipe[0])} == {a, b}
    fail(bench, "w0")
    bench.say(submit("c", max_tokens=50))
    c = bench.sequence("c").id
    seen = []
    for _ in range(6):
        seen.append({r[0] for r in row(bench.pipe[0])})
        bench.finish()
    # a is under way as c comes; then c, b alone, and all together.
    assert seen[:3] == [{a}, {a, c}, {b}]
    assert seen[3] == {a, b, c}


def test_a_suspect_that_is_cancelled_is_forgotten(play: Callable[..., Play]) -> None:
    """Its failures are the worker's then, and nobody waits for it."""
    swarm = play(2)
    swarm.bench.say(submit("a", max_tokens=100))
    fail(swarm.bench, "w0")
    swarm.bench.say(Cancel(request_id="a"))
    swarm.bench.say(submit("b"))
    swarm.run(lambda: swarm.reason("b") == "length")
    assert len(swarm.bench.state.evidence.failures_of_worker("w0")) == 1


# --- the table --------------------------------------------------------------------------------------------------------


def failed(worker: str, *sequences: int, at: float = 0.0) -> FailedStep:
    owners = {sequence: f"r{sequence}" for sequence in sequences}
    return FailedStep(worker, LayerRange(0, 3), dict.fromkeys(sequences, 10), owners, at)


ALL = LayerRange(0, 6)


def test_what_comes_through_is_no_suspect_any_more() -> None:
    """Once it has come as far as the row that failed, through the layers that failed."""
    evidence = Evidence()
    evidence.add(failed("w0", 1, 2))
    assert evidence.suspects == {1, 2}
    evidence.record_success(["w0"], ALL, {1: 9, 2: 10}, ["r1", "r2"], 1.0)
    assert evidence.suspects == {1}
    evidence.record_success(["w1"], LayerRange(3, 6), {1: 10}, ["r1"], 1.0)
    assert evidence.suspects == {1}
    evidence.record_success(["w0"], LayerRange(2, 4), {1: 10}, ["r1"], 1.0)
    assert evidence.suspects == frozenset()


def test_a_worker_is_vouched_for_against_who_was_not_there() -> None:
    evidence = Evidence()
    evidence.add(failed("w0", 1, 2))
    evidence.add(failed("w1", 1))
    evidence.record_success(["w0"], ALL, {2: 9, 3: 5}, ["r2", "r3"], 1.0)
    first, second = evidence.steps
    assert (first.worker_ok_without, first.is_last) == ({"r1"}, False)
    assert (second.worker_ok_without, second.is_last) == (set(), True)


def test_a_test_is_noted_and_a_step_ends_what_was_in_a_row() -> None:
    evidence = Evidence()
    evidence.add(failed("w0", 1))
    evidence.add(failed("w1", 1))
    evidence.record_passed_test("w0")
    assert [(step.worker, step.is_tested) for step in evidence.steps] == [("w0", True), ("w1", False)]
    assert (evidence.consecutive_failures("w0"), len(evidence.consecutive_failures("w1"))) == ([], 1)
    evidence.convict("r1")
    assert (evidence.steps, evidence.unproven) == ([], {"w0": "r1", "w1": "r1"})
    evidence.record_success(["w0"], ALL, {2: 3}, ["r2"], 1.0)
    assert evidence.unproven == {"w1": "r1"}


@pytest.fixture
def many() -> Evidence:
    evidence = Evidence()
    for number in range(MAX_FAILURES + 5):
        evidence.add(failed("w0", number, at=float(number)))
    return evidence


def test_what_is_kept_is_bounded(many: Evidence) -> None:
    assert len(many.steps) == MAX_FAILURES
    assert len(many.suspects) == MAX_FAILURES
    many.record_success(["w1"], ALL, {}, [], KEEP_S + 10.0)
    assert min(failure.failed_at for failure in many.steps) > 10.0

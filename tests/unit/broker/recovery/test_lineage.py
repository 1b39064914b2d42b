"""Whose numbers: what workers hold counts for the journal and the tokens that it was computed for, and no others."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import Dispatch, SendToWorker
from swarm.broker.events import StepFinished
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.broker.state.plans import PlanPhase
from swarm.wire.messages import Activate, LayerRange, Leaving, Lineage, Release, SequencePosition, Welcome
from tests.unit.broker.bench import Bench, done_of, holds, orders, row, settings, submit

MakeBench = Callable[..., Bench]

OURS = Lineage("ours", 7)
BEFORE = Lineage("ours", 3)
OTHER = Lineage("another's", 3)
KNOWN = (1, 2, 3, *[7] * 17)
FOREIGN = (9,) * 20  # tokens of whatever had the number elsewhere
WHOLE = LayerRange(0, 6)
OWN = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}


@pytest.fixture
def restarted(make_bench: MakeBench) -> Bench:
    """Sequence 5 has three tokens of its prompt and four drawn ones; the workers of the last plan have not come yet."""
    request = RequestRecord(submit("r", max_tokens=16, ignore_eos=True), "", 2.0, [SequenceRecord(5, 0, [7, 7, 7, 7])])
    return make_bench(settings(lineage=OURS), JournalSnapshot(9, ("w0", "w1"), 6, (request,)))


def come_back(bench: Bench, name: str, lineage: Lineage, position: int, tokens: tuple[int, ...] = KNOWN) -> None:
    """A worker says that it holds so many positions of sequence 5, computed from these tokens."""
    worker = bench.workers.get(name) or bench.add(name)
    held = holds(5, position, OWN[name], tokens)
    bench.tell(name, worker.hello(epoch=9, lineage=lineage, held_layers=OWN[name], held=(held,)))


def lives(bench: Bench) -> dict[str, tuple[SequencePosition, ...]]:
    """What each worker is told to keep, at the last plan."""
    return {peer: order.live for peer, order in orders(bench.log, Activate) if isinstance(order, Activate)}


def test_what_is_held_for_another_journal_is_nothing(restarted: Bench) -> None:
    """The number is the same, and even the tokens are: nobody knows what else differs."""
    for name in OWN:
        come_back(restarted, name, OTHER, 6)
    restarted.tick()
    assert row(restarted.pipe[0]) == [(5, 0, 7)]


def test_what_was_computed_from_other_tokens_is_nothing(restarted: Bench) -> None:
    """A backup took the journal's place, and the number was given out a second time."""
    for name in OWN:
        come_back(restarted, name, BEFORE, 6, FOREIGN)
    restarted.tick()
    assert lives(restarted) == {"w0.1": (), "w1.1": ()}
    assert row(restarted.pipe[0]) == [(5, 0, 7)]
    restarted.run_dry()
    assert restarted.sequence().num_generated == 16


def test_what_was_computed_from_these_tokens_goes_on(restarted: Bench) -> None:
    """By the same journal, in an earlier life of the broker."""
    for name in OWN:
        come_back(restarted, name, BEFORE, 6)
    restarted.tick()
    assert lives(restarted) == dict.fromkeys(("w0.1", "w1.1"), (SequencePosition(5, 6),))
    assert row(restarted.pipe[0]) == [(5, 6, 1)]


def test_each_worker_is_believed_by_what_it_holds(restarted: Bench) -> None:
    """One has the right tokens; the other, foreign ones, and so it is told to keep nothing, and is brought level."""
    restarted.add("w1", held={5: 0})
    come_back(restarted, "w0", BEFORE, 6)
    come_back(restarted, "w1", BEFORE, 6, FOREIGN)
    restarted.tick()
    assert lives(restarted) == {"w0.1": (SequencePosition(5, 6),), "w1.1": ()}


def test_what_was_held_for_a_request_of_another_length_is_nothing(restarted: Bench) -> None:
    """A backup took the journal's place, the number was given out a second time, and both requests begin alike: the
    workers have reserved room for the other one."""
    for name, layers in OWN.items():
        hello = restarted.add(name).hello(
            epoch=9, lineage=BEFORE, held_layers=layers, held=(holds(5, 6, layers, KNOWN, limit=18),)
        )
        restarted.tell(name, hello)
    restarted.tick()
    assert lives(restarted) == {"w0.1": (), "w1.1": ()}
    assert row(restarted.pipe[0]) == [(5, 0, 7)]


def test_a_beginning_that_is_known_counts(restarted: Bench) -> None:
    """The worker has gone on for longer than the journal tells: what can be compared counts."""
    for name in OWN:
        come_back(restarted, name, BEFORE, 12)
    restarted.tick()
    assert row(restarted.pipe[0]) == [(5, 5, 2)]  # told of 12, 11, 9 and 5 tokens; seven are known


def test_digests_that_are_missing_prove_nothing(restarted: Bench) -> None:
    for name, layers in OWN.items():
        held = msgspec.structs.replace(holds(5, 6, layers), digests=())
        hello = restarted.add(name).hello(epoch=9, lineage=BEFORE, held_layers=layers, held=(held,))
        restarted.tell(name, hello)
    restarted.tick()
    assert row(restarted.pipe[0]) == [(5, 0, 7)]


def test_a_worker_with_foreign_sequences_that_comes_while_no_plan_is_in_force(make_bench: MakeBench) -> None:
    """It takes the place of one that died. Of sequences that run it may hold others' under the same numbers."""
    bench = make_bench(settings(lineage=OURS)).serve(2)
    bench.say(submit(max_tokens=16, ignore_eos=True))
    bench.finish()
    bench.finish()
    number, kv = bench.sequence().id, bench.sequence().kv
    bench.mute = {"w2"}
    bench.lose("w1")
    worker = bench.add("w2", held={number: 0})
    held = holds(number, kv, OWN["w1"], FOREIGN)
    bench.tell("w2", worker.hello(lineage=BEFORE, held_layers=OWN["w1"], held=(held,)))
    bench.mute = set()
    bench.tick(2.0)
    assert bench.state.plans.phase is PlanPhase.SERVING
    assert lives(bench)["w2.1"] == ()
    assert lives(bench)["w0.1"] == (SequencePosition(number, kv),)


def test_who_took_part_in_a_plan_is_believed(restarted: Bench) -> None:
    """From then on it holds what it was told to, however long sequences grow."""
    for name in OWN:
        come_back(restarted, name, BEFORE, 6)
    restarted.tick()
    restarted.finish()
    restarted.finish()
    restarted.take()
    restarted.join("w2")
    restarted.tick()
    assert restarted.epoch == 11
    assert set(lives(restarted).values()) == {(SequencePosition(5, 8),)}


def test_no_hello_moves_a_number(make_bench: MakeBench) -> None:
    """Neither an epoch nor a sequence that a worker says that it knows."""
    bench = make_bench(settings(lineage=OURS))
    worker = bench.add("w0")
    held = holds(2**63 - 1, 6, WHOLE)
    bench.tell("w0", worker.hello(epoch=2**63 - 1, lineage=BEFORE, held_layers=WHOLE, held=(held,)))
    bench.tick()
    assert bench.epoch == 1
    bench.say(submit())
    assert bench.sequence().id == 1


def test_orders_and_steps_say_whose_they_are(make_bench: MakeBench) -> None:
    bench = make_bench(settings(lineage=OURS))
    bench.join("w0")
    bench.tick()
    bench.say(submit())
    assert orders(bench.log, Welcome)
    assert bench.pipe
    for action in bench.log:
        if isinstance(action, SendToWorker):
            assert action.message.lineage == OURS
        if isinstance(action, Dispatch):
            assert action.step.lineage == OURS


def test_an_answer_to_another_broker_does_not_count(make_bench: MakeBench) -> None:
    """A worker has not heard yet that the broker is another one; the epoch's number is the same by chance."""
    bench = make_bench(settings(lineage=OURS))
    bench.mute = {"w0"}
    bench.join("w0")
    bench.tick()
    assert bench.state.plans.phase is PlanPhase.PREPARING
    prepared = bench.workers["w0"].prepared(bench.state.plans.epoch)
    bench.tell("w0", msgspec.structs.replace(prepared, lineage=OTHER))
    assert bench.state.plans.phase is PlanPhase.PREPARING
    assert bench.state.counters["stale_control"] == 1
    bench.tell("w0", msgspec.structs.replace(prepared, lineage=OURS))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING


def test_it_may_leave_all_the_same(make_bench: MakeBench) -> None:
    """That concerns no epoch."""
    bench = make_bench(settings(lineage=OURS))
    bench.join("w0")
    bench.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM", lineage=OTHER))
    assert orders(bench.log, Release)


def test_a_step_of_another_broker_does_not_count(make_bench: MakeBench) -> None:
    """It waited in a worker for a broker that is no more; epoch and step have the same numbers by chance."""
    bench = make_bench(settings(lineage=OURS)).serve(1)
    bench.say(submit())
    (step,) = bench.pipe
    done = done_of(step, 7, {}, set(), ())
    bench.feed(StepFinished(msgspec.structs.replace(done, lineage=OTHER)))
    assert bench.sequence().num_generated == 0
    assert bench.state.counters["stale_steps"] == 1
    bench.feed(StepFinished(done))
    assert bench.sequence().num_generated == 1

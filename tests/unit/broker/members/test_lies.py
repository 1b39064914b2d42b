"""Who is to be believed: damaged messages blame nobody, hidden states that are not finite cost their sender its place,
and a request that brings them forth everywhere ends."""

from __future__ import annotations

from swarm.broker.actions import SendToWorker
from swarm.broker.events import MessageRefused
from swarm.broker.members.integrity import MAX_IMMEDIATE_EPOCHS, PAUSE_S, QUARANTINE_AFTER
from swarm.broker.state import WorkerState
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import (
    Activate,
    DataPathError,
    Fence,
    Finished,
    LayerRange,
    NotFinite,
    Prepare,
    Rejoin,
    SequencePosition,
    Unassign,
)
from tests.unit.broker.bench import MIB, Bench, orders, ranges, said, submit

TIGHT = 69 * MIB  # for half of the model


def accuse(bench: Bench, reporter: str, sender: str, *sequences: str) -> None:
    """``reporter`` got hidden states of these requests from ``sender`` that are not finite."""
    rows = tuple(SequencePosition(bench.sequence(request_id).id, 2) for request_id in sequences)
    found = NotFinite(sender, ranges(bench)[sender], rows)
    trouble = DataPathError(
        epoch=bench.epoch, incarnation=bench.workers[reporter].incarnation, reason="not finite", not_finite=found
    )
    bench.tell(reporter, trouble)


def order_of(bench: Bench) -> list[str]:
    """The workers' names in the order of the pipeline."""
    assert bench.state.plans.current is not None
    return [stage.name for stage in bench.state.plans.current.stages]


def rejoin(bench: Bench, name: str) -> None:
    """It beats, is called, and says Hello as the process it was."""
    bench.beat(name)
    bench.tell(name, bench.workers[name].hello())
    bench.tick(0.3)


def test_who_sends_what_is_not_finite_is_out(serving: Bench) -> None:
    """The sender is declared out at once with the evidence, fenced and told to join anew; the one who found it and the
    requests are not to blame, and what runs goes on without the sender."""
    serving.say(submit())
    first, second = order_of(serving)
    serving.take()
    accuse(serving, second, first, "r")
    suspect = serving.state.workers[f"{first}.1"]
    assert suspect.state is WorkerState.OUT
    judgement = serving.judgements_of(first)
    assert judgement.verdict is Verdict.CORRUPT
    assert judgement.evidence == (
        f"it sent {second} hidden states that are not finite, out of layers 0–2: sequence 1 from position 2 on"
    )
    assert ranges(serving) == {second: LayerRange(0, 6)}
    assert serving.sequence().num_deaths == 0
    serving.run_dry()
    assert serving.sequence().reason == "length"


def calls(bench: Bench, name: str, within_s: float) -> bool:
    """Whether it is fenced and told to join anew while it beats for so long."""
    bench.take()
    bench.tick(within_s)
    kinds = [type(order) for peer, order in orders(bench.take()) if peer == f"{name}.1"]
    return [kind for kind in kinds if kind in (Fence, Rejoin)][:2] == [Fence, Rejoin]


def test_a_liar_is_called_back_after_a_pause(serving: Bench) -> None:
    """While others do its work; the next time the pause is twice as long. It goes on to serve."""
    for pause_s in (PAUSE_S, 2 * PAUSE_S):
        serving.say(submit(f"r{pause_s}", max_tokens=500))
        liar, second = order_of(serving)
        serving.state.workers[f"{liar}.1"].num_corrupt_results = int(pause_s // PAUSE_S) - 1
        accuse(serving, second, liar, f"r{pause_s}")
        assert not calls(serving, liar, pause_s - 0.5)
        assert calls(serving, liar, 1.0)
        rejoin(serving, liar)
        assert set(order_of(serving)) == {liar, second}


def test_a_liar_that_nobody_can_stand_in_for_is_called_at_once(make_bench) -> None:
    """Better one that may lie again than nothing at all."""
    bench = make_bench().serve(2, memory_bytes=TIGHT)
    bench.say(submit())
    first, second = order_of(bench)
    accuse(bench, second, first, "r")
    assert bench.state.plans.current is None
    assert calls(bench, first, 0.2)
    rejoin(bench, first)
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_nothing_that_a_liar_holds_is_used_again(serving: Bench) -> None:
    """Even if there is no plan in force when it says Hello: it is dismissed before it is asked to prepare, so that it
    forgets every sequence and its log; and again at each later Hello, since an order may be lost."""
    serving.say(submit(max_tokens=50))
    first, second = order_of(serving)
    serving.mute = {second}  # it never gets ready to take over all layers: no plan is in force
    accuse(serving, second, first, "r")
    assert serving.state.plans.current is None
    for _ in range(2):
        serving.take()
        rejoin(serving, first)
        mine = [
            type(a.message)
            for a in serving.take()
            if isinstance(a, SendToWorker) and a.peer == b"%s.1" % first.encode()
        ]
        assert Unassign in mine
        assert mine.index(Unassign) < min(
            (mine.index(kind) for kind in (Prepare, Activate) if kind in mine), default=99
        )
    assert serving.judgements_of(first).verdict is Verdict.WELL
    assert serving.state.workers[f"{first}.1"].num_corrupt_results == 1


def test_nobody_can_accuse_but_the_stage_behind(serving: Bench) -> None:
    """A stage that accuses itself, its successor or a stranger is broken itself: a new epoch, and nobody is out."""
    first, second = order_of(serving)
    for reporter, sender in ((first, second), (second, second)):
        serving.say(submit(f"{reporter} {sender}"))
        before = serving.epoch
        accuse(serving, reporter, sender, f"{reporter} {sender}")
        assert serving.epoch == before + 1
    assert all(worker.state is WorkerState.MEMBER for worker in serving.state.workers.values())


def poisoned(bench: Bench) -> Finished:
    """The poison's end; the good one goes on, and was never accused."""
    (end,) = said(bench.take(), Finished)
    assert isinstance(end, Finished)
    assert (end.request_id, end.reason) == ("poison", "failed")
    assert bench.sequence("good").not_finite == []
    bench.run_dry()
    assert bench.sequence("good").reason == "length"
    return end


def test_a_request_that_is_not_finite_everywhere_ends(make_bench) -> None:
    """Other workers get the same: at the third time it is the model, the request fails with a reason that names the
    layers and the workers, and the last one accused stays. Others go on."""
    bench = make_bench().serve(3)
    bench.say(submit("poison", max_tokens=50))
    bench.say(submit("good", max_tokens=50))
    liars = []
    for _ in range(QUARANTINE_AFTER - 1):
        liars.append(order_of(bench)[0])
        accuse(bench, order_of(bench)[1], liars[-1], "poison")
        assert bench.sequence("poison").reason is None
    assert len(set(liars)) == 2
    for name in liars:
        rejoin(bench, name)
    before = set(order_of(bench))
    bench.take()
    first = order_of(bench)[0]
    accuse(bench, order_of(bench)[1], first, "poison")
    assert set(order_of(bench)) == before
    end = poisoned(bench)
    assert end.detail == (
        f"quarantined: its hidden states were not finite 3 times (on {', '.join((*liars, first))}), the last time at "
        "position 2 in layers 0–1; the model's weights or their dtype are unfit for this input"
    )


def test_where_nobody_else_can_compute_it_one_worker_is_enough(make_bench) -> None:
    """Two workers, both needed: the first is accused three times, and no plan is made for that request for ever."""
    bench = make_bench().serve(2, memory_bytes=TIGHT)
    bench.say(submit("poison", max_tokens=50))
    bench.say(submit("good", max_tokens=50))
    for time in range(QUARANTINE_AFTER):
        first, second = order_of(bench)
        bench.take()
        accuse(bench, second, first, "poison")
        if time < QUARANTINE_AFTER - 1:
            rejoin(bench, first)
    poisoned(bench)


def test_one_worker_alone_that_lies_is_the_worker(serving: Bench) -> None:
    """Somebody else could compute it well: however often this one lies, the request is not to blame, and ends well."""
    serving.say(submit(max_tokens=50))
    liar = order_of(serving)[0]
    for _ in range(QUARANTINE_AFTER + 2):
        if order_of(serving)[0] == liar:
            accuse(serving, order_of(serving)[1], liar, "r")
            assert serving.judgements_of(liar).verdict is Verdict.CORRUPT
            rejoin(serving, liar)
    assert len(serving.sequence().not_finite) > QUARANTINE_AFTER
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_a_liar_is_out_even_if_the_request_has_ended(serving: Bench) -> None:
    """The request was cancelled or had ended meanwhile; its rows prove as much."""
    serving.say(submit(max_tokens=1))
    serving.run_dry()
    first, second = order_of(serving)
    accuse(serving, second, first, "r")
    assert serving.judgements_of(first).verdict is Verdict.CORRUPT


def test_a_damaged_message_blames_nobody(serving: Bench) -> None:
    """A new epoch at once, with the same workers; no request counts it."""
    serving.say(submit())
    serving.tell("w1", DataPathError(epoch=1, incarnation="w1.1", reason="checksum", damaged=True))
    assert serving.epoch == 2
    assert set(ranges(serving)) == {"w0", "w1"}
    assert serving.sequence().num_deaths == 0
    assert serving.state.counters["damaged_messages"] == 1
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_an_answer_that_the_broker_can_not_read_is_a_lost_step(serving: Bench) -> None:
    """The last stage will not answer again: the step is computed anew, at once."""
    serving.say(submit())
    serving.feed(MessageRefused("data"))
    assert serving.epoch == 2
    assert serving.sequence().num_deaths == 0
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_garbage_while_nothing_is_under_way_changes_nothing(serving: Bench) -> None:
    """No step can have been in it."""
    serving.feed(MessageRefused("data"))
    serving.tell("w1", DataPathError(epoch=1, incarnation="w1.1", reason="checksum", damaged=True))
    serving.say(submit())
    serving.feed(MessageRefused("control"))  # that door carries no steps
    assert serving.epoch == 1


def test_damage_without_end_is_not_answered_at_that_pace(serving: Bench) -> None:
    """If nothing comes through at all, new epochs are made no faster than for steps that are lost without a word; one
    step that comes through, and damage is an accident again."""
    serving.say(submit())
    for _ in range(MAX_IMMEDIATE_EPOCHS + 4):
        serving.feed(MessageRefused("data"))
    assert serving.epoch == 1 + MAX_IMMEDIATE_EPOCHS
    serving.finish()
    serving.feed(MessageRefused("data"))
    assert serving.epoch == 2 + MAX_IMMEDIATE_EPOCHS

"""Positions that sequences share count once in the broker's blocks, as long as every stage can share them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from swarm.broker.events import StepFinished
from swarm.broker.members.differences import MAX_DIFFERENCES
from swarm.broker.recovery.rebuild import RebuildSettings
from swarm.broker.state import SequenceState
from swarm.broker.state.plans import PlanPhase, PlanState
from swarm.broker.state.recoveries import RecoveryHistory
from swarm.wire.messages import (
    BLOCK,
    Activate,
    Cancel,
    DataPathError,
    Replay,
    ReplayDone,
    SequencePosition,
    SequenceRange,
    SharedPrefix,
    Step,
    Stop,
    Submit,
)
from tests.unit.broker.bench import MIB, Bench, FakeWorker, done_of, orders, scheduling, submit

UNIT = 2 * BLOCK
PROMPT = 5 * UNIT + 5  # 10 blocks that can be shared, and one that can't
TIGHT = 67 * MIB  # for a third of the model
COPY = 12  # blocks of a sequence with its headroom


def _serve(make_bench, blocks: int, *, num_workers: int = 2, chunk: int = 256, **fields: object) -> Bench:
    settings = scheduling(mode="batch", kv_headroom=BLOCK, step_tokens=4096, prefill_chunk=4096)
    plan = replace(settings.plan, rebuild=RebuildSettings(chunk=chunk))
    bench = make_bench(replace(settings, plan=plan))
    return bench.serve(num_workers, kv_capacity=blocks * BLOCK, **({"share_unit": UNIT} | fields))


def _running(bench: Bench) -> int:
    return len(bench.state.running)


def _continuations(n: int, **fields: object) -> Submit:
    options: dict[str, object] = {"num_prompt": PROMPT, "max_tokens": BLOCK, "ignore_eos": True, "n": n}
    return submit(**(options | fields))  # type: ignore[arg-type]


def _many(bench: Bench, n: int, **fields: object) -> None:
    bench.say(_continuations(n, **fields))


def test_continuations_of_a_prompt_take_its_blocks_once(make_bench) -> None:
    """The others wait until the first one has computed the prompt, and start from it."""
    bench = _serve(make_bench, 10 + 8 * 2)
    _many(bench, 8)
    (step,) = bench.pipe
    assert (len(step.rows), _running(bench)) == (1, 1)
    bench.finish()
    assert _running(bench) == 8
    assert bench.state.reserved_blocks == 10 + 8 * 2
    assert bench.state.counters["prefix_hits"] == 7
    bench.run_dry()
    assert bench.state.counters.get("preemptions", 0) == 0
    assert all(s.reason == "length" for s in bench.state.sequences.values())


@pytest.mark.parametrize("fields", [{"share_unit": 0}, {"share_mappings": 3}])
def test_stages_that_cannot_share_count_each_sequence(make_bench, fields: dict[str, int]) -> None:
    """Because they can't at all, or not that many sequences."""
    bench = _serve(make_bench, 3 * COPY, **fields)
    _many(bench, 8)
    most = 0
    while any(s.state is not SequenceState.ENDED for s in bench.state.sequences.values()):
        bench.finish()
        most = max(most, _running(bench))
    assert most == 3
    assert bench.state.shared.saved == 0


def test_sequences_that_cannot_be_mapped_start_from_a_copy(make_bench) -> None:
    """As without sharing; they take all of their blocks, and the stages are ordered not to share."""
    bench = _serve(make_bench, 8 * COPY, share_mappings=11)
    _many(bench, 8)
    bench.finish()
    assert _running(bench) == 8
    assert bench.state.counters["prefix_hits"] == 7
    (step,) = bench.pipe
    shared = [s for s in bench.state.sequences if bench.state.shared.stop(s)]
    assert len(shared) > 1
    assert bench.state.shared.num_mappings <= 11
    assert sorted((*shared, *(step.unshared or ()))) == list(range(1, 9))
    assert bench.state.reserved_blocks == 10 + len(shared) * 2 + (8 - len(shared)) * COPY
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())


@pytest.mark.parametrize(
    ("units", "expected"),
    [((), 0), ((64,), 64), ((64, 96), 192), ((64, 0), 0), ((40,), 160), ((4096, 96), 0)],
)
def test_the_unit_of_a_plan_is_the_least_common_one_in_whole_blocks(units: tuple[int, ...], expected: int) -> None:
    """Unless a stage has none, or it is so large that it hardly ever applies."""
    plans = PlanState()
    plans.capacity = {
        name: FakeWorker(name, name, share_unit=unit, share_mappings=unit).prepared(1)
        for name, unit in zip("abc", units, strict=False)
    }
    assert (plans.share_unit, plans.share_mappings) == (expected, min(units, default=0))


def test_every_stage_is_told_the_unit(make_bench) -> None:
    bench = make_bench(scheduling())
    bench.join("w0", share_unit=UNIT)
    bench.tick()
    bench.tick()
    assert [order.share_unit for _, order in orders(bench.log, Activate)] == [UNIT]


@pytest.mark.parametrize("first", range(4))
def test_whoever_ends_first_leaves_the_prompt_to_the_others(make_bench, first: int) -> None:
    bench = _serve(make_bench, 3 * COPY)
    _many(bench, 4)
    bench.finish()
    other = submit("other", num_prompt=2 * BLOCK, max_tokens=4, ignore_eos=True)
    bench.sequence("r", first).expect_stop(1)
    before = bench.state.reserved_blocks
    assert before == 10 + 4 * 2
    bench.say(other)
    bench.say(Cancel(request_id="r"))
    bench.run_dry()
    assert bench.state.shared.saved == 0 or bench.state.prefix.retired
    assert bench.state.reserved_blocks == bench.state.prefix.exclusive_blocks(bench.state.shared)


def test_evicting_a_prefix_that_others_share_frees_only_its_rest(make_bench) -> None:
    """So a sequence that needs its blocks has the sharing sequence preempted, too."""
    bench = _serve(make_bench, COPY + 2)
    _many(bench, 1, max_tokens=3)
    bench.run_dry()
    assert list(bench.state.prefix.retired) == [1]
    bench.say(submit("fork", num_prompt=PROMPT, max_tokens=2 * BLOCK, ignore_eos=True, priority=-50))
    bench.finish()
    assert bench.state.reserved_blocks == COPY
    bench.say(submit("high", prompt=(9,) * 400, max_tokens=16, priority=50))
    bench.finish()
    assert [s.request.id for s in bench.state.running] == ["high"]
    assert not bench.state.prefix.retired
    assert bench.state.counters["preemptions"] == 1


def test_preempting_a_sequence_frees_what_no_other_shares(make_bench) -> None:
    """The youngest of three gives its own blocks only, so a second one goes, too."""
    bench = _serve(make_bench, 10 + 3 * 2)
    _many(bench, 3, priority=-50)
    bench.finish()
    bench.finish()
    assert bench.state.reserved_blocks == 10 + 3 * 2
    bench.say(submit("high", prompt=(9,) * 90, max_tokens=6, priority=50))
    bench.finish()
    assert [s.id for s in bench.state.running] == [1, 4]
    assert bench.state.counters["preemptions"] == 2


def test_a_prefix_that_is_too_short_is_no_way_in(make_bench) -> None:
    """A sequence waits if it would fit with a longer one only."""
    bench = _serve(make_bench, COPY + 4)
    _many(bench, 1)
    bench.finish()
    other = submit("other", prompt=(*submit(num_prompt=UNIT).prompt, *(9,) * (PROMPT - UNIT)), max_tokens=BLOCK)
    bench.say(other)
    bench.finish()
    assert [s.request.id for s in bench.state.running] == ["r"]


def test_an_evicted_prefix_leaves_its_blocks_to_those_that_share_them(make_bench) -> None:
    bench = _serve(make_bench, COPY + 4)
    _many(bench, 1, max_tokens=3)
    bench.run_dry()
    bench.say(submit("fork", num_prompt=PROMPT, max_tokens=2 * BLOCK, ignore_eos=True))
    bench.finish()
    assert list(bench.state.prefix.retired) == [1]
    bench.state.evict(0, bench.state.plans.max_sequences)
    assert not bench.state.prefix.retired
    assert (bench.state.reserved_blocks, bench.state.shared.saved) == (COPY, 0)
    bench.run_dry()


def test_none_starts_from_a_position_that_is_computed_again(make_bench) -> None:
    """The first draw is put off, so the next step cuts the prompt's last position; until a token is drawn, others can
    share no chunk that ends there."""
    bench = _serve(make_bench, 4 * COPY)
    bench.say(submit(num_prompt=UNIT, max_tokens=4, ignore_eos=True))
    bench.say(submit("early", num_prompt=2 * UNIT, max_tokens=4, ignore_eos=True))
    done = done_of(bench.pipe.popleft(), 0, {}, {1}, ())
    bench.feed(StepFinished(msgspec.structs.replace(done, late=(1,))))
    assert (bench.sequence("early").kv, bench.state.shared.saved) == (UNIT - BLOCK, 0)
    bench.say(submit("later", num_prompt=2 * UNIT, max_tokens=4, ignore_eos=True))
    bench.finish()
    assert bench.state.shared.saved == UNIT
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_no_more_start_from_a_prefix_than_fit(make_bench) -> None:
    bench = _serve(make_bench, 10 + 5 * 2)
    _many(bench, 8)
    bench.finish()
    assert _running(bench) == 5
    assert len(bench.state.waiting) == 3


def test_a_prefix_that_others_share_is_not_evicted_for_nothing(make_bench) -> None:
    """A sequence that fits in what is free leaves it."""
    bench = _serve(make_bench, COPY + 4)
    _many(bench, 1, max_tokens=3)
    bench.run_dry()
    bench.say(submit("fork", num_prompt=PROMPT, max_tokens=2 * BLOCK, ignore_eos=True))
    bench.finish()
    bench.say(submit("small", prompt=(9,) * 40, max_tokens=16))
    bench.finish()
    assert _running(bench) == 2
    assert list(bench.state.prefix.retired) == [1]


def _lose_last(bench: Bench) -> None:
    bench.lose(bench.state.plans.current.stages[-1].name)
    while not bench.state.plans.is_serving:
        bench.tick()


def test_after_a_loss_all_stay_that_share_a_prompt(make_bench) -> None:
    """It counts once, as before, and every stage counts alike."""
    bench = _serve(make_bench, 3 * COPY, num_workers=3)
    _many(bench, 8)
    for _ in range(5):
        bench.finish()
    assert _running(bench) == 8
    _lose_last(bench)
    assert [s.residency for s in bench.state.sequences.values()] == 8 * [0]
    assert _running(bench) == 8
    assert bench.state.reserved_blocks == 10 + 8
    links = tuple(SharedPrefix(sequence, 1, 10 * BLOCK) for sequence in range(2, 9))
    assert {order.shared for _, order in orders(bench.log, Activate) if order.epoch == bench.epoch} == {links}
    _lose_last(bench)
    assert {order.shared for _, order in orders(bench.log, Activate) if order.epoch == bench.epoch} == {links}
    assert bench.state.reserved_blocks == 10 + 8
    bench.run_dry()
    assert bench.state.shared.saved == 0 or bench.state.prefix.retired
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_after_a_loss_the_others_start_from_the_one_that_stays(make_bench) -> None:
    """If stages share by another unit from now on, what fits in full stays, the rest starts from it."""
    bench = _serve(make_bench, 3 * COPY, num_workers=3)
    _many(bench, 8)
    for _ in range(5):
        bench.finish()
    assert _running(bench) == 8
    bench.workers["w0"].share_unit = BLOCK * 5
    _lose_last(bench)
    assert bench.state.shared.unit == 10 * BLOCK
    assert [s.residency for s in bench.state.sequences.values()] == [0] + 7 * [1]
    assert _running(bench) == 8
    assert bench.state.reserved_blocks == 10 + 1 + 7 * 2  # the first one without headroom
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def _last_replay(bench: Bench) -> Replay:
    *_, (_, order) = orders(bench.log, Replay)
    assert isinstance(order, Replay)
    return order


def _answer(bench: Bench, order: Replay) -> None:
    last = next(s for s in bench.state.plans.current.stages if s.layers.stop == order.through.stop)
    kv, more = order.stop, tuple(SequencePosition(part.sequence, part.stop) for part in order.more)
    done = ReplayDone(
        epoch=bench.epoch,
        incarnation=last.incarnation,
        sequence=order.sequence,
        layers=order.through,
        kv=kv,
        more=more,
    )
    bench.tell(last.name, done)


def _await_loss(make_bench, *submits: Submit, chunk: int = 256) -> tuple[Bench, str]:
    """The stage in the middle is about to be lost: its layers will be replayed from the log before them."""
    bench = _serve(make_bench, 3 * COPY, num_workers=3, chunk=chunk, memory_bytes=TIGHT)
    bench.join("spare", kv_capacity=3 * COPY * BLOCK, share_unit=UNIT, memory_bytes=TIGHT)
    for message in submits:
        bench.say(message)
    for _ in range(5):
        bench.finish()
    first, middle, *_ = bench.state.plans.current.stages
    kv = {s.id: s.kv for s in bench.state.running}
    bench.workers[first.name].logged = kv
    bench.workers["spare"].held = dict.fromkeys(kv, 0)
    bench.take()
    return bench, middle.name


def _lose_middle(make_bench, n: int = 4) -> Bench:
    """After the loss, layers of sequence 1 are replayed first."""
    bench, middle = _await_loss(make_bench, _continuations(n))
    bench.lose(middle)
    while not bench.state.plans.is_serving:
        bench.tick()
    assert _running(bench) == n
    return bench


def test_only_the_prompt_of_the_first_one_is_replayed(make_bench) -> None:
    """The others wait for it, and replay what they have computed behind it, all in one step."""
    bench = _lose_middle(make_bench)
    (only,) = [order for _, order in orders(bench.log, Replay)]
    assert (only.sequence, only.start, only.stop, only.more) == (1, 0, min(256, bench.sequence().kv), ())
    assert bench.state.prefix.is_pinned(1)
    while _last_replay(bench).sequence == 1:
        _answer(bench, _last_replay(bench))
    order = _last_replay(bench)
    parts = (SequenceRange(order.sequence, order.start, order.stop), *order.more)
    assert [(part.sequence, part.start) for part in parts] == [(2, 320), (3, 320), (4, 320)]
    _answer(bench, order)
    assert not bench.state.prefix.is_pinned(1)
    assert not any(s.rebuilds for s in bench.state.running)
    assert bench.state.reserved_blocks == 10 + 4
    bench.run_dry()
    assert [s.residency for s in bench.state.sequences.values()] == 4 * [0]
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_a_record_goes_with_the_first_chunk_only(make_bench) -> None:
    """Of a sequence that waits for its prefix, too, if the tokens are its log."""
    prompt = submit(num_prompt=PROMPT).prompt
    other = (*prompt[: 5 * UNIT], *(9,) * 100)
    requests = [submit(name, prompt=p, max_tokens=BLOCK, ignore_eos=True) for name, p in (("a", prompt), ("b", other))]
    bench, middle = _await_loss(make_bench, *requests, chunk=UNIT)
    for worker in bench.workers.values():
        worker.logged.clear()
    bench.lose(middle)
    sent: list[Step] = []
    while not bench.state.rebuilding.is_idle:
        step = next(step for step in bench.pipe if step.replay)
        bench.pipe.remove(step)
        sent.append(step)
        last = next(s for s in bench.state.plans.current.stages if s.layers.stop == step.through.stop)
        (reached,) = [SequencePosition(r.sequence, r.start + r.count) for r in step.rows]
        done = ReplayDone(
            epoch=bench.epoch,
            incarnation=last.incarnation,
            sequence=reached.sequence,
            layers=step.through,
            kv=reached.position,
        )
        bench.tell(last.name, done)
    starts = [(step.rows[0].sequence, step.rows[0].start, [item.sequence for item in step.open]) for step in sent]
    assert starts == [
        *((1, number * UNIT, [1] if number == 0 else []) for number in range(6)),
        *((2, number * UNIT, [2] if number == 5 else []) for number in (5, 6)),
    ]


def test_sequences_with_nothing_behind_their_prompt_start_again(make_bench) -> None:
    """Perhaps no stage has opened them, and they lose nothing."""
    bench = _serve(make_bench, 3 * COPY, num_workers=3)
    _many(bench, 8)
    bench.finish()
    assert _running(bench) == 8
    _lose_last(bench)
    assert [s.residency for s in bench.state.sequences.values()] == [0] + 7 * [1]
    assert not bench.state.prefixes.links
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_without_the_first_one_the_others_start_again(make_bench) -> None:
    """It is cancelled before its layers are complete: nobody else holds them."""
    bench = _lose_middle(make_bench)
    bench.say(Stop(request_id="r", index=0, at_index=1))
    bench.tick()
    residencies = [s.residency for s in bench.state.sequences.values()]
    assert residencies == [0, 1, 1, 1]
    assert not bench.state.prefixes.lacking
    bench.run_dry()
    assert [s.reason for s in bench.state.sequences.values()] == ["stop", "length", "length", "length"]


def test_a_prompt_that_several_start_from_again_counts_once_as_computed_again(make_bench) -> None:
    """The first stage dies, so that everything is computed again: the prompt by the first sequence only."""
    bench = _serve(make_bench, 3 * COPY, num_workers=3)
    _many(bench, 8)
    for _ in range(5):
        bench.finish()
    held = [sequence.kv for sequence in bench.state.sequences.values()]
    for worker in bench.workers.values():
        worker.held = dict.fromkeys(bench.state.sequences, 0)
    bench.lose(bench.state.plans.current.stages[0].name)
    while not bench.state.plans.is_serving:
        bench.tick()
    recovery = bench.state.recoveries.current
    num_layers = bench.state.manifest.num_layers
    expected = (sum(held) - 7 * 10 * BLOCK) * num_layers
    assert (recovery.layer_positions, recovery.least_layer_positions) == (expected, expected)
    bench.run_dry()
    assert [s.residency for s in bench.state.sequences.values()] == 8 * [1]
    assert bench.state.recoveries.past[-1].layer_positions == expected


@pytest.mark.parametrize(("start", "expected"), [(60, 40), (0, 100), (80, 20), (200, 0)])
def test_where_a_sequence_really_starts_again_corrects_the_count(start: int, expected: int) -> None:
    """Perhaps it cannot share what was expected, or shares more by then."""
    history = RecoveryHistory()
    recovery = history.begin("w1 was lost", 0.0)
    history.add_recomputed(1, 60, 100, 2, least=80)
    assert recovery.layer_positions == 80
    history.record_restored(1, start, start)
    assert recovery.layer_positions == 2 * expected
    assert recovery.least_layer_positions <= recovery.layer_positions
    assert recovery.restored_layer_positions == 0


def test_the_first_one_may_be_cancelled_while_the_stages_report(make_bench) -> None:
    """It is another request, which the broker forgets; a sequence that shares its prefix starts again."""
    requests = [submit(name, num_prompt=PROMPT, max_tokens=BLOCK, ignore_eos=True) for name in ("first", "other")]
    bench, middle = _await_loss(make_bench, *requests)
    bench.mute.add("spare")
    bench.lose(middle)
    spare = bench.workers["spare"]
    bench.tell("spare", spare.prepared(spare.prepare.epoch))
    assert bench.state.plans.phase is PlanPhase.ACTIVATING
    *_, order = [order for name, order in orders(bench.log, Activate) if name == spare.incarnation]
    assert order.shared == (SharedPrefix(2, 1, 10 * BLOCK),)
    bench.say(Cancel(request_id="first"))
    assert 1 not in bench.state.sequences
    bench.tell("spare", spare.activated(order))
    assert bench.state.plans.is_serving
    assert bench.sequence("other").residency == 1
    bench.run_dry()
    assert bench.sequence("other").reason == "length"


def test_a_first_one_that_ends_once_it_is_complete_leaves_its_prompt(make_bench) -> None:
    bench = _lose_middle(make_bench)
    while _last_replay(bench).sequence == 1:
        _answer(bench, _last_replay(bench))
    bench.say(Stop(request_id="r", index=0, at_index=1))
    bench.tick()
    assert list(bench.state.prefix.retired) == [1]
    _answer(bench, _last_replay(bench))
    assert [s.residency for s in bench.state.sequences.values()] == 4 * [0]
    bench.run_dry()
    assert [s.reason for s in bench.state.sequences.values()] == ["stop", "length", "length", "length"]


def test_a_plan_with_room_for_all_keeps_all(make_bench) -> None:
    bench = _serve(make_bench, 8 * COPY, num_workers=3)
    _many(bench, 8)
    bench.finish()
    bench.lose(bench.state.plans.current.stages[-1].name)
    while not bench.state.plans.is_serving:
        bench.tick()
    assert _running(bench) == 8
    assert bench.state.shared.saved == 0


def _overfull(bench: Bench, name: str) -> DataPathError:
    return DataPathError(
        epoch=bench.epoch, incarnation=bench.workers[name].incarnation, reason="no mapping", kv_overfull=True
    )


def test_a_full_stage_blames_no_request(make_bench) -> None:
    """Even if nothing is shared, and however often it happens: the worker goes meanwhile, and comes back."""
    bench = _serve(make_bench, 3 * COPY, share_unit=0)
    _many(bench, 1)
    num_out = 0
    for number in range(1, 8):
        before = bench.epoch
        bench.tell("w1", _overfull(bench, "w1"))
        while not bench.state.plans.is_serving:
            bench.tick()
        assert bench.epoch == before + 1
        if bench.state.workers["w1.1"].is_gone:
            num_out += 1
            assert number == num_out * MAX_DIFFERENCES
            bench.tell("w1", bench.workers["w1"].hello())
            bench.tick(1.0)
            assert "w1.1" in bench.state.plans.current.members
    assert num_out == 2
    assert bench.state.counters.get("sequences_at_deaths", 0) == 0
    bench.run_dry()
    assert bench.sequence().reason == "length"


def test_a_stage_that_cannot_share_any_more_makes_a_plan_without_sharing(make_bench) -> None:
    """The sequences that fit in full stay; nobody is to blame, and nothing is lost."""
    bench = _serve(make_bench, 3 * COPY)
    _many(bench, 8)
    bench.finish()
    assert (_running(bench), bench.state.shared.unit) == (8, UNIT)
    bench.workers["w1"].share_unit = 0
    bench.tell("w1", _overfull(bench, "w1"))
    while not bench.state.plans.is_serving:
        bench.tick()
    assert (bench.epoch, bench.state.shared.unit) == (2, 0)
    assert _running(bench) == 3
    assert bench.state.reserved_blocks <= 3 * COPY
    assert set(bench.workers) == {w.name for w in bench.state.workers.values() if not w.is_gone}
    assert bench.state.counters.get("sequences_at_deaths", 0) == 0
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())

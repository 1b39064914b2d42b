"""Long sequences begin with what all stages have on disk; nothing else counts, and none waits longer than it may."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import WriteLog
from swarm.broker.state import SequenceState
from swarm.broker.state.restores import FIRST_REST_S
from swarm.broker.steps.restoring import ANSWER_SHARE, MAX_WAIT_S, MIN_WAIT_S, READ_POSITION_S, wait_s
from swarm.testing import fake_manifest
from swarm.wire.messages import BLOCK, Cancel, KvRestored, RestoreKv, SpillKv
from tests.unit.broker.bench import Bench, orders, row, scheduling, settings, submit

MakeBench = Callable[..., Bench]
FROM = 512
PROMPT = 1000
MODEL = fake_manifest(context=4096)


def serve(make_bench: MakeBench, num_workers: int = 2, **fields: object) -> Bench:
    bench = make_bench(scheduling(mode="batch", step_tokens=2048, prefill_chunk=2048))
    own: dict[str, object] = {"manifest": MODEL, "bits": "the same", "spill_from": FROM, "kv_capacity": 1 << 14}
    return bench.serve(num_workers, **(own | fields))


def submitted(bench: Bench, request_id: str = "r", num_prompt: int = PROMPT, **fields: object) -> None:
    bench.say(submit(request_id, num_prompt=num_prompt, **fields))


def opened(bench: Bench, request_id: str = "r", **fields: object) -> list[RestoreKv]:
    """A long request was opened by a step without a row; the orders that follow it."""
    submitted(bench, request_id, **fields)
    (step,) = bench.pipe
    assert ([item.sequence for item in step.open], step.rows) == ([bench.sequence(request_id).id], ())
    bench.take()
    bench.finish()
    found = orders(bench.take(), RestoreKv)
    assert [peer for peer, _ in found] == [w.incarnation for w in bench.workers.values()]
    return [order for _, order in found if isinstance(order, RestoreKv)]


def answer(bench: Bench, name: str, order: RestoreKv, position: int, **fields: object) -> None:
    worker = bench.workers[name]
    message = KvRestored(
        epoch=order.epoch,
        incarnation=worker.incarnation,
        sequence=order.sequence,
        ticket=order.ticket,
        position=position,
        lineage=worker.lineage,
    )
    bench.tell(name, msgspec.structs.replace(message, **fields))


def answer_all(bench: Bench, order: RestoreKv, position: int) -> None:
    for name in bench.workers:
        answer(bench, name, order, position)


def serve_computed(make_bench: MakeBench) -> Bench:
    """A sequence that is computed from its first position on, since no stage had anything of it."""
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer_all(bench, first, 0)
    return bench


# --- orders to write -------------------------------------------------------------------------------------------------


def spill_orders(bench: Bench) -> list[tuple[str, int, str, tuple[int, ...]]]:
    found = orders(bench.take(), SpillKv)
    return [(p, o.num_positions, o.bits, o.excluded) for p, o in found if isinstance(o, SpillKv)]


def test_stages_write_when_all_can_with_the_same_bits(make_bench: MakeBench) -> None:
    bench = make_bench(settings())
    bench.join("w0", bits="the same", spill_from=300)
    bench.join("w1", bits="the same", spill_from=700)
    bench.tick()
    bench.tick()
    assert bench.state.plans.is_serving
    found = spill_orders(bench)
    assert {(700, "the same", ())} == {order[1:] for order in found}
    assert found


@pytest.mark.parametrize("second", [{"spill_from": 0}, {"bits": "others"}], ids=["no space", "other bits"])
def test_otherwise_they_write_and_read_nothing(make_bench: MakeBench, second: dict[str, object]) -> None:
    bench = make_bench(settings())
    for name, fields in (("w0", {}), ("w1", second)):
        own: dict[str, object] = {"bits": "the same", "spill_from": FROM, "kv_capacity": 1 << 14, "manifest": MODEL}
        bench.join(name, **(own | fields))
    bench.tick()
    bench.tick()
    assert len(bench.state.plans.current.stages) == 2  # type: ignore[union-attr]
    (reason,) = [a.fields["reason"] for a in bench.log if isinstance(a, WriteLog) and a.event == "disks_not_used"]
    assert ("no space" in str(reason)) == ("spill_from" in second)
    assert spill_orders(bench) == []
    submitted(bench, num_prompt=PROMPT)
    assert bench.pipe[0].rows


def test_by_default_nothing_changes(make_bench: MakeBench) -> None:
    bench = serve(make_bench, spill_from=0)
    submitted(bench)
    (step,) = bench.pipe
    assert row(step) == [(bench.sequence().id, 0, PROMPT)]
    assert orders(bench.take(), SpillKv) == []


def test_sequences_of_a_plan_with_other_bits_are_not_written(make_bench: MakeBench) -> None:
    bench = serve_computed(make_bench)
    bench.finish()
    running = bench.sequence().id
    assert bench.sequence().kv == PROMPT
    state = bench.state.restores
    state.start_plan("the same", FROM, {running: PROMPT})
    assert state.excluded == set()
    state.start_plan("", FROM, {running: PROMPT, 77: 0})
    assert (state.excluded, state.num_positions) == ({running}, 0)
    state.start_plan("the same", FROM, {running: PROMPT + 9, 78: 5})
    assert (state.excluded, state.num_positions) == ({running, 78}, FROM)
    state.start_plan("the same", FROM, {78: 6})
    assert state.excluded == {78}


def test_what_begins_like_one_of_them_is_not_written_in_later_plans_either(make_bench: MakeBench) -> None:
    """The stages leave it out in this plan by themselves, and forget that with the plan."""
    bench = serve_computed(make_bench)
    bench.run_dry()
    source = bench.sequence()
    state = bench.state.restores
    state.excluded.add(source.id)
    prompt = source.request.submit.prompt
    submitted(bench, "fork", prompt=(*prompt[:320], *(7 + n % 50 for n in range(100))))
    submitted(bench, "other", prompt=tuple(9 + n % 40 for n in range(100)))
    fork, other = bench.sequence("fork").id, bench.sequence("other").id
    assert bench.sequence("fork").num_cached == 320
    assert state.excluded == {source.id, fork}
    state.start_plan("the same", FROM, {fork: 320, other: 100})
    assert state.excluded == {fork}


# --- reading ---------------------------------------------------------------------------------------------------------


def test_it_goes_on_from_the_least_position_of_all_stages(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, second = opened(bench)
    assert first == second
    assert (first.start, first.stop) == (0, PROMPT - 1)
    sequence = bench.sequence()
    assert (sequence.state, sequence.pending, list(bench.pipe)) == (SequenceState.RUNNING, 0, [])
    answer(bench, "w0", first, 768)
    assert not bench.pipe
    answer(bench, "w1", first, 512)
    (step,) = bench.pipe
    assert (row(step), step.open) == ([(sequence.id, 512, PROMPT - 512)], ())
    assert [(cut.sequence, cut.position) for cut in step.truncate] == [(sequence.id, 512)]
    bench.finish()
    counters = bench.state.counters
    assert (counters["restored_positions"], counters["restored_sequences"]) == (512, 1)
    assert (sequence.kv, sequence.num_generated, sequence.num_cached) == (PROMPT, 1, 512)


def test_a_step_without_rows_is_no_measurement(make_bench: MakeBench) -> None:
    """It is neither a decode nor a part of a prompt, so it changes none of the measured rates."""
    bench = serve(make_bench)
    submitted(bench, "short", num_prompt=5)
    bench.now += 0.5
    bench.run_dry()
    costs, rates = bench.state.costs, bench.state.moves.rates
    before = (costs.tokens_per_s, costs.usual_step_s, repr(rates))
    assert before[0]
    submitted(bench)
    bench.now += 3.0
    bench.finish()
    assert (costs.tokens_per_s, costs.usual_step_s, repr(rates)) == before
    assert costs.last_done_at == bench.now


def test_short_ones_and_what_is_left_of_a_long_one_are_computed(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    submitted(bench, num_prompt=FROM - 1)
    assert bench.pipe[0].rows


def test_a_stage_without_anything_ends_the_wait(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer(bench, "w0", first, 0)
    answer(bench, "w1", first, 768)
    (step,) = bench.pipe
    assert row(step) == [(bench.sequence().id, 0, PROMPT)]
    assert bench.state.counters["restored_positions"] == 0


def test_nothing_counts_if_an_answer_is_missing_at_the_deadline(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    limit_s = 1.0 + PROMPT * READ_POSITION_S
    assert first.within_s == pytest.approx(ANSWER_SHARE * limit_s)
    answer(bench, "w0", first, 768)
    bench.tick(limit_s - 0.05)
    assert not bench.pipe
    bench.tick(0.1)
    (step,) = bench.pipe
    assert row(step) == [(bench.sequence().id, 0, PROMPT)]
    assert [(cut.sequence, cut.position) for cut in step.truncate] == [(bench.sequence().id, 0)]
    answer(bench, "w1", first, 768)
    assert (bench.state.counters["restores_too_late"], bench.state.counters["stale_restores"]) == (1, 1)
    bench.finish()
    assert bench.sequence().num_generated == 1


def prompt(number: int) -> tuple[int, ...]:
    """A long prompt that begins unlike those with other numbers."""
    return (11 + number, *(11 + n % 40 for n in range(PROMPT - 1)))


def slow(bench: Bench) -> list[tuple[object, object]]:
    """The warnings of stages that have used up their time."""
    found = [a.fields for a in bench.log if isinstance(a, WriteLog) and a.event == "sequence_restored_slowly"]
    return [(fields["worker"], fields["position"]) for fields in found]


def test_a_stage_that_reads_slowly_is_named_and_nothing_is_read_for_a_while(make_bench: MakeBench) -> None:
    """Each further slow answer doubles the while; answers in time end that."""
    bench = serve(make_bench)
    rests: list[float] = []
    for number in range(3):
        first, _ = opened(bench, f"r{number}", prompt=prompt(2 * number))
        answer(bench, "w0", first, 768)
        bench.now += first.within_s
        answer(bench, "w1", first, 256)
        assert slow(bench) == [("w1", 256)]
        assert row(bench.pipe[0])[0][1] == 256
        bench.run_dry()
        rests.append(bench.state.restores.rest_s)
        submitted(bench, f"meanwhile {number}", prompt=prompt(2 * number + 1))
        assert bench.pipe[0].rows
        bench.run_dry()
        bench.tick(rests[-1] + 0.1)
        bench.take()
    assert rests == [1.0, 2.0, 4.0]
    first, _ = opened(bench, "in time", prompt=prompt(6))
    answer_all(bench, first, 512)
    assert (slow(bench), bench.state.restores.rest_s) == ([], 0.0)


def test_nothing_is_read_for_a_while_after_a_missing_answer(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer(bench, "w0", first, 768)
    bench.tick(first.within_s / ANSWER_SHARE + 0.1)
    bench.run_dry()
    assert bench.state.restores.rest_s == FIRST_REST_S
    submitted(bench, "b", prompt=prompt(1))
    assert bench.pipe[0].rows


def test_a_step_that_never_ends_does_not_prolong_the_wait(make_bench: MakeBench) -> None:
    """The deadline counts from the admission, although no stage was ordered to read yet."""
    bench = serve(make_bench)
    submitted(bench)
    bench.tick(1.0 + PROMPT * READ_POSITION_S + 0.1)
    assert bench.sequence().pending == PROMPT
    bench.take()
    bench.finish()
    assert orders(bench.take(), RestoreKv) == []


def test_how_long_it_waits() -> None:
    """As long as computing would take, within limits; without a measurement, as long as slow disks need."""
    assert wait_s(1000, 500.0) == 2.0
    assert wait_s(30_000, 10.0) == MAX_WAIT_S
    assert wait_s(1000, 1e9) == MIN_WAIT_S
    assert wait_s(8000, None) == 1.0 + 8000 * READ_POSITION_S


def test_those_that_wait_already_count_since_computing_them_takes_time_too(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    opened(bench, "a")
    first, _ = opened(bench, "b")
    assert first.within_s == pytest.approx(ANSWER_SHARE * (1.0 + 2 * PROMPT * READ_POSITION_S))


@pytest.mark.parametrize(
    "wrong", [{"ticket": 99}, {"sequence": 99}, {"epoch": 99}], ids=["ticket", "sequence", "epoch"]
)
def test_answers_to_something_else_do_not_count(make_bench: MakeBench, wrong: dict[str, int]) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer(bench, "w0", first, 768)
    answer(bench, "w1", first, 768, **wrong)
    answer(bench, "w0", first, 900)
    assert not bench.pipe
    assert bench.state.counters["stale_restores"] == 2
    answer(bench, "w1", first, 768)
    assert row(bench.pipe[0])[0][1] == 768


@pytest.mark.parametrize("position", [PROMPT, PROMPT + 500])
def test_a_position_behind_the_end_of_the_order_does_not_count(make_bench: MakeBench, position: int) -> None:
    """The stage cannot have read it, so its cache cannot be cut to where the others stand. The log names the stage."""
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer(bench, "w0", first, PROMPT - 1)
    answer(bench, "w1", first, position)
    assert row(bench.pipe[0]) == [(bench.sequence().id, 0, PROMPT)]
    assert unfit(bench) == [("w1", position, [0, PROMPT - 1])]


def unfit(bench: Bench) -> list[tuple[object, object, object]]:
    """The warnings of reports that cannot be true."""
    found = [a.fields for a in bench.log if isinstance(a, WriteLog) and a.event == "restored_position_unfit"]
    assert len(found) == bench.state.counters.get("restores_unfit", 0)
    return [(fields["worker"], fields["position"], fields["ordered"]) for fields in found]


def test_the_last_token_is_computed_although_stages_have_read_all_before(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    answer(bench, "w0", first, PROMPT - 1)
    answer(bench, "w1", first, PROMPT - 1)
    assert row(bench.pipe[0]) == [(bench.sequence().id, PROMPT - 1, 1)]
    assert unfit(bench) == []


def test_a_cancelled_one_is_released(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    number = bench.sequence().id
    bench.say(Cancel(request_id="r"))
    assert bench.pipe[-1].release == (number,)
    answer(bench, "w0", first, 768)
    answer(bench, "w1", first, 768)
    bench.run_dry()
    bench.tick()
    assert (bench.state.counters["stale_restores"], bench.state.restores.in_progress) == (2, {})


def test_another_plan_ends_it(make_bench: MakeBench) -> None:
    """The sequence is computed: what stages of the plan before have read does not count."""
    bench = serve(make_bench)
    first, _ = opened(bench)
    bench.lose("w1")
    bench.join("w2", manifest=MODEL, bits="the same", spill_from=FROM, kv_capacity=1 << 14)
    bench.tick()
    bench.tick()
    assert bench.state.plans.is_serving
    answer(bench, "w0", first, 768)
    assert bench.state.counters["restored_positions"] == 0
    sequence = bench.sequence()
    assert sequence.state is SequenceState.RUNNING
    while bench.pipe:
        bench.finish()
        if bench.state.restores.in_progress:
            break
    bench.tick(3.0)
    bench.run_dry()
    assert sequence.num_generated == 8


def test_a_recovery_counts_what_was_read_as_read_and_ends_with_the_first_row(make_bench: MakeBench) -> None:
    """All workers die. The step that only opens the sequence ends nothing."""
    bench = serve_computed(make_bench)
    bench.finish()
    assert bench.sequence().kv == PROMPT
    for name in list(bench.workers):
        bench.lose(name)
    own: dict[str, object] = {"manifest": MODEL, "bits": "the same", "spill_from": FROM, "kv_capacity": 1 << 14}
    bench.join("w2", "w3", held={bench.sequence().id: 0}, **own)
    bench.tick()
    bench.tick()
    bench.take()
    history, num_layers = bench.state.recoveries, MODEL.num_layers
    assert history.current is not None
    assert history.current.layer_positions == PROMPT * num_layers
    bench.finish()
    assert history.current.resumed_first_at is None
    for _, order in orders(bench.take(), RestoreKv):
        assert isinstance(order, RestoreKv)
        answer_all(bench, order, 768)
        break
    assert history.current is not None
    bench.now += 0.5
    bench.finish()
    (found,) = history.past
    assert (found.layer_positions, found.least_layer_positions) == ((PROMPT - 768) * num_layers,) * 2
    assert found.restored_layer_positions == 768 * num_layers
    assert found.resumed_first_at == bench.now


def test_others_run_meanwhile(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    first, _ = opened(bench)
    submitted(bench, "short", num_prompt=5)
    (step,) = bench.pipe
    assert row(step) == [(bench.sequence("short").id, 0, 5)]
    answer(bench, "w0", first, 256)
    answer(bench, "w1", first, 256)
    bench.finish()
    bench.run_dry()
    assert bench.sequence().num_generated == bench.sequence("short").num_generated == 8


def test_a_cached_beginning_is_copied_first_and_the_rest_is_read(make_bench: MakeBench) -> None:
    bench = serve_computed(make_bench)
    bench.run_dry()
    source = bench.sequence()
    longer = (*source.request.submit.prompt[:320], *(7 + n % 50 for n in range(700)))
    bench.take()
    submitted(bench, "b", prompt=longer)
    (step,) = bench.pipe
    (item,) = step.open
    assert (item.source, item.shared, step.rows) == (source.id, 320 // BLOCK * BLOCK, ())
    bench.finish()
    order = orders(bench.take(), RestoreKv)[0][1]
    assert isinstance(order, RestoreKv)
    assert (order.start, order.stop) == (320, len(longer) - 1)
    answer_all(bench, order, 0)
    assert row(bench.pipe[0]) == [(bench.sequence("b").id, 320, len(longer) - 320)]
    assert bench.sequence("b").num_cached == 320
    assert unfit(bench) == [(name, 0, [320, len(longer) - 1]) for name in bench.workers], "they were not ready"


def test_a_pause_of_the_broker_is_not_counted(make_bench: MakeBench) -> None:
    bench = serve(make_bench)
    opened(bench)
    bench.now += 20.0
    bench.tick(0.1)
    assert not bench.pipe
    assert bench.state.restores.in_progress

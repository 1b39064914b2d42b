"""Room for keys and values: taken as sequences grow, given back by whoever has the least claim; nobody loses by it."""

from __future__ import annotations

import pytest

from swarm.broker.state import SequenceState
from swarm.broker.steps.kv_capacity import MAX_PREEMPTIONS
from swarm.testing import fake_manifest
from swarm.wire.messages import BLOCK, Cancel, Finished, SequencePosition, Tokens
from tests.unit.broker.bench import Bench, row, said, scheduling, steps, submit


def _small(make_bench, blocks: int, num_workers: int = 1, **fields: object) -> Bench:
    """Stages with so few blocks, and sequences that enter with little more than they have."""
    bench = make_bench(scheduling(**({"mode": "batch", "kv_headroom": 1} | fields)))
    return bench.serve(num_workers, kv_capacity=blocks * BLOCK)


def _running(bench: Bench) -> set[str]:
    return {s.request.id for s in bench.state.running}


def _waiting(bench: Bench) -> list[str]:
    return [s.request.id for s in bench.state.waiting]


def test_room_is_taken_as_it_is_needed(make_bench) -> None:
    """Three that may each come to fill the stages run side by side while they are short."""
    bench = _small(make_bench, 4)
    for name in "abc":
        bench.say(submit(name, num_prompt=3, max_tokens=4 * BLOCK - 3))
    bench.finish()
    assert _running(bench) == {"a", "b", "c"}
    assert [s.blocks for s in bench.state.running] == [1, 1, 1]
    for _ in range(BLOCK):
        bench.finish()
    assert bench.sequence("a").blocks == 2


def test_a_large_headroom_reserves_everything(make_bench) -> None:
    """Then nobody ever has to give way."""
    bench = _small(make_bench, 4, kv_headroom=1 << 16)
    for name in "ab":
        bench.say(submit(name, num_prompt=3, max_tokens=3 * BLOCK, ignore_eos=True))
    bench.finish()
    assert _running(bench) == {"a"}
    bench.run_dry()
    assert "preemptions" not in bench.state.counters
    assert bench.sequence("b").reason == "length"


def test_a_gpu_holds_what_is_reserved(make_bench) -> None:
    """Where memory is taken by reserving, a sequence enters with room for all it may come to hold."""
    bench = make_bench(scheduling(mode="batch", kv_headroom=1))
    bench.serve(1, kv_capacity=4 * BLOCK, device="cuda")
    for name in "ab":
        bench.say(submit(name, num_prompt=3, max_tokens=3 * BLOCK, ignore_eos=True))
    bench.finish()
    assert (_running(bench), bench.sequence("a").blocks) == ({"a"}, 4)


def test_the_youngest_gives_way_and_is_computed_again(make_bench) -> None:
    """It releases all, waits, and goes on where it was: with its tokens, told anew to the stages."""
    bench = _small(make_bench, 2)
    for name in "ab":
        bench.say(submit(name, num_prompt=3, max_tokens=2 * BLOCK - 3, ignore_eos=True))
    while not bench.state.counters.get("preemptions"):
        bench.finish()
    victim = bench.sequence("b")
    assert (_running(bench), _waiting(bench)) == ({"a"}, ["b"])
    assert (victim.kv, victim.scheduled, victim.blocks, victim.is_open_in_stages) == (0, 0, 0, False)
    assert bench.pipe[-1].release == (victim.id,)
    known = tuple(victim.tokens)
    assert len(known) > 3
    while bench.sequence("a").reason is None:
        bench.finish()
    bench.take()
    while bench.sequence("b").state is not SequenceState.RUNNING:
        bench.finish()
    (step,) = [s for s in [*steps(bench.log), *bench.pipe] if s.open][:1]
    (opened,) = step.open
    assert (opened.sequence, opened.tokens, opened.num_prompt) == (victim.id, known, 3)
    assert row(step) == [(victim.id, 0, len(known))]
    bench.run_dry()
    (end,) = [m for m in said(bench.log, Finished) if isinstance(m, Finished)]
    assert (end.request_id, end.reason, end.num_tokens) == ("b", "length", 2 * BLOCK - 3)
    assert end.timing.num_recomputed == 1


def test_nothing_is_said_twice_or_left_out(make_bench) -> None:
    """Many that have to give way over and over: each client sees each of its tokens once, in order."""
    bench = _small(make_bench, 5)
    for number in range(8):
        bench.say(submit(f"r{number}", num_prompt=5 * number + 1, max_tokens=70, ignore_eos=True))
    bench.run_dry()
    assert bench.state.counters["preemptions"] > 3
    for number in range(8):
        seen = [(m.start, len(m.ids)) for m in said(bench.log, Tokens) if m.request_id == f"r{number}"]
        assert [start for start, _ in seen] == list(range(70))
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_the_oldest_is_never_asked(make_bench) -> None:
    """Whoever has the best claim runs through; nobody gives way more often than agreed."""
    bench = _small(make_bench, 4)
    for number in range(12):
        bench.say(submit(f"r{number}", num_prompt=20, max_tokens=4 * BLOCK - 20, ignore_eos=True))
    bench.run_dry()
    assert bench.sequence("r0").num_preempted == 0
    times = [bench.sequence(f"r{number}").num_preempted for number in range(12)]
    assert 0 < max(times) <= MAX_PREEMPTIONS
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_who_gave_way_often_enters_with_all_its_room(make_bench) -> None:
    """And is not asked again."""
    bench = _small(make_bench, 4)
    bench.say(submit("a", num_prompt=3, max_tokens=3 * BLOCK))
    bench.sequence("a").num_preempted = MAX_PREEMPTIONS
    bench.lose("w0")
    bench.join("w1", kv_capacity=4 * BLOCK)
    bench.tick()
    assert bench.sequence("a").blocks == 4
    bench.say(submit("high", num_prompt=3, priority=50))
    bench.finish()
    assert _running(bench) == {"a"}


def test_a_higher_class_takes_the_room_of_a_lower_one(make_bench) -> None:
    """At once, from the youngest of the lowest; not more than it needs."""
    bench = _small(make_bench, 3)
    bench.say(submit("normal", num_prompt=20, max_tokens=12))
    bench.say(submit("low old", num_prompt=20, max_tokens=12, priority=-50))
    bench.say(submit("low young", num_prompt=20, max_tokens=12, priority=-50))
    bench.finish()
    assert len(bench.state.running) == 3
    bench.say(submit("high", num_prompt=20, max_tokens=12, priority=50))
    bench.finish()
    assert _running(bench) == {"normal", "low old", "high"}
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())
    assert bench.state.counters["preemptions"] == 1


def test_who_is_about_to_be_copied_from_stays(make_bench) -> None:
    """A sequence is pinned by one that begins as it; the room that a higher class needs is another's."""
    bench = _small(make_bench, 3)
    for name in ("low", "source"):  # the youngest would be the first
        bench.say(submit(name, num_prompt=20, max_tokens=12, priority=-50))
    bench.finish()
    source = bench.sequence("source")
    bench.state.prefix.pin(source.id)
    bench.say(submit("high", num_prompt=40, max_tokens=12, priority=50))
    bench.finish()
    assert _running(bench) == {"source", "high"}
    bench.state.prefix.unpin(source.id)
    bench.run_dry()


def test_a_higher_class_takes_the_place_of_a_lower_one(make_bench) -> None:
    """Where places are short, not blocks."""
    bench = make_bench(scheduling(mode="batch", max_running=2)).serve(1)
    for name in "ab":
        bench.say(submit(name, priority=-50, max_tokens=50))
    bench.finish()
    bench.say(submit("high", priority=50))
    bench.finish()
    assert _running(bench) == {"a", "high"}


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [({}, 1000), ({"max_running": 4}, 1000), ({}, 40), ({"step_tokens": 64, "prefill_chunk": 64}, 1000)],
    ids=["room for all", "all places taken", "all blocks taken", "small steps"],
)
def test_a_first_token_waits_for_no_line_of_a_batch(make_bench, fields: dict[str, int], blocks: int) -> None:
    """Whether their prompts or answers are computed, and whatever they have taken: the request's prompt is in the step
    behind the one in flight."""
    for num_steps in (1, 4, 30):
        bench = _small(make_bench, blocks, **fields)
        for number in range(32):
            bench.say(submit(f"line {number}", num_prompt=200, max_tokens=400, priority=-100, ignore_eos=True))
        for _ in range(num_steps):
            bench.finish()
        bench.say(submit("person", num_prompt=40, max_tokens=4))
        bench.finish()  # the step in flight
        bench.finish()
        assert bench.sequence("person").num_generated == 1


def test_an_equal_class_takes_nothing(make_bench) -> None:
    """Who comes later waits for room to become free."""
    bench = _small(make_bench, 1)
    bench.say(submit("a", num_prompt=3, max_tokens=20))
    bench.say(submit("b", num_prompt=3, max_tokens=20))
    bench.finish()
    assert (_running(bench), _waiting(bench)) == ({"a"}, ["b"])


def test_a_token_that_was_under_way_is_kept(make_bench) -> None:
    """A sequence gives way while a step of it is in the pipe. Its token counts, what it acknowledges does not: those
    positions are released behind it."""
    bench = _small(make_bench, 2, num_workers=2, mode="overlapped")
    for name in "ab":
        bench.say(submit(name, num_prompt=3, max_tokens=2 * BLOCK - 3, ignore_eos=True))
    while not bench.state.counters.get("preemptions"):
        bench.finish()
    victim = bench.sequence("b")
    under_way = [s for s in bench.pipe if any(r.sequence == victim.id for r in s.rows)]
    assert under_way, "the victim has no step in the pipe: this test tests nothing"
    known = victim.num_generated
    bench.finish(under_way[0], token=55)
    assert (victim.tokens[-1], victim.num_generated) == (55, known + 1)
    assert (victim.state, victim.kv, victim.scheduled) == (SequenceState.WAITING, 0, 0)
    bench.run_dry()
    assert (victim.reason, victim.num_generated) == ("length", 2 * BLOCK - 3)


def test_a_victim_may_end_while_it_waits(make_bench) -> None:
    """Its last token comes from a step that was under way when it gave way."""
    bench = _small(make_bench, 2, num_workers=2, mode="overlapped")
    bench.say(submit("a", num_prompt=3, max_tokens=2 * BLOCK - 3, ignore_eos=True))
    bench.say(submit("b", num_prompt=3, max_tokens=2 * BLOCK - 3))
    while not bench.state.counters.get("preemptions"):
        bench.finish()
    victim = bench.sequence("b")
    under_way = next(s for s in bench.pipe if any(r.sequence == victim.id for r in s.rows))
    bench.finish(under_way, token=0)
    assert victim.reason == "stop"
    assert _waiting(bench) == []
    bench.run_dry()


def test_over_a_change_of_plan_the_best_claims_stay(make_bench) -> None:
    """Where the new stages hold less, the youngest of the lowest class wait."""
    bench = _small(make_bench, 6)
    for number, priority in enumerate((-50, 0, 50, 0)):
        bench.say(submit(f"r{number}", num_prompt=20, max_tokens=30, priority=priority))
    bench.finish()
    assert len(bench.state.running) == 4
    bench.join("w1", kv_capacity=2 * BLOCK)
    bench.tick()
    assert _running(bench) == {"r1", "r2"}
    assert _waiting(bench) == ["r3", "r0"]
    bench.run_dry()
    assert all(s.reason == "length" for s in bench.state.sequences.values())


def test_retired_ones_go_before_anybody_gives_way(make_bench) -> None:
    """What is only kept for others' sake is the first to be given up."""
    bench = _small(make_bench, 3)
    bench.say(submit("past", num_prompt=BLOCK + 1, max_tokens=2))
    bench.run_dry()
    assert bench.state.prefix.num_blocks == 1
    bench.say(submit("a", prompt=(90, 90, 90), max_tokens=3 * BLOCK - 3, ignore_eos=True))
    bench.run_dry()
    assert bench.sequence("a").reason == "length"
    assert "preemptions" not in bench.state.counters
    released = [sequence for s in steps(bench.log) for sequence in s.release]
    assert SequencePosition(1, BLOCK) in [cut for s in steps(bench.log) for cut in s.retire]
    assert 1 in released


def with_states(make_bench) -> Bench:
    """A swarm that serves a model whose layers keep states every four blocks."""
    bench = make_bench(scheduling())
    bench.serve(1, manifest=fake_manifest(state_stride=4 * BLOCK))
    return bench


@pytest.mark.parametrize(("num_prompt", "kept"), [(BLOCK - 4, 0), (BLOCK, 1), (3 * BLOCK, 3), (5 * BLOCK, 5)])
def test_of_a_model_with_states_only_what_another_can_start_from_is_retired(make_bench, num_prompt, kept) -> None:
    """The whole blocks of a sequence whose last step is done."""
    bench = with_states(make_bench)
    bench.say(submit("past", num_prompt=num_prompt, max_tokens=4))
    bench.run_dry()
    assert bench.state.prefix.num_blocks == kept
    cuts = [cut for s in steps(bench.log) for cut in s.retire]
    assert cuts == ([SequencePosition(1, kept * BLOCK)] if kept else [])
    assert ([1] in [list(s.release) for s in steps(bench.log)]) is not bool(kept)


@pytest.mark.parametrize(("num_prompt", "kept"), [(3 * BLOCK, 0), (6 * BLOCK - 2, 4)])
def test_a_sequence_with_states_that_ends_in_mid_step_keeps_what_is_certain(make_bench, num_prompt, kept) -> None:
    """The step may leave the state of a later block."""
    bench = with_states(make_bench)
    bench.say(submit("past", num_prompt=num_prompt, max_tokens=40))
    bench.finish()
    bench.finish()
    sequence = bench.sequence("past")
    assert sequence.kv < sequence.scheduled
    bench.say(Cancel(request_id="past"))
    bench.run_dry()
    assert bench.state.prefix.num_blocks == kept


def test_a_state_of_an_earlier_plan_is_not_counted_on(make_bench) -> None:
    """Other workers may have taken the layers over from copies, which lack it."""
    bench = with_states(make_bench)
    bench.say(submit("past", num_prompt=2 * BLOCK + 5, max_tokens=12))
    bench.finish()
    assert bench.sequence("past").block_state == 2 * BLOCK
    bench.join("w1", manifest=fake_manifest(state_stride=4 * BLOCK))
    bench.tick()
    assert bench.sequence("past").block_state == 0
    bench.run_dry()
    assert bench.sequence("past").reason == "length"
    assert bench.state.prefix.num_blocks == 0


def test_a_model_with_states_starts_where_a_sequence_has_ended(make_bench) -> None:
    """Or at a multiple of the stride of any that holds as much."""
    bench, conversation = with_states(make_bench), tuple(range(1, 91)) * 3
    for name, num_prompt, cached in (
        ("turn", 2 * BLOCK + 5, 0),
        ("next", 3 * BLOCK + 9, 2 * BLOCK),
        ("again", 2 * BLOCK + 9, 2 * BLOCK),
        ("other", 3 * BLOCK - 1, 2 * BLOCK),
        ("long", 7 * BLOCK + 3, 3 * BLOCK),
        ("parts", 6 * BLOCK, 4 * BLOCK),
    ):
        prompt = conversation[: num_prompt - 1] + ((91,) if name in ("again", "other", "parts") else (5,))
        bench.say(submit(name, prompt=prompt, max_tokens=1))
        bench.run_dry()
        assert bench.sequence(name).num_cached == cached, name

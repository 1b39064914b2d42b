"""The prefix cache: what is found, what is kept, what goes first, and what a step says of it."""

from __future__ import annotations

import pytest

from swarm.broker.actions import WriteTokens
from swarm.broker.state import Request, Sequence
from swarm.broker.state.prefix import PrefixCache, PrefixIndex, PrefixRules, RetiredSequence
from swarm.params import ImageSpan
from swarm.wire.messages import BLOCK, Cancel, Finished, SequencePosition, Step
from swarm.wire.shared_positions import SharedPositions
from tests.unit.broker.bench import Bench, row, said, scheduling, settings, steps, submit

A = tuple(range(100))
B = (7,) * 100
RECENT = PrefixRules()


# --- the index -------------------------------------------------------------------------------------------------------


def test_the_longest_beginning_is_found_in_whole_blocks() -> None:
    """Only blocks that are full count, on both sides, and only as far as every stage has acknowledged them."""
    index = PrefixIndex()
    assert index.find(A) is None
    index.record(1, A, 31)
    assert index.find(A) is None
    index.record(1, A, 70)
    assert index.num_blocks(1) == 2
    assert index.find(A) == (1, 64)
    assert index.find(A[:64] + B) == (1, 64)
    assert index.find(A[:63] + B) == (1, 32)
    assert index.find(A[:50]) == (1, 32)
    assert index.find(B) is None
    # It grows as it is acknowledged.
    index.record(1, A, 96)
    assert index.find(A) == (1, 96)


def test_the_last_token_is_never_found() -> None:
    """Somebody must compute what comes after it."""
    index = PrefixIndex()
    index.record(1, A, 64)
    assert index.find(A[:64]) == (1, 32)
    assert index.find(A[:65]) == (1, 64)
    assert index.find(A[:32]) is None
    assert index.find(()) is None


def test_equal_blocks_of_another_adapter_are_others() -> None:
    index = PrefixIndex()
    index.record(1, A, 96, "red")
    assert index.find(A) is None
    assert index.find(A, "blue") is None
    assert index.find(A, "red") == (1, 96)
    index.record(2, A, 64)
    assert index.find(A) == (2, 64)


def test_equal_tokens_of_another_image_are_others() -> None:
    """Placeholders of images have one token id; a block whose last token begins an image has all of its digest."""
    index = PrefixIndex()
    cat, dog = ((ImageSpan(63, 1, 4, digit * 64),) for digit in "ab")
    index.record(1, A, 96, "", cat)
    assert index.find(A, "", cat) == (1, 96)
    assert index.find(A, "", dog) == (1, 32)
    assert index.find(A) == (1, 32)
    assert index.find(A, "", (ImageSpan(64, 1, 3, "a" * 64),)) == (1, 32)


def test_equal_blocks_at_other_positions_are_others() -> None:
    """What stands before a block is part of it: its keys and values depend on that."""
    index = PrefixIndex()
    index.record(1, A[:32] + A[:32] + A[:32], 96)
    assert index.find(A[:32] + B) == (1, 32)
    assert index.find(B[:32] + A) is None
    index.record(2, B[:32] + A[32:64], 64)
    assert index.find(B[:32] + A[32:64] + B) == (2, 64)
    index.forget(1)
    index.record(3, A[:32] + B[:32], 64)
    assert index.find(A[:64] + B) == (3, 32), "the second block is held by 2, behind another one"
    assert index.find(A[:32] + B) == (3, 64)


def test_of_several_holders_the_latest_is_named_and_forgetting_one_leaves_the_others() -> None:
    """A holder is redundant as long as another holds all that it holds."""
    index = PrefixIndex()
    index.record(1, A, 96)
    index.record(2, A, 64)
    assert index.find(A) == (1, 96)
    assert index.find(A[:70]) == (2, 64)
    assert (index.is_redundant(1), index.is_redundant(2), index.is_redundant(3)) == (False, True, True)
    index.forget(1)
    assert index.find(A) == (2, 64)
    assert not index.is_redundant(2)
    index.forget(2)
    assert index.find(A) is None
    index.forget(2)  # again is no error
    index.record(3, A, 64)
    index.clear()
    assert (index.find(A), index.num_blocks(3)) == (None, 0)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_longer_sequence_replaces_none_where_layers_keep_states() -> None:
    """Another sequence can begin at the end of an ended one, but not in the middle of a longer one."""
    index = PrefixIndex()
    for sequence, blocks in ((1, 2), (2, 3), (3, 2)):
        index.record(sequence, list(range(100)), blocks * BLOCK)
    assert index.is_redundant(1)
    assert not index.is_redundant(1, among=(2,))
    assert index.is_redundant(1, among=(2, 3))
    assert not index.is_redundant(1, among=(1, 2))


def cache(*ended: int, rules: PrefixRules = RECENT) -> PrefixCache:
    """These sequences have ended, in this order, each with two blocks of its own."""
    made = PrefixCache(rules)
    for sequence in ended:
        made.acknowledge(sequence, (sequence,) * 70, 70)
        assert made.retire(sequence, 99) == RetiredSequence(sequence, 2)
    return made


def test_eviction_takes_the_longest_unused_first_and_no_more_than_needed() -> None:
    """What was found just now goes last."""
    some = cache(1, 2, 3)
    assert some.num_blocks == 6
    assert some.find((1,) * 70) == (1, 64)
    assert list(some.evict(1, 0, SharedPositions())) == [2]
    assert list(some.evict(0, 0, SharedPositions())) == []
    assert list(some.evict(0, 1, SharedPositions())) == [3]
    assert list(some.evict(100, 100, SharedPositions())) == [1]
    assert (some.num_blocks, some.find((1,) * 70)) == (0, None)


def test_what_is_begun_from_often_is_kept_longest_where_that_is_the_policy() -> None:
    """Whoever holds the same beginning counts as used with it; of equal ones the longest unused goes first."""
    some = cache(1, 2, 3, rules=PrefixRules(policy="frequent"))
    some.acknowledge(4, (1,) * 70 + (9,) * 70, 128)
    assert some.retire(4, 99) is not None
    some.index.count_use(1)
    some.index.count_use(2)
    some.index.count_use(4)
    assert list(some.evict(1, 0, SharedPositions())) == [3]
    assert list(some.evict(1, 0, SharedPositions())) == [2]
    assert list(some.evict(1, 0, SharedPositions())) == [1]
    some.acknowledge(5, (2,) * 70, 70)
    assert some.index.num_uses(5) == 0
    assert some.index.num_uses(4) == 2


def test_no_more_than_its_share_is_kept() -> None:
    """Counted in blocks of all the room that there is."""
    some = cache(1, 2, 3, rules=PrefixRules(share=0.5))
    assert [some.excess_blocks(room, SharedPositions()) for room in (4, 10, 12, 100)] == [4, 1, 0, 0]


def test_what_is_pinned_stays() -> None:
    """As often as it was pinned, it must be let go of."""
    some = cache(1, 2)
    some.pin(1)
    some.pin(1)
    assert list(some.evict(100, 100, SharedPositions())) == [2]
    some.unpin(1)
    assert some.is_pinned(1)
    assert list(some.evict(100, 100, SharedPositions())) == []
    some.unpin(1)
    assert list(some.evict(100, 100, SharedPositions())) == [1]


def test_what_another_holds_too_is_not_kept() -> None:
    """Nothing is kept twice, nor what has no full block; but what somebody is about to copy from is."""
    some = cache()
    for sequence in (1, 2, 3):
        some.acknowledge(sequence, A, 64)
    some.acknowledge(4, B, 31)
    assert some.retire(4, 99) is None
    assert some.retire(1, 99) is None
    some.pin(2)
    assert some.retire(2, 99) == RetiredSequence(2, 2)
    assert some.retire(3, 99) is None
    assert some.find(A) == (2, 64)


def test_a_request_takes_over_no_more_than_the_limit() -> None:
    """In whole blocks: with a limit of 63 tokens, one of 32."""
    for limit, position in ((0, 64), (64, 64), (63, 32), (31, 0)):
        made = cache(1, rules=PrefixRules(max_tokens=limit))
        assert made.find((1,) * 70) == ((1, position) if position else None)


def test_a_cache_that_is_off_keeps_and_finds_nothing() -> None:
    """Whatever it is told."""
    off = PrefixCache(PrefixRules(is_enabled=False))
    off.acknowledge(1, A, 96)
    assert (off.find(A), off.retire(1, 99), off.num_blocks) == (None, None, 0)


# --- in the scheduler ------------------------------------------------------------------------------------------------


def opened(step: Step) -> list[tuple[int, int | None, int]]:
    """(sequence, begins as, up to)"""
    return [(o.sequence, o.source, o.shared) for o in step.open]


def test_a_sequence_begins_with_a_copy_of_one_that_runs(make_bench) -> None:
    """The same prompt again: its full blocks are copied, only the rest is computed."""
    bench = make_bench().serve(1)
    bench.say(submit("a", num_prompt=70))
    bench.finish()
    bench.say(submit("b", num_prompt=70))
    (step,) = steps(bench.finish())
    assert opened(step) == [(2, 1, 64)]
    assert row(step) == [(1, 71, 1), (2, 64, 6)]
    assert step.tokens[1:] == submit(num_prompt=70).prompt[64:]
    assert (bench.state.counters["prefix_hits"], bench.state.counters["prefix_positions"]) == (1, 64)
    bench.run_dry()
    assert {r.sequences[0].reason for r in bench.state.requests.values()} == {"length"}


def _cached(bench: Bench) -> dict[str, int]:
    """How much of its prompt each request was told to have been found, as its client hears of it."""
    ends = said(bench.log, Finished)
    return {end.request_id: end.num_cached for end in ends}  # type: ignore[union-attr]


def test_the_client_hears_how_much_of_its_prompt_was_found(make_bench) -> None:
    """Whole blocks, and never more than the prompt; nothing for the one that came first."""
    bench = make_bench().serve(1)
    for name in "ab":
        bench.say(submit(name, num_prompt=70, max_tokens=2))
        bench.run_dry()
    assert _cached(bench) == {"a": 0, "b": 64}


def test_what_was_never_copied_was_not_found(make_bench) -> None:
    """A new epoch came before the step that should have copied it: it is computed like any other prompt."""
    bench = _about_to_copy(make_bench)
    assert bench.sequence("b").num_cached == 32
    bench.lose("w0")
    bench.join("w1")
    bench.tick()
    bench.run_dry()
    assert bench.sequence("b").num_cached == 0


def test_the_first_token_is_journalled_with_the_cached_tokens(make_bench) -> None:
    """Once, for whoever reads the answer again."""
    bench = make_bench().serve(1)
    for name in "ab":
        bench.say(submit(name, num_prompt=70, max_tokens=2))
        bench.run_dry()
    written = [new for action in bench.log if isinstance(action, WriteTokens) for new in action.tokens]
    assert [(new.sequence, new.first, new.num_cached) for new in written] == [
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 64),
        (2, 1, 0),
    ]


def test_cached_tokens_are_those_of_the_first_time() -> None:
    """A sequence with a token comes in again by a copy that is never made."""
    request = Request(submit("b", num_prompt=70), None, 0.0, None)
    prompt = list(request.submit.prompt)
    sequence = Sequence(2, request, 0, 0, tokens=[*prompt, 7], limit=79, num_restored=1, num_cached=64)
    sequence.admit((1, 32))
    sequence.truncate_to(0)
    assert sequence.num_cached == 64


def test_an_ended_sequence_is_retired_and_copied_from(make_bench) -> None:
    """Its last step cuts it to its full blocks instead of releasing it; it counts as used room; who comes later begins
    with it. When that one ends, what the first still holds needs no second holder."""
    bench = make_bench().serve(1)
    bench.say(submit("a", num_prompt=70, max_tokens=2))
    bench.finish()
    (retiring,) = steps(bench.finish())
    assert (retiring.retire, retiring.release, retiring.rows) == ((SequencePosition(1, 64),), (), ())
    assert bench.state.prefix.num_blocks == 2
    bench.run_dry()
    bench.say(submit("b", num_prompt=70, max_tokens=2))
    step = bench.pipe[0]
    assert opened(step) == [(2, 1, 64)]
    bench.finish()
    (releasing,) = steps(bench.finish())
    assert (releasing.retire, releasing.release) == ((), (2,))


def test_retired_sequences_make_room(make_bench) -> None:
    """Who needs their room gets it: the step that opens the newcomer releases them first."""
    bench = make_bench().serve(1, kv_capacity=4 * BLOCK)
    bench.say(submit("a", num_prompt=70, max_tokens=1))
    bench.run_dry()
    assert list(bench.state.prefix.retired) == [1]
    bench.say(submit("b", prompt=B, max_tokens=8))
    step = bench.pipe[0]
    assert (step.release, opened(step)) == ((1,), [(2, None, 0)])


def test_an_ended_sequence_beyond_the_share_is_let_go(make_bench) -> None:
    """The share is for all that is kept: the longest unused makes room, and what is larger than all of it is released
    like any other."""
    bench = make_bench(settings(prefix=PrefixRules(share=0.25))).serve(1, kv_capacity=12 * BLOCK)
    bench.say(submit("a", num_prompt=70, max_tokens=1))
    bench.run_dry()
    assert list(bench.state.prefix.retired) == [1]
    bench.say(submit("b", prompt=B, max_tokens=1))
    bench.run_dry()
    assert list(bench.state.prefix.retired) == [2]
    bench.say(submit("long", num_prompt=150, max_tokens=1))
    bench.run_dry()
    assert list(bench.state.prefix.retired) == [2]
    assert 3 in [gone for step in steps(bench.log) for gone in step.release]


def test_a_copy_is_not_worth_the_sequences_own_room(make_bench) -> None:
    """If the source and the copy don't fit side by side, the source goes and the sequence is computed from its first
    token: it never waits for room that its own source takes."""
    bench = make_bench().serve(1, kv_capacity=4 * BLOCK)
    bench.say(submit("a", num_prompt=70, max_tokens=1))
    bench.run_dry()
    bench.say(submit("b", num_prompt=70, max_tokens=20))
    step = bench.pipe[0]
    assert (step.release, opened(step)) == ((1,), [(2, None, 0)])
    assert row(step) == [(2, 0, 90 - 20)]
    assert not bench.state.prefix._pins


def test_a_place_that_a_retired_one_holds_is_given_up(make_bench) -> None:
    """Places are room too."""
    bench = make_bench().serve(1, max_sequences=1)
    bench.say(submit("a", num_prompt=70, max_tokens=1))
    bench.run_dry()
    bench.say(submit("b", prompt=B))
    step = bench.pipe[0]
    assert (step.release, opened(step)) == ((1,), [(2, None, 0)])


def _about_to_copy(make_bench) -> Bench:
    """b is admitted, but not in a step yet (the budget was used up): its source is pinned."""
    bench = make_bench(scheduling(mode="batch", step_tokens=4, prefill_chunk=4)).serve(1)
    bench.say(submit("a", num_prompt=40, max_tokens=50, ignore_eos=True))
    while bench.sequence("a").kv < 40:
        bench.finish()
    bench.say(submit("long", prompt=B, max_tokens=2))
    bench.finish()
    bench.say(submit("b", num_prompt=40))
    bench.finish()
    assert bench.sequence("b").fork_of == 1
    assert bench.state.prefix.is_pinned(1)
    return bench


def test_a_new_epoch_pins_nothing(make_bench) -> None:
    """What was about to be copied is gone, as far as the broker knows: both are computed anew."""
    bench = _about_to_copy(make_bench)
    bench.lose("w0")
    bench.join("w1")
    bench.tick()
    assert not bench.state.prefix.is_pinned(1)
    bench.run_dry()
    assert {r.id: r.sequences[0].reason for r in bench.state.requests.values()} == dict.fromkeys(
        ("a", "b", "long"), "length"
    )


def test_who_ends_before_it_was_opened_lets_go_of_its_source(make_bench) -> None:
    """Cancelled before its first step: the source may go like any other."""
    bench = _about_to_copy(make_bench)
    bench.say(Cancel(request_id="b"))
    assert not bench.state.prefix.is_pinned(1)
    bench.run_dry()
    assert bench.sequence("a").reason == "length"


def test_a_new_epoch_forgets_all_beginnings(make_bench) -> None:
    """The stages drop what is not live: nothing is found, and nothing is pinned, until it is computed anew."""
    bench = make_bench().serve(1)
    bench.say(submit("a", num_prompt=70, max_tokens=1))
    bench.run_dry()
    assert bench.state.prefix.retired
    bench.join("w1")
    bench.tick()
    assert bench.epoch == 2
    prefix = bench.state.prefix
    assert (list(prefix.retired), prefix.num_blocks, prefix._pins) == ([], 0, {})
    bench.say(submit("b", num_prompt=70))
    step = bench.pipe[0]
    assert opened(step) == [(2, None, 0)]


# --- without any cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [256, 4])
def test_without_kv_every_token_computes_its_whole_sequence(make_bench, chunk: int) -> None:
    """``kv_cache`` off: for every token all that is known goes in again from position 0, cut to nothing before."""
    of = settings(
        scheduler=scheduling(kv_cache=False, prefill_chunk=chunk).scheduler, prefix=PrefixRules(is_enabled=False)
    )
    bench = make_bench(of).serve(1)
    bench.say(submit(num_prompt=6, max_tokens=3))
    known = list(submit(num_prompt=6).prompt)
    for number, token in enumerate((40, 41, 42)):
        sent: list[int] = []
        while len(sent) < len(known):
            step = bench.pipe[0]
            ((_, start, count),) = row(step)
            assert start == len(sent)
            cut = (SequencePosition(1, 0),) if number and not start else ()
            assert (step.truncate, step.rows[0].sample) == (cut, start + count == len(known))
            sent.extend(step.tokens)
            bench.finish(token=token)
        assert sent == known
        known.append(token)
    assert bench.sequence().tokens == known
    assert bench.sequence().reason == "length"


def test_a_sequence_that_is_about_to_be_copied_stays_whatever_the_limit() -> None:
    """A step that opens its copy is still to be sent."""
    some = PrefixCache(PrefixRules(share=0.05))
    for sequence in (1, 2):
        some.acknowledge(sequence, A, 96)
    some.pin(1)
    assert some.retire(2, 20) is None
    assert some.retire(1, 20) == RetiredSequence(1, 3)
    assert list(some.evict(some.excess_blocks(20, SharedPositions()), 0, SharedPositions())) == []
    some.unpin(1)
    assert list(some.evict(some.excess_blocks(20, SharedPositions()), 0, SharedPositions())) == [1]

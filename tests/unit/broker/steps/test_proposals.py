"""Proposed tokens: which steps carry them, and what counts when they are accepted or refused."""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field

import pytest
from msgspec import UNSET, structs

from swarm.broker.actions import AskDraft, WriteTokens
from swarm.broker.events import DraftMessageReceived, StepFinished
from swarm.broker.speculation.proposer import ProposerName
from swarm.broker.state import Sequence
from swarm.broker.state.moves import DecodeLoad
from swarm.testing import fake_manifest
from swarm.wire.draft_messages import DraftLoaded
from swarm.wire.messages import BLOCK, Finished, ProposedTail, Sampled, SequencePosition, Step, Tokens
from tests.unit.broker.bench import Bench, row, said, scheduling, settings, steps, submit, verified

ANSWER = list(range(40, 60))


@dataclass
class Oracle:
    """A proposer that proposes what a test wants: the next tokens of ``script``, by position in the answer."""

    script: TokenSequence[int] = ()
    num_tokens: int = 3
    asked: list[tuple[int, int]] = field(default_factory=list)  # (sequence, most)
    name: ProposerName = "suffix"

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.asked.append((sequence.id, most))
        first = sequence.num_generated
        return tuple(self.script[first : first + min(self.num_tokens, most)])

    def forget(self, sequence: int) -> None:
        pass


def decode(bench: Bench, *requests: str, **fields: object) -> Step:
    """Submit requests and compute their prompts; return the first step of their answers."""
    for request in requests or ("r",):
        bench.say(submit(request, **({"max_tokens": 20} | fields)))
    answers = dict.fromkeys(bench.state.sequences, ANSWER)
    while all(r.count != 1 and r.start == 0 for r in bench.pipe[0].rows):
        bench.verify(answers)
    return bench.pipe[0]


def written(actions: object) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(t.sequence, t.position, t.ids) for a in actions if isinstance(a, WriteTokens) for t in a.tokens]  # type: ignore[attr-defined]


def test_accepted_tokens_come_in_one_step_and_need_no_truncation(make_bench) -> None:
    """Three proposals and the token after them: the next step goes on behind, and the journal gets one record."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    step = decode(bench)
    assert (row(step), step.tokens, step.proposed) == ([(1, 3, 4)], (40, 41, 42, 43), (ProposedTail(1, 3),))
    actions = bench.verify({1: ANSWER})
    assert written(actions) == [(1, 4, (41, 42, 43, 44))]
    (after,) = steps(actions)
    assert (row(after), after.tokens, after.truncate) == ([(1, 7, 4)], (44, 45, 46, 47), ())
    assert bench.sequence().kv == 7


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_refused_tokens_are_truncated_by_the_next_step(make_bench, num_right: int) -> None:
    script = [*ANSWER[: 1 + num_right], 9, 9, 9, 9]
    bench = make_bench(proposers=(Oracle(script),)).serve(1)
    decode(bench)
    actions = bench.verify({1: ANSWER})
    assert written(actions) == [(1, 4, tuple(ANSWER[1 : 2 + num_right]))]
    (after,) = steps(actions)
    position = 4 + num_right
    assert after.truncate == (SequencePosition(1, position),)
    assert after.rows[0].start == position
    assert after.tokens[0] == ANSWER[1 + num_right]
    counters = bench.state.counters
    assert (counters["proposed_tokens"], counters["accepted_tokens"]) == (3, num_right)


def test_refused_tokens_are_no_throughput(make_bench) -> None:
    """Whether three of four positions are accepted or none: the rate counts what the answer gains."""
    rates = []
    for script in (ANSWER, [40, *[9] * 19]):
        bench = make_bench(proposers=(Oracle(script),)).serve(1)
        bench.say(submit(max_tokens=9))
        while bench.pipe:
            bench.now += 0.1
            bench.verify({1: ANSWER})
        rates.append(bench.state.costs.tokens_per_s)
    # a prompt of 3; then 4 + 4 tokens, or one in each of 8 steps
    assert rates == [pytest.approx(11 / 0.3, rel=0.05), pytest.approx(11 / 0.9, rel=0.1)]


def test_steps_with_proposals_measure_a_plan(make_bench) -> None:
    """By rows: how many guesses are right depends on the text, not on the plan."""
    bench = make_bench(proposers=(Oracle(ANSWER * 20),)).serve(1)
    bench.say(submit(max_tokens=200))
    while bench.pipe:
        bench.now += 0.1
        bench.verify({1: ANSWER * 20})
    assert bench.state.moves.rates.rows_per_s() == {DecodeLoad(1, 2): pytest.approx(10.0)}


def test_proposals_keep_a_step_within_its_target(make_bench) -> None:
    """A position takes 10 ms: a step of four is allowed within 45 ms, and none with proposals within 5 ms."""
    sizes = []
    for target_s in (0.0, 0.045, 0.005):
        bench = make_bench(scheduling(step_target_s=target_s), proposers=(Oracle(ANSWER, num_tokens=9),)).serve(1)
        bench.say(submit(num_prompt=1, max_tokens=20))
        sizes.append([])
        while bench.sequence().reason is None:
            sizes[-1].append(len(bench.pipe[0].tokens))
            bench.now += 0.01 * sizes[-1][-1]
            bench.verify({1: ANSWER})
    assert sizes == [[1, 10, 9], [1, 4, 4, 4, 4, 3], [1] * 20]


def test_a_step_without_a_guess_says_nothing_of_proposals(make_bench) -> None:
    bench = make_bench(proposers=(Oracle(()),)).serve(1)
    assert decode(bench).proposed is UNSET


def test_the_whole_answer_is_the_same_whatever_is_proposed(make_bench) -> None:
    """Also its end: an answer stops where it would, whatever follows in the same step."""
    told = []
    for script in ((), ANSWER, [40, 41, 9, 43, 44, 9, 46, 47, 48, 49, 50]):
        for stop in ((), (45,)):
            bench = make_bench(proposers=(Oracle(script, num_tokens=4),)).serve(1)
            decode(bench, max_tokens=10, stop_token_ids=stop)
            while bench.sequence().reason is None:
                bench.verify({1: ANSWER})
            ids = [token for m in said(bench.log, Tokens) for token in m.ids]  # type: ignore[attr-defined]
            (end,) = said(bench.log, Finished)
            told.append((stop, ids, structs.asdict(end)["reason"]))
    assert told[:2] == [((), ANSWER[:10], "length"), ((45,), ANSWER[:6], "stop")]
    assert told[2:4] == told[4:6] == told[:2]


def test_no_more_is_proposed_than_the_answer_may_still_have(make_bench) -> None:
    """With two tokens left, one guess: the token after it is the last."""
    oracle = Oracle(ANSWER, num_tokens=9)
    bench = make_bench(proposers=(oracle,)).serve(1)
    step = decode(bench, max_tokens=3)
    assert (row(step), oracle.asked) == ([(1, 3, 2)], [(1, 1)])
    bench.verify({1: ANSWER})
    assert bench.sequence().tokens[3:] == ANSWER[:3]


def test_a_step_has_no_more_tokens_than_it_may(make_bench) -> None:
    bench = make_bench(scheduling(step_tokens=6), proposers=(Oracle(ANSWER, num_tokens=9),)).serve(1)
    step = decode(bench)
    assert row(step) == [(1, 3, 6)]


def test_nothing_is_proposed_without_kept_keys_and_values(make_bench) -> None:
    oracle = Oracle(ANSWER)
    bench = make_bench(scheduling(kv_cache=False), proposers=(oracle,)).serve(1)
    bench.say(submit("r", max_tokens=3))
    bench.run_dry()
    assert oracle.asked == []


def test_an_older_stage_gets_no_proposals(make_bench) -> None:
    oracle = Oracle(ANSWER)
    bench = make_bench(proposers=(oracle,))
    bench.add("w0")
    bench.tell("w0", bench.workers["w0"].hello(wire_versions=(3,)))
    bench.tick()
    bench.tick()
    assert bench.state.plans.is_serving
    assert decode(bench).proposed is UNSET
    assert oracle.asked == []


def test_nothing_is_proposed_where_a_rows_bits_depend_on_its_batch(make_bench) -> None:
    """Not even by a draft model: the sequence waits for none."""
    for kernels, expected in (("linears mkl; float32, exact", True), ("linears mkl; bfloat16, inexact", False)):
        bench = make_bench(settings(has_draft=True), proposers=(Oracle(ANSWER),)).serve(2, kernels=kernels)
        bench.feed(DraftMessageReceived(DraftLoaded("small", fake_manifest().vocab_size, 512, (), 1000, 0.5)))
        bench.say(submit("r", max_tokens=20))
        bench.verify({1: ANSWER})
        assert any(isinstance(action, AskDraft) for action in bench.log) is expected
        if not expected:
            assert (row(bench.pipe[0]), bench.pipe[0].proposed) == ([(1, 3, 1)], UNSET)


def test_proposals_take_free_blocks_only_and_give_them_back(make_bench) -> None:
    """A sequence with 30 of 32 positions in its block borrows a second block for three guesses; when they are refused,
    it is free again."""
    bench = make_bench(scheduling(kv_headroom=0), proposers=(Oracle([40, *[9] * 20]),)).serve(1)
    decode(bench, num_prompt=BLOCK - 3)
    assert bench.sequence().blocks == 2
    bench.verify({1: ANSWER})
    # the second guesses lie beyond the block as well; without them the sequence has one
    flight = next(iter(bench.state.in_flight.values()))
    assert flight.proposals[1].blocks == 1


def test_without_free_blocks_guesses_stay_within_the_own_block(make_bench) -> None:
    oracle = Oracle(ANSWER, num_tokens=9)
    bench = make_bench(scheduling(kv_headroom=0), proposers=(oracle,)).serve(1, kv_capacity=BLOCK)
    decode(bench, num_prompt=BLOCK - 6, max_tokens=6)
    assert oracle.asked[0] == (1, 4)


def test_tokens_beyond_the_verified_ones_are_dropped(make_bench) -> None:
    """A last stage that returns more than the guesses allow gains nothing."""
    bench = make_bench(proposers=(Oracle([40, 41, 9, 9]),)).serve(1)
    step = decode(bench)
    honest = verified(step, bench.state, {1: ANSWER})
    bench.pipe.clear()
    lie = structs.replace(honest, sampled=(*honest.sampled, Sampled(1, 6, 43, ()), Sampled(1, 7, 44, ())))
    bench.feed(StepFinished(lie))
    assert bench.sequence().tokens[3:] == [40, 41, 42]
    assert bench.state.counters["misplaced_tokens"] == 2


def test_a_second_token_without_guesses_is_dropped(make_bench) -> None:
    bench = make_bench().serve(1)
    bench.say(submit("r"))
    step = bench.pipe.popleft()
    done = verified(step, bench.state, {1: ANSWER})
    bench.feed(StepFinished(structs.replace(done, sampled=(*done.sampled, Sampled(1, 4, 41, ())))))
    assert bench.sequence().num_generated == 1
    assert bench.state.counters["misplaced_tokens"] == 1


def test_a_postponed_draw_clears_the_guesses(make_bench) -> None:
    """The grammar is not compiled yet: nothing is drawn, and the last position is sent again."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    step = decode(bench)
    bench.pipe.clear()
    done = verified(step, bench.state, {1: ANSWER})
    late = structs.replace(done, kv=(SequencePosition(1, 4),), sampled=(), late=(1,))
    (again,) = steps(bench.feed(StepFinished(late)))
    assert (again.rows[0].start, again.truncate) == (3, (SequencePosition(1, 3),))
    assert "proposed_tokens" not in bench.state.counters


def test_a_dead_worker_clears_the_guesses(make_bench) -> None:
    """The new plan starts from what was verified."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(2)
    decode(bench)
    bench.verify({1: ANSWER})
    assert bench.sequence().scheduled == 8
    bench.lose("w1")
    assert [(r.start, r.count) for r in bench.pipe[0].rows] == [(7, 4)]
    while bench.sequence().reason is None:
        bench.verify({1: ANSWER})
    assert bench.sequence().tokens[3:] == ANSWER


def test_tokens_of_a_preempted_sequence_still_count(make_bench) -> None:
    """The step with its guesses was in flight when it lost its blocks: all verified tokens stay."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    step = decode(bench)
    bench.state.preempt(bench.sequence())
    assert bench.sequence().proposed == []
    actions = bench.verify({1: ANSWER}, step)
    assert written(actions) == [(1, 4, (41, 42, 43, 44))]
    (again,) = [s for s in steps(actions) if s.rows]
    assert row(again) == [(1, 0, 8)]


def test_a_newer_step_draws_what_an_older_one_has_drawn(make_bench) -> None:
    """A sequence was preempted and admitted again while its step was in flight; the new step carries guesses. The old
    step's tokens must not settle them."""
    bench = make_bench(settings(), proposers=(Oracle(ANSWER),)).serve(2)
    old = decode(bench)
    flight = bench.state.in_flight[old.step]
    flight.residencies[1] -= 1  # as if the sequence had been preempted since
    bench.verify({1: ANSWER}, old)
    assert bench.sequence().proposed == ANSWER[1:4]
    assert bench.sequence().tokens[3:] == ANSWER[:1]
    assert bench.state.counters["late_tokens"] == 4


def test_accepted_positions_enter_the_prefix_cache(make_bench) -> None:
    """An answer that ends in the step that verified it leaves all of its blocks to others."""
    bench = make_bench(proposers=(Oracle(ANSWER, num_tokens=9),)).serve(1)
    decode(bench, num_prompt=BLOCK - 4, max_tokens=6)
    bench.verify({1: ANSWER})
    assert bench.sequence().reason == "length"
    assert [r.num_blocks for r in bench.state.prefix.retired.values()] == [1]


def test_a_guess_ends_before_a_token_that_no_stage_could_compute(make_bench) -> None:
    bench = make_bench(proposers=(Oracle([40, 41, 1 << 20, 43]),)).serve(1)
    step = decode(bench)
    assert (step.tokens, step.proposed) == ((40, 41), (ProposedTail(1, 1),))


def test_a_guess_is_cut_to_what_was_asked_for(make_bench) -> None:
    class TooLong(Oracle):
        def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
            return tuple(ANSWER[sequence.num_generated :])

    bench = make_bench(scheduling(step_tokens=6), proposers=(TooLong(),)).serve(1)
    assert decode(bench).tokens == tuple(ANSWER[:6])


def test_blocks_of_refused_guesses_are_free_in_the_stages_before_others_get_them(
    make_bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step cuts a sequence that gave blocks back, even if it has no row in it."""
    bench = make_bench(scheduling(kv_headroom=0), proposers=(Oracle([40, *[9] * 20]),)).serve(1)
    step = decode(bench, "a", "b", num_prompt=BLOCK - 1)
    assert {r.sequence for r in step.rows} == {1, 2}
    assert bench.sequence("a").blocks == 2
    monkeypatch.setattr("swarm.broker.speculation.speculation.Speculation.is_waiting", lambda _, s, now: s.id == 1)
    (after,) = steps(bench.verify({1: ANSWER, 2: ANSWER}))
    assert {r.sequence for r in after.rows} == {2}
    assert bench.sequence("a").blocks == 1
    assert SequencePosition(1, bench.sequence("a").kv) in after.truncate


def test_nothing_is_proposed_for_suspects(make_bench) -> None:
    """Their steps must show what fails: a request, or a worker."""
    oracle = Oracle(ANSWER)
    bench = make_bench(proposers=(oracle,)).serve(1)
    decode(bench)
    bench.state.evidence.suspects = frozenset([1])
    oracle.asked.clear()
    (after,) = steps(bench.verify({1: ANSWER}))
    assert (row(after), after.proposed, oracle.asked) == ([(1, 7, 1)], UNSET, [])


def test_a_draw_that_is_withheld_is_made_again(make_bench) -> None:
    """A last stage accepts all proposed tokens and returns none after them: the last position is sent once more."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    step = bench.pipe.popleft() if decode(bench) else None
    assert step is not None
    done = verified(step, bench.state, {1: ANSWER})
    (after,) = steps(bench.feed(StepFinished(structs.replace(done, sampled=done.sampled[:3]))))
    assert after.rows[0].start == 6
    assert after.tokens[0] == ANSWER[3]


def test_guesses_stay_within_the_own_block_while_another_has_the_rest(make_bench) -> None:
    oracle = Oracle(ANSWER, num_tokens=9)
    bench = make_bench(scheduling(kv_headroom=0), proposers=(oracle,)).serve(1, kv_capacity=3 * BLOCK)
    bench.say(submit("a", num_prompt=BLOCK - 6, max_tokens=20))
    bench.say(submit("b", num_prompt=BLOCK + 2, max_tokens=20))
    while not oracle.asked:
        bench.verify({1: ANSWER, 2: ANSWER})
    assert bench.state.reserved_blocks == 3
    assert {sequence: most for sequence, most in oracle.asked if sequence == 1} == {1: 5}


def test_proposed_tokens_behind_the_end_are_dropped(make_bench) -> None:
    """A last stage has drawn them all the same."""
    bench = make_bench(proposers=(Oracle(ANSWER, num_tokens=5),)).serve(1)
    decode(bench, stop_token_ids=(42,))
    bench.verify({1: ANSWER})
    assert bench.sequence().tokens[3:] == [40, 41, 42]
    assert bench.sequence().reason == "stop"
    assert bench.state.counters.get("misplaced_tokens", 0) == 0


def test_nobody_is_preempted_while_blocks_are_borrowed(make_bench) -> None:
    """A request of a higher class waits for the step with guesses, and finds the blocks free."""
    oracle = Oracle([40, *[9] * 20], num_tokens=3)
    options = scheduling(kv_headroom=0, mode="overlapped")
    bench = make_bench(options, proposers=(oracle,)).serve(2, kv_capacity=3 * BLOCK)
    decode(bench, "low", num_prompt=BLOCK - 1)
    assert bench.state.borrowed_blocks == 1
    bench.say(submit("high", num_prompt=2 * BLOCK - 4, max_tokens=3, priority=50))
    assert bench.sequence("low").num_preempted == 0
    assert not bench.sequence("high").blocks
    bench.verify({1: ANSWER, 2: ANSWER})
    assert bench.sequence("high").blocks == 2
    assert bench.sequence("low").num_preempted == 0


def test_positions_of_proposals_count_as_decodes_in_predictions(make_bench) -> None:
    """Four positions through the layers, and as many through the head."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    step = decode(bench)
    shape = bench.state.plans.gauge._shapes[step.step]
    assert (shape.decodes, shape.positions, shape.heads, shape.decode_context) == (4, 0, 4, 3 + 4 + 5 + 6)


def test_a_deadline_that_accepted_guesses_can_meet_is_not_given_up(make_bench) -> None:
    """Steps take a second, and have given four tokens each."""
    bench = make_bench(proposers=(Oracle(ANSWER),)).serve(1)
    bench.say(submit("first", max_tokens=10))
    for _ in range(4):
        bench.tick(1.0)
        bench.verify({1: ANSWER})
    assert bench.state.costs.min_step_s == pytest.approx(1.0, rel=0.05)
    bench.run_dry()
    bench.say(submit("never", max_tokens=40, ignore_eos=True, deadline_s=4.0))
    assert bench.sequence("never").reason == "failed"
    bench.say(submit("soon", max_tokens=8, ignore_eos=True, deadline_s=4.0))
    assert bench.sequence("soon").reason is None


def test_a_step_that_gave_many_tokens_long_ago_promises_nothing(make_bench) -> None:
    """Since then, guesses were wrong: an answer takes a step for each token."""
    script = [*ANSWER[:5], *[9] * 300]
    bench = make_bench(proposers=(Oracle(script),)).serve(1)
    bench.say(submit("first", max_tokens=240))
    while bench.pipe:
        bench.tick(1.0)
        bench.verify({1: ANSWER * 20})
    bench.say(submit("late", max_tokens=8, ignore_eos=True, deadline_s=4.0))
    assert bench.sequence("late").reason == "failed"

"""Proposals of a draft model: what is asked for, how long sequences wait, and what a bad draft model can't do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from msgspec import structs

from swarm.broker.actions import Action, AskDraft, StopDraft, WriteLog
from swarm.broker.events import DraftGone, DraftMessageReceived, StepFinished, WaitExpired
from swarm.broker.speculation import drafts
from swarm.broker.speculation.drafts import (
    FIRST_WAIT_S,
    MAX_WAIT_S,
    PROBE_DEPTH,
    PROBE_EVERY,
    Drafts,
    refusal,
    vocabulary_difference,
)
from swarm.params import Grammar
from swarm.testing import fake_manifest
from swarm.wire.draft_messages import (
    CATCH_UP,
    AskProposals,
    CaughtUp,
    DraftedTokens,
    DraftLoaded,
    DraftOpening,
    Dropped,
    Proposals,
    encode_frame,
)
from swarm.wire.messages import Asset, Cancel, ForcedTokens, ProposedTail, Step
from tests.unit.broker.bench import Bench, row, settings, steps, submit, verified

ANSWER = [40 + number % 50 for number in range(400)]
VOCABULARY = fake_manifest().vocab_size


def loaded(vocab_size: int = VOCABULARY, assets: tuple[Asset, ...] = ()) -> DraftLoaded:
    return DraftLoaded("small", vocab_size, 512, assets, 1000, 0.5)


class DraftBench:
    """A swarm of one worker with a draft model that a test plays. A step takes ``step_s``, an answer ``answer_s``."""

    def __init__(self, bench: Bench, *, step_s: float = 0.02, answer_s: float = 0.004) -> None:
        self.bench = bench
        self.step_s, self.answer_s = step_s, answer_s
        self._num_seen = 0

    @property
    def drafts(self) -> Drafts:
        assert self.bench.core.drafts is not None
        return self.bench.core.drafts

    @property
    def wait_s(self) -> float:
        """How long sequences still wait."""
        return self.bench.core.wake_at - self.bench.now

    def expire(self) -> list[Action]:
        """Let the time come that the core wants to be woken at."""
        self.bench.now = self.bench.core.wake_at
        return self.bench.feed(WaitExpired())

    def load(self, message: DraftLoaded | None = None) -> list[Action]:
        return self.bench.feed(DraftMessageReceived(message or loaded()))

    def decode(self, *requests: str, **fields: object) -> None:
        """Submit requests and compute their prompts, until the first tokens of all are due. Requests to the draft model
        get empty answers, but for the last one."""
        for request in requests or ("r",):
            self.bench.say(submit(request, **({"max_tokens": 300} | fields)))
        while any(s.num_generated == 0 for s in self.bench.state.sequences.values()) or self._asks_for_some():
            if self._asks_for_some():
                self.answer(self.asked, lambda *_: ())
            else:
                self.finish()
        self.requests(before_last=True)

    @property
    def asked(self) -> AskProposals:
        """The last request."""
        return [action for action in self.bench.log if isinstance(action, AskDraft)][-1].request

    def _asks_for_some(self) -> bool:
        """Whether the request under way is not for all sequences."""
        request = self.drafts._request
        return request is not None and request.sequences.keys() != self.bench.state.sequences.keys()

    def finish(self) -> list[Action]:
        """Complete the oldest step, which draws the sequences' answers."""
        self.bench.now += self.step_s
        return self.bench.verify(dict.fromkeys(self.bench.state.sequences, ANSWER))

    def take(self) -> AskProposals:
        """Return the only request that was sent since the last call."""
        (ask,) = self.requests()
        return ask.request

    def requests(self, *, before_last: bool = False) -> list[AskDraft]:
        """Return the requests that were sent since the last call; ``before_last``: leave the last one for the next."""
        sent = [n for n, action in enumerate(self.bench.log) if n >= self._num_seen and isinstance(action, AskDraft)]
        self._num_seen = sent[-1] if before_last and sent else len(self.bench.log)
        return [action for n in sent if isinstance(action := self.bench.log[n], AskDraft)]

    def answer(self, request: AskProposals, guess: Callable[[int, int], Sequence[int]], **more: object) -> list[Action]:
        """Answer with tokens: ``guess`` names those of a sequence from a position in its answer on."""
        self.bench.now += self.answer_s
        drafted = []
        for asked in request.sequences:
            start = asked.start + len(asked.tokens)
            tokens = tuple(guess(asked.sequence, start - 3))[: asked.most]
            drafted.append(DraftedTokens(asked.sequence, start, tokens, (-0.1,) * len(tokens)))
        message = Proposals(request.number, tuple(drafted), passes=4, seconds=self.answer_s * 0.75, **more)  # type: ignore[arg-type]
        return self.bench.feed(DraftMessageReceived(message))

    def cycle(self, guess: Callable[[int, int], Sequence[int]] | None = None) -> Step:
        """Answer the request, if there is one, and return the step that follows."""
        for ask in self.requests():
            self.answer(ask.request, guess or right)
        (step,) = self.bench.pipe
        return step


def right(sequence: int, index: int) -> list[int]:
    return ANSWER[index : index + 4]


def wrong(sequence: int, index: int) -> list[int]:
    return [ANSWER[index] + 1] * 4


@pytest.fixture
def swarm(make_bench) -> DraftBench:
    bench = DraftBench(make_bench(settings(has_draft=True)).serve(1))
    bench.load()
    return bench


def test_a_request_brings_the_sequence_and_its_parameters(swarm: DraftBench) -> None:
    swarm.decode(temperature=0.7, seed=5)
    request = swarm.take()
    (asked,) = request.sequences
    sequence = swarm.bench.sequence()
    assert (asked.sequence, asked.start, asked.tokens) == (1, 0, (1, 2, 3, 40))
    params = sequence.request.submit.params
    assert asked.opening == DraftOpening(params, sequence.seed, 3, sequence.limit)
    assert not swarm.bench.pipe  # the sequence waits


def test_a_step_carries_what_was_drafted_and_the_next_request_what_was_drawn(swarm: DraftBench) -> None:
    swarm.decode()
    (step,) = steps(swarm.answer(swarm.take(), right))
    assert (row(step), step.tokens, step.proposed) == ([(1, 3, 5)], (40, 41, 42, 43, 44), (ProposedTail(1, 4),))
    swarm.finish()
    (asked,) = swarm.take().sequences
    assert (asked.start, asked.tokens, asked.opening) == (4, (41, 42, 43, 44, 45), None)
    assert swarm.bench.state.counters["accepted_tokens"] == 4


def test_sequences_of_a_step_wait_for_one_request_and_share_the_next_step(swarm: DraftBench) -> None:
    swarm.decode("a", "b", "c")
    request = swarm.take()
    assert [asked.sequence for asked in request.sequences] == [1, 2, 3]
    (step,) = steps(swarm.answer(request, right))
    assert [r.count for r in step.rows] == [5, 5, 5]


def test_with_one_step_in_flight_another_waits_with_one_that_waits(swarm: DraftBench) -> None:
    """A prompt that comes meanwhile joins its step instead of being computed before it."""
    swarm.decode("a")
    assert not steps(swarm.bench.say(submit("b")))
    (step,) = steps(swarm.answer(swarm.take(), right))
    assert row(step) == [(1, 3, 5), (2, 0, 3)]


def test_one_sequence_that_waits_does_not_stop_several(swarm: DraftBench) -> None:
    """Its proposal arrives meanwhile, and it joins the next step."""
    swarm.decode("a")
    for request in ("b", "c"):
        swarm.bench.say(submit(request, speculation="off", max_tokens=9))
    swarm.answer(swarm.take(), right)
    (step,) = steps(swarm.finish())
    assert row(step) == [(2, 3, 1), (3, 3, 1)]
    assert not steps(swarm.answer(swarm.take(), right))  # one step is in flight
    (step,) = steps(swarm.finish())
    assert row(step) == [(1, 8, 5), (2, 4, 1), (3, 4, 1)]


def test_a_wait_ends_with_its_sequence(swarm: DraftBench) -> None:
    """Two of four sequences wait. When one of them ends, the others go on at once."""
    swarm.decode("a", "b")
    for request in ("c", "d"):
        swarm.bench.say(submit(request, speculation="off", max_tokens=9))
    swarm.answer(swarm.take(), right)
    assert not steps(swarm.finish())
    (step,) = steps(swarm.bench.say(Cancel(request_id="b")))
    assert [r.sequence for r in step.rows] == [3, 4]


def test_a_sequence_whose_next_tokens_are_certain_waits_for_no_draft(make_bench) -> None:
    swarm = DraftBench(make_bench(settings(has_draft=True)).serve(1))
    swarm.load()
    swarm.bench.say(submit(max_tokens=300))
    while not swarm.bench.sequence().num_generated:
        swarm.bench.now += swarm.step_s
        step = swarm.bench.pipe.popleft()
        done = structs.replace(verified(step, swarm.bench.state, {1: ANSWER}), forced=(ForcedTokens(1, (41, 42)),))
        (step,) = steps(swarm.bench.feed(StepFinished(done)))
    assert step.tokens == (40, 41, 42)
    assert not swarm.requests()


def test_without_an_answer_a_sequence_goes_on_at_its_deadline(swarm: DraftBench) -> None:
    swarm.decode()
    assert swarm.requests()
    assert swarm.wait_s == pytest.approx(FIRST_WAIT_S)
    (step,) = steps(swarm.expire())
    assert swarm.bench.core.wake_at == math.inf
    assert row(step) == [(1, 3, 1)]
    swarm.finish()
    assert not swarm.requests()  # the process is still busy: nobody waits for it
    assert row(swarm.bench.pipe[0]) == [(1, 4, 1)]
    assert swarm.bench.state.counters["draft_overdue"] == 1


def test_a_wait_that_has_ended_wakes_nobody_again(make_bench) -> None:
    """Also where other steps are in flight, and none can be formed."""
    swarm = DraftBench(make_bench(settings(has_draft=True)).serve(1))
    swarm.load()
    swarm.decode("a")
    swarm.expire()
    assert swarm.bench.pipe
    assert swarm.bench.core.wake_at == math.inf


def test_a_late_answer_is_used_as_far_as_it_was_right(swarm: DraftBench) -> None:
    swarm.decode()
    (ask,) = swarm.requests()
    swarm.expire()
    swarm.answer(ask.request, right)  # 41 to 44; the step under way draws 41
    (step,) = steps(swarm.finish())
    assert step.tokens == (41, 42, 43, 44)
    assert not swarm.requests()


def test_the_deadline_follows_the_measured_times(swarm: DraftBench) -> None:
    swarm.decode()
    for _ in range(6):
        swarm.cycle()
        swarm.finish()
    assert swarm.requests()
    assert swarm.answer_s < swarm.wait_s < FIRST_WAIT_S
    assert swarm.drafts.costs.expected_s(4) == pytest.approx(swarm.answer_s)
    assert swarm.wait_s <= MAX_WAIT_S


def test_the_death_of_the_process_ends_all_waits_and_another_one_gets_everything(swarm: DraftBench) -> None:
    swarm.decode()
    swarm.cycle()
    swarm.finish()
    assert swarm.take().sequences[0].start == 4
    (step,) = steps(swarm.bench.feed(DraftGone("killed", is_final=False)))
    assert row(step) == [(1, 8, 1)]
    assert swarm.drafts.report()["state"] == "gone"
    swarm.finish()
    assert not swarm.requests()
    swarm.load()
    swarm.finish()
    (asked,) = swarm.take().sequences
    assert (asked.start, len(asked.tokens)) == (0, 11)
    assert asked.opening is not None


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_what_a_lying_process_sends_changes_no_answer(swarm: DraftBench, num_right: int) -> None:
    """Wrong tokens, tokens that the model does not have, other sequences, other positions, other requests."""
    swarm.decode()
    for number in count():
        if swarm.bench.sequence().num_generated >= 60:
            break
        for ask in swarm.requests():
            request, start = ask.request, swarm.bench.sequence().sampled
            lies = (
                DraftedTokens(1, start + number % 3, (3, 4), (-1.0,) * (number % 4)),
                DraftedTokens(77, start, (3,), (0.0,)),
                DraftedTokens(
                    1, start, (*ANSWER[start - 3 :][:num_right], VOCABULARY + number), (-9.0,) * (num_right + 1)
                ),
            )
            swarm.bench.feed(DraftMessageReceived(Proposals(request.number + 5, lies)))
            swarm.bench.now += swarm.answer_s
            swarm.bench.feed(
                DraftMessageReceived(Proposals(request.number, lies, (77,), (78,), (79,), (81,), 1, 0.001))
            )
            swarm.bench.feed(DraftMessageReceived(CaughtUp(80)))
        swarm.finish()
    assert swarm.bench.sequence().tokens[3:63] == ANSWER[:60]
    assert swarm.bench.state.counters["draft_errors"] > 0


def test_an_answer_to_another_request_counts_for_nothing(swarm: DraftBench) -> None:
    """The sequence goes on waiting, and gets the proposal that it asked for."""
    swarm.decode()
    request = swarm.take()
    other = structs.replace(request, number=request.number + 1)
    assert steps(swarm.answer(other, wrong)) == []
    assert swarm.bench.state.counters["draft_errors"] == 1
    (step,) = steps(swarm.answer(request, right))
    assert step.tokens == (40, 41, 42, 43, 44)


@pytest.mark.parametrize("shift", [-1, 1])
def test_tokens_of_another_position_are_not_proposed(swarm: DraftBench, shift: int) -> None:
    swarm.decode()
    request = swarm.take()
    drafted = DraftedTokens(1, 4 + shift, tuple(ANSWER[1 + shift : 5]), (-0.1,) * (4 - shift))
    (step,) = steps(swarm.bench.feed(DraftMessageReceived(Proposals(request.number, (drafted,)))))
    assert (step.tokens, step.proposed or ()) == ((40,), ())


def test_what_an_answer_has_overtaken_is_not_proposed(swarm: DraftBench) -> None:
    """The answer is late, and the sequence has gone on otherwise: nothing of it is right."""
    swarm.decode()
    request = swarm.take()
    swarm.expire()
    swarm.answer(request, wrong)
    swarm.finish()
    assert swarm.drafts.propose(swarm.bench.sequence(), 4) == ()


def test_tokens_that_the_swarms_model_lacks_are_not_proposed(swarm: DraftBench) -> None:
    swarm.decode()
    (step,) = steps(swarm.answer(swarm.take(), lambda *_: [41, VOCABULARY, 43]))
    assert step.tokens == (40, 41)


def test_a_sequence_that_is_behind_is_not_waited_for_until_it_has_caught_up(swarm: DraftBench) -> None:
    swarm.decode(num_prompt=CATCH_UP + 10)
    (ask,) = swarm.requests()
    assert swarm.bench.core.wake_at == math.inf
    assert len(swarm.bench.pipe) == 1  # it goes on
    swarm.bench.feed(DraftMessageReceived(Proposals(ask.request.number, (), behind=(1,))))
    for _ in range(3):
        swarm.finish()
        assert not swarm.requests()
    swarm.bench.feed(DraftMessageReceived(CaughtUp(1)))
    swarm.finish()
    (asked,) = swarm.take().sequences
    assert (asked.start, len(asked.tokens)) == (CATCH_UP + 11, 4)


def test_a_lost_sequence_is_sent_again_and_a_refused_one_is_not(swarm: DraftBench) -> None:
    swarm.decode("a", "b")
    request = swarm.take()
    swarm.bench.feed(DraftMessageReceived(Proposals(request.number, (), lost=(1,), refused=(2,))))
    swarm.finish()
    (asked,) = swarm.take().sequences
    assert (asked.sequence, asked.start, len(asked.tokens)) == (1, 0, swarm.bench.sequence("a").sampled)


def test_a_sequence_that_was_dropped_is_asked_for_when_another_one_has_ended(swarm: DraftBench) -> None:
    """Although the process still holds a third one."""
    swarm.decode("a", "b", "c", num_prompt=CATCH_UP + 10)
    request = swarm.take()
    swarm.bench.feed(DraftMessageReceived(Proposals(request.number, (), behind=(1, 2, 3))))
    for message in (CaughtUp(1), Dropped(2), CaughtUp(3)):
        swarm.bench.feed(DraftMessageReceived(message))
    for _ in range(3):
        swarm.finish()
        for ask in swarm.requests():
            assert {asked.sequence for asked in ask.request.sequences} <= {1, 3}
            swarm.answer(ask.request, lambda *_: ())
    swarm.bench.say(Cancel(request_id="a"))
    num_drawn = swarm.bench.sequence("b").sampled
    asked = {}
    for _ in range(5):
        swarm.bench.finish()
        for ask in swarm.requests():
            asked |= {each.sequence: each for each in ask.request.sequences if each.sequence not in asked}
            swarm.bench.feed(DraftMessageReceived(Proposals(ask.request.number, ())))
    assert asked[2].start == 0
    assert len(asked[2].tokens) >= num_drawn
    assert swarm.bench.state.counters["draft_drops"] == 1


def test_a_dropped_sequence_is_asked_for_if_the_process_has_no_other(swarm: DraftBench) -> None:
    swarm.decode()
    request = swarm.take()
    swarm.bench.feed(DraftMessageReceived(Proposals(request.number, (), dropped=(1,))))
    swarm.finish()
    (asked,) = swarm.take().sequences
    assert (asked.sequence, asked.start) == (1, 0)


def test_openings_have_no_grammar_and_fit_into_a_frame(make_bench) -> None:
    """Long grammars, stop strings, biases and prompts of many sequences."""
    swarm = DraftBench(make_bench(settings(has_draft=True)).serve(1))
    swarm.load()
    fields = {
        "max_tokens": 20,
        "grammar": Grammar("regex", "(yes|no)" * 30_000),
        "stop": ("x" * 4096,) * 16,
        "logit_bias": dict.fromkeys(range(90), 0.5),
        "logprobs": 20,
    }
    swarm.decode(*(f"r{number}" for number in range(12)), **fields)
    openings = [each.opening for ask in swarm.bench.log if isinstance(ask, AskDraft) for each in ask.request.sequences]
    params = next(opening.params for opening in openings if opening is not None)
    assert (params.grammar, params.stop, params.logprobs) == (None, (), None)
    assert params.logit_bias == fields["logit_bias"]
    assert all(len(encode_frame(ask.request)) < 1 << 20 for ask in swarm.bench.log if isinstance(ask, AskDraft))


def test_a_request_is_no_longer_than_a_frame(swarm: DraftBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MAX_ASK_BYTES", 1200)
    for request in ("a", "b", "c", "d"):
        swarm.bench.say(submit(request, max_tokens=300))
    swarm.finish()
    swarm.answer(swarm.take(), lambda *_: ())
    swarm.finish()
    assert [asked.sequence for asked in swarm.asked.sequences] == [1, 2]
    swarm.answer(swarm.asked, lambda *_: ())
    assert [asked.sequence for asked in swarm.asked.sequences] == [3, 4]


def test_ended_sequences_are_forgotten_with_the_next_request(swarm: DraftBench) -> None:
    swarm.decode("a", max_tokens=3)
    swarm.decode("b")
    while swarm.bench.sequence("a").reason is None:
        swarm.cycle()
        swarm.finish()
    assert 1 in swarm.take().forget
    assert swarm.drafts.report()["sequences"] == 1


def test_wrong_guesses_end_soon_but_for_rare_short_probes(swarm: DraftBench) -> None:
    swarm.decode(num_prompt=3)
    most: list[int] = []
    for _ in range(6 * PROBE_EVERY):
        for ask in swarm.requests():
            most += [asked.most for asked in ask.request.sequences if swarm.bench.core.wake_at < math.inf]
            swarm.answer(ask.request, wrong)
        swarm.finish()
    assert len(most) < 40
    assert most[-2:] == [PROBE_DEPTH] * 2


def test_right_guesses_come_back_after_wrong_ones(swarm: DraftBench) -> None:
    swarm.decode()
    for _ in range(60):
        swarm.cycle(wrong)
        swarm.finish()
    before = swarm.drafts.report()["sequences"]
    assert before == 1
    num_asked = 0
    for _ in range(100):
        num_asked += len(requests := swarm.requests())
        for ask in requests:
            swarm.answer(ask.request, right)
        if swarm.bench.sequence().reason is not None:
            break
        swarm.finish()
    assert num_asked > 0


def test_a_slow_draft_model_is_hardly_asked(make_bench) -> None:
    """One of its passes takes more than a step: proposals never pay, however right they are."""
    swarm = DraftBench(make_bench(settings(has_draft=True)).serve(1), step_s=0.01, answer_s=0.2)
    swarm.load()
    swarm.decode()
    num_asked = num_steps = 0
    while swarm.bench.sequence().reason is None:
        for ask in swarm.requests():
            num_asked += 1
            swarm.answer(ask.request, right)
        swarm.finish()
        num_steps += 1
    assert num_steps > 200
    assert num_asked <= 5


def test_a_request_may_do_without(swarm: DraftBench) -> None:
    swarm.decode(speculation="off")
    assert not swarm.requests()
    assert row(swarm.bench.pipe[0]) == [(1, 3, 1)]


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_a_draft_model_with_another_vocabulary_is_stopped_with_one_error(make_bench) -> None:
    swarm = DraftBench(make_bench(settings(has_draft=True)).serve(1))
    swarm.load(loaded(VOCABULARY + 1))
    swarm.decode()
    assert sum(isinstance(action, StopDraft) for action in swarm.bench.log) == 1
    (note,) = [a for a in swarm.bench.log if isinstance(a, WriteLog) and a.event == "draft_model_refused"]
    assert note.level == "error"
    assert "another vocabulary (98 tokens)" in str(note.fields["reason"])
    swarm.bench.feed(DraftGone("it was stopped", is_final=True))
    for _ in range(4):
        swarm.finish()
    assert not swarm.requests()
    report = swarm.drafts.report()
    assert report["state"] == "refused"
    assert "another vocabulary" in str(report["problem"])


def test_a_model_with_states_has_no_draft_model() -> None:
    assert not refusal(loaded(), fake_manifest())
    assert "chain keeps states" in refusal(loaded(), fake_manifest(state_stride=64))


def test_an_unusable_draft_model_is_reported(swarm: DraftBench) -> None:
    swarm.bench.feed(DraftGone("no such folder", is_final=True))
    swarm.decode()
    assert not swarm.requests()
    assert swarm.drafts.report() | {"state": "refused", "problem": "no such folder"} == swarm.drafts.report()


def test_vocabularies_are_compared_by_tokenizer_or_else_by_size() -> None:
    one, other = Asset("tokenizer.json", 10, "a" * 32), Asset("tokenizer.json", 11, "b" * 32)
    of_hub = Asset("tokenizer.json", 10, "c" * 40)
    same = [
        ((), (), 97),
        ((one,), (one,), 97),
        ((one,), (one,), 128),  # padded otherwise
        ((one,), (of_hub,), 97),  # a hub's digests are of another kind: the sizes are equal
    ]
    different = [((), (), 98), ((one,), (other,), 97), ((one,), (), 97), ((other,), (of_hub,), 97)]
    for expected, cases in ((True, same), (False, different)):
        for mine, theirs, size in cases:
            model = fake_manifest()
            problem = vocabulary_difference(
                loaded(size, mine),
                type(model)(**{f: getattr(model, f) for f in model.__struct_fields__} | {"assets": theirs}),
            )
            assert (problem == "") is expected, (mine, theirs, size)


def test_classes_without_outcomes_are_expected_to_be_accepted(swarm: DraftBench) -> None:
    assert all(0.5 < share < 1 for share in swarm.drafts.costs.acceptance)
    assert math.isclose(swarm.drafts.costs.total.value, 0.75)

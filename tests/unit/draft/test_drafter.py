"""Proposals of a draft model, with a model that continues every history in one way only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from swarm.draft.drafter import CHUNK, Drafter
from swarm.params import SamplingParams
from swarm.testing import FakeExecutor, fake_continuation, fake_manifest
from swarm.wire.draft_messages import (
    CATCH_UP,
    NUM_CLASSES,
    AskedSequence,
    AskProposals,
    CaughtUp,
    DraftOpening,
    Dropped,
    Proposals,
    class_of,
)
from swarm.wire.messages import BLOCK, LayerRange

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.8, top_p=0.9, ignore_eos=True)


def executor(capacity: int = 1 << 14, context: int = 4096) -> FakeExecutor:
    model = FakeExecutor(fake_manifest(context=context), capacity)
    layers = LayerRange(0, model.manifest.num_layers)
    model.prepare(layers, (), 8, lambda done, total: None)
    model.activate(layers)
    return model


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(executor(), 8)


def opened(
    sequence: int,
    tokens: Sequence[int],
    most: int,
    params: SamplingParams = GREEDY,
    *,
    num_prompt: int = len(PROMPT),
    limit: int = 4000,
    seed: int = 11,
) -> AskedSequence:
    return AskedSequence(sequence, 0, tuple(tokens), most, DraftOpening(params, seed, num_prompt, limit))


def ask(
    drafter: Drafter,
    *sequences: AskedSequence,
    least: float = 0.0,
    acceptance: tuple[float, ...] = (1.0,) * NUM_CLASSES,
    forget: tuple[int, ...] = (),
) -> Proposals:
    return drafter.propose(AskProposals(1, least, acceptance, sequences, forget))


def continuation(tokens: Sequence[int], params: SamplingParams = GREEDY, num: int = 60, seed: int = 11) -> list[int]:
    """What the model itself draws after these tokens. A draw of the fake depends on everything before it."""
    longer = SamplingParams(max_tokens=num, temperature=params.temperature, ignore_eos=True)
    return fake_continuation(tokens, longer, seed, fake_manifest(context=4096))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_proposal_is_the_models_own_continuation(drafter: Drafter, params: SamplingParams) -> None:
    answer = ask(drafter, opened(1, PROMPT, 5, params))
    (drafted,) = answer.drafted
    assert (drafted.sequence, drafted.start) == (1, len(PROMPT))
    assert list(drafted.tokens) == continuation(PROMPT, params)[:5]
    assert len(drafted.logprobs) == 5
    assert (answer.passes, answer.behind, answer.lost, answer.refused) == (5, (), (), ())


def test_after_accepted_tokens_a_proposal_goes_on_from_them(drafter: Drafter) -> None:
    """All tokens of the proposal were right, and the stages drew one more: the two positions that the draft model has
    not computed go through it together."""
    right = continuation(PROMPT)
    ask(drafter, opened(1, PROMPT, 4))
    answer = ask(drafter, AskedSequence(1, 3, tuple(right[:5]), 4))
    assert list(answer.drafted[0].tokens) == right[5:9]
    assert answer.drafted[0].start == len(PROMPT) + 5
    assert answer.passes == 4


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_refused_tokens_are_cut_off(drafter: Drafter, num_right: int) -> None:
    """The fake computes no position twice and refuses a gap, so that a wrong cut would raise."""
    right = continuation(PROMPT)
    ask(drafter, opened(1, PROMPT, 4))
    tokens = (*right[:num_right], (right[num_right] + 1) % 97)
    answer = ask(drafter, AskedSequence(1, 3, tokens, 4))
    assert list(answer.drafted[0].tokens) == continuation((*PROMPT, *tokens))[:4]


def test_an_answer_may_have_gained_fewer_tokens_than_were_proposed(drafter: Drafter) -> None:
    """The broker sent only the beginning of a proposal on: the last token's position is computed again."""
    right = continuation(PROMPT)
    ask(drafter, opened(1, PROMPT, 6))
    answer = ask(drafter, AskedSequence(1, 3, tuple(right[:2]), 3))
    assert list(answer.drafted[0].tokens) == right[2:5]


def test_sequences_of_a_request_are_computed_together(drafter: Drafter) -> None:
    prompts = {n: (n, n + 1, n + 2) for n in range(1, 5)}
    answer = ask(drafter, *(opened(n, prompt, n, SAMPLED, seed=n) for n, prompt in prompts.items()))
    assert answer.passes == 4
    for drafted in answer.drafted:
        number = drafted.sequence
        assert list(drafted.tokens) == continuation(prompts[number], SAMPLED, seed=number)[:number]


def test_a_proposal_ends_where_it_is_hardly_accepted(drafter: Drafter) -> None:
    """By the acceptance of its tokens' classes, multiplied, and with the token that makes it improbable."""
    (free,) = ask(drafter, opened(1, PROMPT, 20)).drafted
    classes = [class_of(logprob) for logprob in free.logprobs]
    acceptance = tuple(1 - number / 40 for number in range(NUM_CLASSES))
    products = [math.prod(acceptance[c] for c in classes[: n + 1]) for n in range(20)]
    for number in (0, 4, 11):
        (ended,) = ask(drafter, opened(2, PROMPT, 20), least=products[number] + 1e-9, acceptance=acceptance).drafted
        assert ended.tokens == free.tokens[: number + 1]
        assert products[number] < products[number - 1] or number == 0


def test_classes_of_log_probabilities_are_ordered() -> None:
    assert [class_of(-x) for x in (0.0, 0.03, 0.05, 0.2, 1.0, 4.0, 9.0, 1e9)] == [0, 0, 1, 2, 5, 10, 15, 15]
    assert class_of(-math.inf) == class_of(-1e300) == NUM_CLASSES - 1


def test_an_end_of_sequence_ends_a_proposal(drafter: Drafter) -> None:
    right = continuation(PROMPT)
    stops = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=(right[2],))
    assert list(ask(drafter, opened(1, PROMPT, 8, stops)).drafted[0].tokens) == right[:3]
    limited = ask(drafter, opened(2, PROMPT, 8, limit=len(PROMPT) + 4)).drafted[0]
    assert list(limited.tokens) == right[:4]


def test_a_long_prompt_is_computed_between_requests(drafter: Drafter) -> None:
    """Meanwhile other sequences get their proposals."""
    prompt = [n % 90 + 1 for n in range(CATCH_UP + 420)]
    first = ask(drafter, opened(1, prompt, 4, num_prompt=len(prompt)), opened(2, PROMPT, 4))
    assert first.behind == (1,)
    assert [drafted.sequence for drafted in first.drafted] == [2]
    caught_up: list[CaughtUp | Dropped] = []
    num_chunks = 0
    while drafter.has_work:
        caught_up += [message for message in [drafter.catch_up()] if message]
        num_chunks += 1
        if num_chunks == 2:
            right = continuation(PROMPT)
            between = ask(drafter, AskedSequence(2, 3, tuple(right[:5]), 4))
            assert list(between.drafted[0].tokens) == right[5:9]
            assert drafter.has_work
    assert caught_up == [CaughtUp(1)]
    assert num_chunks == -(-(len(prompt) - 1) // CHUNK)
    answer = ask(drafter, AskedSequence(1, len(prompt), (3,), 4))
    assert list(answer.drafted[0].tokens) == continuation([*prompt, 3])[:4]


def test_the_sequence_asked_for_longest_ago_is_dropped(drafter: Drafter) -> None:
    for number in range(1, 9):
        ask(drafter, opened(number, PROMPT, 2))
    ask(drafter, AskedSequence(1, 3, (4,), 2))  # now the second is the oldest
    assert ask(drafter, opened(9, PROMPT, 2)).dropped == (2,)
    assert ask(drafter, AskedSequence(2, 3, (4,), 2)).lost == (2,)
    assert ask(drafter, AskedSequence(1, 4, (4,), 2)).lost == ()
    again = ask(drafter, opened(2, (*PROMPT, 4), 2))
    assert list(again.drafted[0].tokens) == continuation((*PROMPT, 4))[:2]


class SmallExecutor(FakeExecutor):
    """Reports too little memory as a real executor does."""

    def _check_capacity(self) -> None:
        from swarm.errors import KvFull

        if self.kv_used() > self.capacity:
            raise KvFull("too many positions")


def small_drafter(num_blocks: int) -> Drafter:
    model = executor()
    return Drafter(SmallExecutor(model.manifest, num_blocks * BLOCK, layers=model.layers), 8)


def test_with_full_memory_others_are_dropped() -> None:
    drafter = small_drafter(2)
    for number in (1, 2):
        assert ask(drafter, opened(number, PROMPT, 2)).drafted
    answer = ask(drafter, opened(3, PROMPT, 2))
    (drafted,) = answer.drafted
    assert list(drafted.tokens) == continuation(PROMPT)[:2]
    assert (answer.dropped, answer.refused) == ((1,), ())


def test_a_sequence_that_finds_no_memory_while_it_is_behind_is_reported() -> None:
    """The others keep theirs. It can be computed once one of them has ended."""
    drafter = small_drafter(5)
    prompt = [n % 90 + 1 for n in range(CATCH_UP + 50)]
    assert ask(drafter, opened(1, PROMPT, 2), opened(2, PROMPT, 2)).drafted
    assert ask(drafter, opened(3, prompt, 2, num_prompt=len(prompt))).behind == (3,)
    messages = []
    while drafter.has_work:
        messages.append(drafter.catch_up())
    assert messages == [None, Dropped(3)]
    assert ask(drafter, AskedSequence(3, len(prompt), (3,), 2)).lost == (3,)
    again = ask(drafter, opened(3, prompt, 2, num_prompt=len(prompt)), forget=(1,))
    assert (again.behind, again.dropped) == ((3,), ())
    while drafter.has_work:
        messages.append(drafter.catch_up())
    assert messages[-1] == CaughtUp(3)


def test_a_sequence_that_the_memory_can_never_hold_is_refused() -> None:
    drafter = small_drafter(2)
    answer = ask(drafter, opened(1, [3] * (2 * BLOCK), 2), opened(2, [3] * (2 * BLOCK - 1), 5))
    assert answer.refused == (1,)
    assert [(drafted.sequence, len(drafted.tokens)) for drafted in answer.drafted] == [(2, 1)]

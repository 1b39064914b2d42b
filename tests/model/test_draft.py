"""A real draft model: its proposals are its own continuations, whatever was accepted before and however it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.draft.drafter import CHUNK, Drafter
from swarm.draft.process import load_draft
from swarm.params import SamplingParams
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.wire.draft_messages import (
    CATCH_UP,
    NUM_CLASSES,
    AskedSequence,
    AskProposals,
    DraftedTokens,
    DraftOpening,
    Proposals,
)
from swarm.wire.messages import LayerRange
from tests.model.cutting import Pipeline, random_tokens, ready

GREEDY = SamplingParams(max_tokens=400, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=400, temperature=0.9, top_k=40, repetition_penalty=1.1, ignore_eos=True)
PROMPT = random_tokens(20, seed=3)
SEED = 17


@pytest.fixture(scope="module")
def whole(llama: Path) -> TorchExecutor:
    return ready(llama, LayerRange(0, 8))


@pytest.fixture
def drafter(llama: Path) -> Drafter:
    executor, loaded = load_draft(str(llama), 2)
    assert (loaded.vocab_size, loaded.context) == (500, 1024)
    assert loaded.weight_bytes > 0
    return Drafter(executor, 8)


def continuation(
    whole: TorchExecutor, tokens: Sequence[int], count: int, params: SamplingParams, num_prompt: int = 20
) -> list[tuple[int, float]]:
    """What a stage of the whole model draws after these tokens, one after the other, with log probabilities."""
    pipeline = Pipeline([whole])
    pipeline.open(1)
    history, drawn, start = list(tokens), [], 0
    for _ in range(count):
        sample = pipeline.sample(1, history, start, params_with_logprobs(params), SEED)
        start = len(history)
        history.append(sample.token)
        drawn.append((sample.token, sample.logprobs[0].logprob))
    return drawn


def params_with_logprobs(params: SamplingParams) -> SamplingParams:
    from msgspec.structs import replace

    return replace(params, logprobs=0)


def ask(drafter: Drafter, *asked: AskedSequence, least: float = 0.0) -> Proposals:
    return drafter.propose(AskProposals(1, least, (1.0,) * NUM_CLASSES, asked))


def opened(tokens: Sequence[int], most: int, params: SamplingParams, sequence: int = 1) -> AskedSequence:
    return AskedSequence(sequence, 0, tuple(tokens), most, DraftOpening(params, SEED, 20, 512))


def pairs(drafted: DraftedTokens) -> list[tuple[int, float]]:
    return list(zip(drafted.tokens, drafted.logprobs, strict=True))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_proposal_has_the_bits_of_the_models_own_continuation(
    whole: TorchExecutor, drafter: Drafter, params: SamplingParams
) -> None:
    (drafted,) = ask(drafter, opened(PROMPT, 8, params)).drafted
    assert pairs(drafted) == continuation(whole, PROMPT, 8, params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_after_accepted_and_refused_tokens_it_goes_on_exactly(
    whole: TorchExecutor, drafter: Drafter, params: SamplingParams, num_right: int
) -> None:
    """Refused positions are cut off; accepted ones that are missing are computed with the first draw."""
    (first,) = ask(drafter, opened(PROMPT, 5, params)).drafted
    gained = [*first.tokens[:num_right], (first.tokens[num_right] + 1) % 500 if num_right < 5 else 9]
    (second,) = ask(drafter, AskedSequence(1, 20, tuple(gained), 6)).drafted
    assert pairs(second) == continuation(whole, [*PROMPT, *gained], 6, params)


def test_sequences_of_one_request_do_not_disturb_each_other(whole: TorchExecutor, drafter: Drafter) -> None:
    prompts = {n: random_tokens(10 + n, seed=n) for n in range(1, 5)}
    answer = ask(drafter, *(opened(prompt, 2 * n, SAMPLED, n) for n, prompt in prompts.items()))
    for drafted in answer.drafted:
        prompt = prompts[drafted.sequence]
        assert pairs(drafted) == continuation(whole, prompt, 2 * drafted.sequence, SAMPLED)


def test_a_long_prompt_in_chunks_gives_the_same_bits(whole: TorchExecutor, drafter: Drafter) -> None:
    prompt = random_tokens(CATCH_UP + 2 * CHUNK, seed=5)
    assert ask(drafter, opened(prompt, 4, GREEDY)).behind == (1,)
    while drafter.has_work:
        drafter.catch_up()
    (drafted,) = ask(drafter, AskedSequence(1, len(prompt), (7,), 4)).drafted
    assert pairs(drafted) == continuation(whole, [*prompt, 7], 4, GREEDY)


def test_a_draft_model_has_little_memory_for_sequences(llama: Path) -> None:
    executor, _ = load_draft(str(llama), 1)
    per_token = sum(executor.manifest.kv_bytes_per_token)
    assert 0 < executor.kv_capacity() * per_token <= 1 << 30

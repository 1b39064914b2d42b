"""Draws at several positions of a row: the same as one by one, and without effect where they are not reached."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import swarm.demo
from swarm.params import Grammar, SamplingParams
from swarm.stage.engine import native_sampling
from swarm.stage.engine.batch_sampling import BatchSamples, sample_batch
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.verification import SharedTokens, TokenPrefix
from swarm.stage.executor import Batch, SampleJob
from swarm.testing import fake_manifest
from swarm.wire.messages import Row, SequencePosition

WORDS = 768
MANIFEST = msgspec.structs.replace(fake_manifest(vocab_size=WORDS), eos_token_ids=(1,))
HISTORY = [(7 * position) % WORDS for position in range(50)]
NUM_PROMPT = 30
PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.2, repetition_penalty=1.4, logprobs=1),
    SamplingParams(temperature=1.2, presence_penalty=0.7, frequency_penalty=0.3),
    SamplingParams(min_tokens=23, logit_bias={3: 1.0}),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarMasks:
    return GrammarMasks(Path(swarm.demo.__file__).parent / "village", (1,))


@pytest.fixture(params=["native", "python"], autouse=True)
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native_sampling, "supports", lambda rows: False)
    elif not native_sampling.supports(torch.zeros(1, WORDS)):
        pytest.skip("there are no native kernels")


def logits(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, WORDS, generator=torch.Generator().manual_seed(seed)) * 3


def verify(
    rows: torch.Tensor, params: Sequence[SamplingParams], guesses: Sequence[Sequence[int]], grammars: GrammarMasks
) -> BatchSamples:
    """Verify a guess for each of some sequences, whose histories are the same."""
    jobs = tuple(
        SampleJob(number, each, 40 + number, [*HISTORY, *guess], NUM_PROMPT, len(guess))
        for number, (each, guess) in enumerate(zip(params, guesses, strict=True))
    )
    spans = tuple(Row(number, 49, 1 + len(guess), True) for number, guess in enumerate(guesses))
    tokens = np.zeros(sum(span.count for span in spans), np.int64)
    return sample_batch(Batch(spans, tokens, None, jobs), rows, MANIFEST, 2, grammars)


def one_by_one(
    rows: torch.Tensor, params: Sequence[SamplingParams], grammars: GrammarMasks
) -> Iterator[list[tuple[int, object]]]:
    """Yield what each sequence draws from its rows, without proposals."""
    count = len(rows) // len(params)
    for number, each in enumerate(params):
        drawn: list[tuple[int, object]] = []
        for row in rows[number * count : (number + 1) * count]:
            job = SampleJob(0, each, 40 + number, [*HISTORY, *(token for token, _ in drawn)], NUM_PROMPT)
            batch = Batch((Row(number, 49 + len(drawn), 1, True),), np.zeros(1, np.int64), None, (job,))
            (found,) = sample_batch(batch, row[None], MANIFEST, 1, grammars).sampled
            assert found.position == len(job.history)
            drawn.append((found.token, found.logprobs))
        yield drawn


def test_all_parameters_draw_what_they_draw_one_by_one(grammars: GrammarMasks) -> None:
    """Right guesses, for sequences beside each other."""
    rows = logits(6 * len(PARAMS))
    expected = list(one_by_one(rows, PARAMS, grammars))
    result = verify(rows, PARAMS, [[token for token, _ in drawn[:5]] for drawn in expected], grammars)
    assert [(item.token, item.logprobs) for item in result.sampled] == list(itertools.chain(*expected))
    assert [item.position for item in result.sampled] == [*range(50, 56)] * len(PARAMS)
    assert result.certain == tuple(SequencePosition(number, 55) for number in range(len(PARAMS)))
    assert not result.failed


def test_nothing_is_drawn_behind_an_accepted_end(grammars: GrammarMasks) -> None:
    """Whatever was proposed there."""
    rows = logits(5)
    drawn = next(one_by_one(rows, PARAMS[:1], grammars))
    tokens = [token for token, _ in drawn]
    result = verify(rows, [SamplingParams(logprobs=2, stop_token_ids=(tokens[1],))], [tokens[:4]], grammars)
    assert [(item.token, item.logprobs) for item in result.sampled] == drawn[:2]
    assert result.certain == (SequencePosition(0, 51),)


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_bad_position_fails_only_where_it_is_reached(grammars: GrammarMasks, num_right: int) -> None:
    """The third draw's logits are not finite."""
    rows = logits(5)
    rows[2] = torch.nan
    drawn = next(one_by_one(rows[:2], [PARAMS[1]], grammars))
    right = [token for token, _ in drawn] + [5, 6]
    guess = [*right[:num_right], *((token + 1) % WORDS for token in right[num_right:])]
    result = verify(rows, [PARAMS[1]], [guess], grammars)
    is_reached = num_right > 1
    assert bool(result.failed) == is_reached
    assert [(item.token, item.logprobs) for item in result.sampled] == drawn[: num_right + 1]
    if is_reached:
        assert "not finite numbers for position 52" in result.failed[0].reason
        assert result.certain == (SequencePosition(0, 52),)
    else:
        assert result.certain == ((SequencePosition(0, 51),) if num_right else ())


def test_a_grammar_that_ends_there_does_not_fail(grammars: GrammarMasks) -> None:
    """Guesses that the grammar forbids are refused; behind its accepted end, nothing is drawn."""
    params = SamplingParams(grammar=Grammar("choice", '["yes", "no"]'))
    rows = logits(8)
    job = SampleJob(0, params, 40, HISTORY[:NUM_PROMPT], NUM_PROMPT)

    def result(*guess: int) -> BatchSamples:
        item = SampleJob(0, params, 40, [*job.history, *guess], NUM_PROMPT, len(guess))
        batch = Batch((Row(0, 29, 1 + len(guess), True),), np.zeros(1 + len(guess), np.int64), None, (item,))
        found = sample_batch(batch, rows, MANIFEST, 1, grammars)
        while found.delayed:
            found = sample_batch(batch, rows, MANIFEST, 1, grammars)
        return found

    answer: list[int] = []
    while True:
        found = result(*answer)
        assert not found.failed
        answer = [item.token for item in found.sampled]
        if answer[-1] == 1:
            break
    behind = result(*answer, 5, 6)
    assert [item.token for item in behind.sampled] == answer
    assert not behind.failed
    assert behind.forced == ()
    refused = result(answer[0], 700, 701)
    assert [item.token for item in refused.sampled] == answer[:2]


def test_a_prefix_is_the_list_up_to_its_end() -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    shared = SharedTokens(tokens)
    for stop in range(1, 7):
        prefix = TokenPrefix(shared, stop)
        assert (len(prefix), list(prefix), prefix[-1]) == (stop, tokens[:stop], tokens[stop - 1])
        assert [prefix[at:] for at in range(stop)] == [tokens[at:stop] for at in range(stop)]
        assert np.asarray(prefix, np.int64).tolist() == tokens[:stop]
        with pytest.raises(IndexError):
            prefix[stop]

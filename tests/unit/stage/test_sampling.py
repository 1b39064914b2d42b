"""Drawing a token from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarm.errors import ModelError
from swarm.params import SamplingParams
from swarm.stage.sampling import Drawn, draw, is_plain_greedy, uniform

SIZE = 50
rng = np.random.default_rng(5)
LOGITS = rng.normal(size=SIZE).astype(np.float32) * 2


def logits(**scores: float) -> np.ndarray:
    """All zero, but for ``t3=2.5`` and the like."""
    row = np.zeros(SIZE, np.float32)
    for name, score in scores.items():
        row[int(name[1:])] = score
    return row


def drawn(
    row: np.ndarray, history: list[int] | None = None, num_prompt: int = 1, seed: int = 0, **params: object
) -> Drawn:
    return draw(
        row,
        SamplingParams(**params),  # type: ignore[arg-type]
        history=[0] if history is None else history,
        num_prompt=num_prompt,
        seed=seed,
        eos_token_ids=(2,),
    )


def shares(row: np.ndarray, count: int = 4000, **params: object) -> dict[int, float]:
    """How often each token comes, over many positions."""
    params.setdefault("temperature", 1.0)
    history, found = [0] * count, {}
    values = SamplingParams(**params)  # type: ignore[arg-type]
    for position in range(1, count):
        token = draw(row, values, history=history[:position], num_prompt=count, seed=11).token
        found[token] = found.get(token, 0) + 1 / (count - 1)
    return found


def test_greedy_takes_the_largest() -> None:
    """Temperature 0 takes the largest logit, whatever the seed."""
    assert {drawn(LOGITS, seed=seed).token for seed in range(5)} == {int(LOGITS.argmax())}


def test_lowest_id_wins_among_equals() -> None:
    """Ties go to the lowest id, in greedy choice, top-k and the alternatives."""
    row = logits(t7=3, t4=3, t9=3)
    assert drawn(row).token == 4
    assert set(shares(row, 300, top_k=2)) == {4, 7}
    assert [each.token for each in drawn(row, logprobs=2).logprobs] == [4, 4, 7]


def test_only_seed_and_position_choose() -> None:
    """The same seed and position draw the same; another seed or position may differ."""
    once = [drawn(LOGITS, [0] * n, temperature=1.0, seed=3).token for n in range(1, 40)]
    again = [drawn(LOGITS, [0] * n, temperature=1.0, seed=3).token for n in range(39, 0, -1)]
    other = [drawn(LOGITS, [0] * n, temperature=1.0, seed=4).token for n in range(1, 40)]
    assert once == again[::-1]
    assert once != other
    assert len(set(once)) > 5


def test_uniform_is_spread_evenly() -> None:
    """Neighbouring seeds and positions give independent, even numbers."""
    values = np.array([uniform(seed, position) for seed in range(50) for position in range(50)])
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 180
    grid = values.reshape(50, 50)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.08
    assert uniform(2**63 - 1, 2**20) != uniform(2**63 - 2, 2**20)


def test_shares_follow_the_distribution() -> None:
    """Tokens come as often as the softmax says, and temperature sharpens or flattens it."""
    row = np.full(SIZE, -50, np.float32)
    row[[3, 5, 8]] = np.log([0.5, 0.3, 0.2])
    found = shares(row)
    assert found[3] == pytest.approx(0.5, abs=0.03)
    assert found[8] == pytest.approx(0.2, abs=0.03)
    cold = shares(row, temperature=0.5)
    assert cold[3] == pytest.approx(0.25 / 0.38, abs=0.03)


def test_top_k_top_p_min_p() -> None:
    """Each filter keeps exactly the tokens that its definition names."""
    row = np.full(SIZE, -50, np.float32)
    row[[3, 5, 8, 9]] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(shares(row, 1000, top_k=2)) == {3, 5}
    assert set(shares(row, 1000, top_p=0.75)) == {3, 5}
    assert set(shares(row, 1000, top_p=0.81)) == {3, 5, 8}
    assert set(shares(row, 1000, top_p=0.01)) == {3}
    assert set(shares(row, 1000, min_p=0.25)) == {3, 5, 8}
    # Top-p counts what top-k left: 0.5 and 0.3 come to 1, and 0.5 / 0.8 is enough for 0.6.
    assert set(shares(row, 1000, top_k=2, top_p=0.6)) == {3}


def test_logit_bias() -> None:
    """A bias is added; of a token that the model doesn't have it is ignored."""
    assert drawn(logits(t3=1), logit_bias={9: 5.0, 10_000: 100.0}).token == 9


def test_penalties() -> None:
    """Repetition counts prompt and answer, presence and frequency the answer alone."""
    row = logits(t3=4, t5=3, t6=-1)
    assert drawn(row, [3], 1, repetition_penalty=2.0).token == 5
    assert drawn(row, [3], 1, presence_penalty=2.0).token == 3  # only in the prompt
    assert drawn(row, [0, 3], 1, presence_penalty=2.0).token == 5
    assert drawn(row, [0, 3, 3], 1, frequency_penalty=0.4).token == 3
    assert drawn(row, [0, 3, 3, 3], 1, frequency_penalty=0.4).token == 5
    below = np.full(SIZE, -1, np.float32)
    below[4] = -0.9
    assert drawn(below, [4], 1, repetition_penalty=2.0).token == 0  # a negative logit is multiplied


def test_min_tokens_forbids_every_end() -> None:
    """Until so many tokens are there, neither the model's end nor the caller's stops are drawn."""
    row = logits(t2=9, t7=8, t1=1)
    assert drawn(row, [0], min_tokens=2, stop_token_ids=(7,)).token == 1
    assert drawn(row, [0, 5], min_tokens=2, stop_token_ids=(7,)).token == 1
    assert drawn(row, [0, 5, 5], min_tokens=2, stop_token_ids=(7,)).token == 2
    assert drawn(row, [0], ignore_eos=True).token == 2  # who ignores the end still sees it


def test_logprobs_are_the_models_own() -> None:
    """Own first, then the best; of the model's logits, untouched by bias, penalties and temperature."""
    row = logits(t3=2, t5=1)
    found = drawn(row, logit_bias={9: 50.0}, temperature=0.7, logprobs=2).logprobs
    total = math.log(math.exp(2) + math.exp(1) + SIZE - 2)
    assert [each.token for each in found] == [9, 3, 5]
    assert [each.logprob for each in found] == pytest.approx([-total, 2 - total, 1 - total])
    assert drawn(row, logprobs=0).logprobs[0].token == 3
    assert len(drawn(row, logprobs=0).logprobs) == 1
    assert drawn(row).logprobs == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_an_error(bad: float) -> None:
    """A logit that is no finite number is never passed over."""
    with pytest.raises(ModelError, match="not finite"):
        drawn(logits(t3=bad))


def test_input_is_left_alone() -> None:
    """The logits that come in are not written to."""
    row = LOGITS.copy()
    drawn(row, [3, 4], 1, temperature=0.5, logit_bias={1: 2.0}, repetition_penalty=1.5, min_tokens=9)
    np.testing.assert_array_equal(row, LOGITS)


def test_large_vocabulary_edges() -> None:
    """Chance 0 and chance just under 1 give tokens that have weight."""
    row = np.full(SIZE, -900, np.float32)
    row[[10, 20]] = 0
    assert set(shares(row, 500)) == {10, 20}
    assert set(shares(row, 500, top_k=1)) == {10}


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 4}, False),
        ({"min_tokens": 3}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),
    ],
)
def test_plain_greedy(params: dict[str, object], plain: bool) -> None:
    """The short way is taken only where it gives the same token, and nothing else was asked for."""
    assert is_plain_greedy(SamplingParams(**params), num_generated=3) is plain  # type: ignore[arg-type]

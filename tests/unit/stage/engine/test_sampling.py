"""Drawing a token from logits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from swarm.params import SamplingParams
from swarm.stage.engine.sampling import (
    FULL_WEIGHT,
    SampledToken,
    compute_weights,
    draw_token,
    filter_weights,
    fused_multiply_add,
    is_plain_greedy,
    logarithm,
    pick_token,
    round_scores,
    uniform_draw,
)

SIZE = 50
_LARGEST = float(np.finfo(np.float32).max)
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
) -> SampledToken:
    found = draw_token(
        row,
        SamplingParams(**params),  # type: ignore[arg-type]
        history=[0] if history is None else history,
        num_prompt=num_prompt,
        seed=seed,
        eos_token_ids=(2,),
    )
    assert found is not None
    return found


def shares(row: np.ndarray, count: int = 4000, **params: object) -> dict[int, float]:
    """How often each token comes, over many positions."""
    params.setdefault("temperature", 1.0)
    history, found = [0] * count, {}
    values = SamplingParams(**params)  # type: ignore[arg-type]
    for position in range(1, count):
        one = draw_token(row, values, history=history[:position], num_prompt=count, seed=11)
        assert one is not None
        token = one.token
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
    values = np.array([uniform_draw(seed, position) for seed in range(50) for position in range(50)])
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 180
    grid = values.reshape(50, 50)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.08
    assert uniform_draw(2**63 - 1, 2**20) != uniform_draw(2**63 - 2, 2**20)


@pytest.mark.slow
def test_shares_follow_the_distribution() -> None:
    """Tokens come as often as the softmax says, and temperature sharpens or flattens it."""
    row = np.full(SIZE, -50, np.float32)
    row[[3, 5, 8]] = np.log([0.5, 0.3, 0.2])
    found = shares(row)
    assert found[3] == pytest.approx(0.5, abs=0.03)
    assert found[8] == pytest.approx(0.2, abs=0.03)
    cold = shares(row, temperature=0.5)
    assert cold[3] == pytest.approx(0.25 / 0.38, abs=0.03)


@pytest.mark.slow
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


def test_a_bias_is_added_to_its_logit() -> None:
    """A bias is added; of a token that the model doesn't have it is ignored."""
    assert drawn(logits(t3=1), logit_bias={9: 5.0, 10_000: 100.0}).token == 9


def test_repetition_counts_the_prompt_too() -> None:
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
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_what_is_not_finite(bad: float, temperature: float) -> None:
    """A logit that is no finite number is never passed over."""
    params = SamplingParams(temperature=temperature)
    assert draw_token(logits(t3=bad), params, history=[0], num_prompt=1, seed=0) is None


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
        ({"temperature": 0.5, "top_k": 1}, True),
    ],
)
def test_plain_greedy(params: dict[str, object], plain: bool) -> None:
    """The short way is taken only where it gives the same token, and nothing else was asked for."""
    assert is_plain_greedy(SamplingParams(**params), num_generated=3) is plain  # type: ignore[arg-type]


def test_top_k_of_one_is_greedy() -> None:
    """Even where the weights of two logits are equal in float32, the larger logit is taken."""
    row = logits(t3=1e-9, t7=2e-9)
    assert drawn(row, temperature=100.0, top_k=1, presence_penalty=1e-12).token == 7


def test_fused_is_rounded_once() -> None:
    """Products and sums of float32 as exact arithmetic gives them, rounded to the nearest float32."""
    chance = np.random.default_rng(2)
    a, b, c = (chance.normal(size=4000).astype(np.float32) for _ in range(3))
    c *= np.float32(2) ** chance.integers(-30, 4, 4000).astype(np.float32)
    c[:1000] = -(a * b)[:1000]  # where almost everything cancels
    a[1000:2000], b[1000:2000] = np.float32(1 + 2**-12), np.float32(1 + 2**-12)  # where the product ends on a tie
    for one, x, y, z in zip(fused_multiply_add(a, b, c).tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(one) - exact)
        beside = [float(np.nextafter(np.float32(one), np.float32(to))) for to in (-np.inf, np.inf)]
        others = [abs(Fraction(other) - exact) for other in beside]
        assert error <= min(others)
        assert error < min(others) or np.float32(one).view(np.int32) % 2 == 0  # ties go to the even one


def test_weights_are_exponentials() -> None:
    """To the last digits of float32, or half a unit; the largest is whole."""
    scores = np.concatenate([np.linspace(-30, 0, 20_001), [-np.inf, -1e38]]).astype(np.float32)
    for temperature in (0.7, 1.0, 30.0):
        found = compute_weights(scores, temperature)
        exact = np.exp(scores.astype(np.float64) / temperature) * FULL_WEIGHT
        np.testing.assert_allclose(found, exact, rtol=3e-6, atol=0.5001)
    assert compute_weights(scores, 1.0).max() == FULL_WEIGHT
    assert (compute_weights(scores, 1e-320) > 0).sum() == 1


def test_scores_beyond_float32_stay_in_order() -> None:
    """They become the largest number there is; what is forbidden stays out."""
    assert round_scores(np.array([1e300, 1.0, -1e300, -np.inf])).tolist() == [_LARGEST, 1.0, -_LARGEST, -math.inf]
    assert drawn(logits(t3=3e38), logit_bias={5: 1.0}, temperature=1.0, repetition_penalty=1e-9).token in (0, 3)


def test_filters_keep_the_first_of_equals() -> None:
    """By the lowest ids, also where the share of top-p ends among them; before it, not at it."""
    even = np.full(8, FULL_WEIGHT, np.int64)
    assert np.flatnonzero(filter_weights(even, SamplingParams(top_k=3))).tolist() == [0, 1, 2]
    assert np.flatnonzero(filter_weights(even, SamplingParams(top_p=0.5))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(filter_weights(even, SamplingParams(top_p=0.51))).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(filter_weights(even, SamplingParams(top_p=1 - 2**-53))).tolist() == list(range(8))
    assert np.flatnonzero(filter_weights(even, SamplingParams(min_p=1.0))).tolist() == list(range(8))
    steps = even >> np.arange(8)
    assert np.flatnonzero(filter_weights(steps, SamplingParams(min_p=0.25))).tolist() == [0, 1, 2]


def test_pick_ends_on_a_token_with_weight() -> None:
    """From the very first chance to the last one below 1."""
    weights = np.array([0, 3, 0, 5, 0], np.int64)
    assert [pick_token(weights, chance) for chance in (0.0, 0.374, 0.376, 1 - 2**-53)] == [1, 1, 3, 3]


def test_our_logarithm_is_the_librarys() -> None:
    """As the library's, to the last digits."""
    for number in [1.0, 1 + 1e-9, 1.4142, 1.4143, 2.0, 3.7, 1e5, 2.0**20]:
        assert logarithm(number) == pytest.approx(math.log(number), rel=4e-16, abs=1e-16)

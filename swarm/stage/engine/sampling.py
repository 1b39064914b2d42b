"""Logits in, a token out: a pure function, so that a token depends on its own sequence alone. No torch in here.

This is the rule, written plainly. The kernel for it (``native/kernels/sampling.h``) computes the same bits without
sorting; where there is none, this is what draws.

**The score** of a token is its logit; in this order: plus its bias; divided by the repetition penalty, or multiplied if
it is not positive (tokens of the prompt and of the answer); less the presence penalty and, as often as the answer has
it, the frequency penalty. In float64. ``min_tokens`` forbids the ends, unless nothing else is left. Where a grammar
says which tokens are allowed (``grammars``; ``min_tokens`` is in that), all others are forbidden. Temperature 0 and a
top-k of 1 take the largest score.

**The weight** of a token is e to the (score - largest) / temperature, in float32 (scores are rounded to it, and the
inverse of the temperature multiplies), rounded to a whole number of units of 2^-36. The exponential is one series of
multiplications and additions, each rounded once (:func:`_exponential`). So no library decides about its bits.

**The draw.** Weights stand in one order: the largest first, among equals the lowest id. Top-k keeps the first so many;
top-p those of what is left before which less than this share of its sum lies; min-p those of at least this share of a
whole, which the largest weight is. Sums are of whole numbers, so they are exact and nobody's order of adding matters.
Then one number between 0 and 1, which seed and position alone determine (Philox, a counter-based generator), picks
from the weights cumulated in the order of token ids.

**Log probabilities** are the model's own: of its logits before all of the above. Their sum of exponentials is that of
the weights at temperature 1, its logarithm plain float64 arithmetic.

The largest weight is 2^36 units. A token of less than half a unit is never drawn: all of those together have less than
one draw in 500,000 even of a vocabulary of 262,144, less than rounding the logits to float32 may shift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swarm.errors import ModelError
from swarm.wire.messages import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.params import SamplingParams

    Logits = NDArray[np.float32]
    Scores = NDArray[np.float64]
    Weights = NDArray[np.int64]
    Mask = NDArray[np.uint32]  # a bit for each token, the lowest first

WHOLE = 2**36  # units of the largest weight
MOST_WORDS = 2**20  # of a vocabulary, so that sums of weights stay below 2^63; the largest today are of 2^18
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and log probabilities if they were asked for: its own first, then the most likely ones."""

    token: int
    logprobs: tuple[TokenLogprob, ...] = ()


def is_greedy(params: SamplingParams) -> bool:
    """Is the largest score taken, without chance?"""
    return params.greedy or params.top_k == 1


def is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Does the largest logit decide, with nothing else asked for?"""
    return (
        is_greedy(params)
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and num_generated >= params.min_tokens
    )


def forbidden_now(params: SamplingParams, num_generated: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that would end the answer, while that must not end yet."""
    return (*eos_token_ids, *params.stop_token_ids) if num_generated < params.min_tokens else ()


def listed(params: SamplingParams, words: int) -> int:
    """How many log probabilities are told beside the token's own; -1 if not even that."""
    return -1 if params.logprobs is None else min(params.logprobs, words)


def draw(
    logits: Logits,
    params: SamplingParams,
    *,
    history: Sequence[int],
    num_prompt: int,
    seed: int,
    eos_token_ids: Sequence[int] = (),
    allowed: Mask | None = None,
) -> Drawn | None:
    """The token that follows ``history``, the first ``num_prompt`` of which are the prompt. ``allowed``: no other one,
    whatever ``min_tokens`` says; at least one that the model has.

    None if a logit is not a finite number: then nothing can be drawn. Ids that the model doesn't have are ignored.
    """
    if not np.isfinite(logits).all():
        return None
    if len(logits) > MOST_WORDS:
        raise ModelError(f"the model has {len(logits)} tokens; the sampling knows {MOST_WORDS} at most")
    if allowed is None and is_plain_greedy(params, len(history) - num_prompt):
        return Drawn(int(logits.argmax()))
    scores = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # no logit of use is that large
        _bias(scores, params)
        _penalise(scores, params, history, num_prompt)
    if allowed is None:
        _forbid(scores, forbidden_now(params, len(history) - num_prompt, eos_token_ids))
    else:
        scores[~spread(allowed, len(scores))] = -np.inf
    if is_greedy(params):
        token = int(scores.argmax())  # the first of equals
    else:
        weights = weights_of(rounded(scores), params.temperature)
        token = pick(filtered(weights, params), uniform(seed, len(history)))
    return Drawn(token, _logprobs(logits, token, listed(params, len(logits))))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only these two determine."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def rounded(scores: Scores) -> Logits:
    """Round to the nearest float32, at most the largest finite one. What is forbidden stays infinite."""
    narrow: Logits = np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32)
    narrow[scores == -np.inf] = -np.inf
    return narrow


def weights_of(scores: Logits, temperature: float) -> Weights:
    """How often each token is drawn, in units."""
    inverse = np.float32(min(1.0 / temperature, _LARGEST))
    with np.errstate(over="ignore", under="ignore"):
        scaled = (scores - scores.max()) * inverse
    weights: Weights = np.zeros(len(scores), np.int64)
    near = np.flatnonzero(scaled > -26)  # all others have less than half a unit
    weights[near] = np.rint(_exponential(scaled[near]).astype(np.float64) * WHOLE).astype(np.int64)
    return weights


def filtered(weights: Weights, params: SamplingParams) -> Weights:
    """The weights after top-k, top-p and min-p; 0 for what is filtered out."""
    kept = np.argsort(-weights, kind="stable")
    kept = kept[weights[kept] > 0]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        before = np.cumsum(weights[kept]) - weights[kept]
        kept = kept[before < math.ceil(float(weights[kept].sum()) * params.top_p)]
    if params.min_p > 0.0:
        kept = kept[weights[kept] >= math.ceil(params.min_p * WHOLE)]
    left: Weights = np.zeros_like(weights)
    left[kept] = weights[kept]
    return left


def pick(weights: Weights, chance: float) -> int:
    """The first token up to which the weights sum up to more than this share of all."""
    cumulated = np.cumsum(weights)
    total = int(cumulated[-1])
    goal = min(int(chance * float(total)), total - 1)
    return int(np.searchsorted(cumulated, goal, side="right"))


def _bias(scores: Scores, params: SamplingParams) -> None:
    for token, bias in params.logit_bias.items():
        if token < len(scores):
            scores[token] += bias


def _penalise(scores: Scores, params: SamplingParams, history: Sequence[int], num_prompt: int) -> None:
    tokens = np.asarray(history, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(tokens[tokens < len(scores)])
        found = scores[seen]
        scores[seen] = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        answer = tokens[num_prompt:]
        said, counts = np.unique(answer[answer < len(scores)], return_counts=True)
        scores[said] -= params.presence_penalty + params.frequency_penalty * counts


def spread(mask: Mask, words: int) -> NDArray[np.bool_]:
    """A truth value for each of so many tokens."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=words, bitorder="little")
    return bits.view(np.bool_)


def _forbid(scores: Scores, tokens: Sequence[int]) -> None:
    known = [token for token in tokens if token < len(scores)]
    if len(set(known)) < len(scores):  # never all of them
        scores[known] = -np.inf


# Coefficients as float32, the highest power first.
_SERIES = [
    np.float32(each) for each in (1.98412698e-4, 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5)
]


def _exponential(x: Logits) -> Logits:
    """e to the x, of x between -26 and 0: as ``weight_of_word`` in weights.h, operation by operation."""
    n = np.rint(x * np.float32(1.44269504))
    rest = fused(-n, np.float32(0.693145752), x)
    rest = fused(-n, np.float32(1.42860677e-6), rest)
    total: Logits = np.full_like(x, _SERIES[0])
    for coefficient in (*_SERIES[1:], np.float32(1), np.float32(1)):
        total = fused(total, rest, coefficient)
    power: Logits = np.ldexp(total, n.astype(np.int32))
    return power


def fused(a: Logits, b: Logits | np.float32, c: Logits | np.float32) -> Logits:
    """``a * b + c`` in float32, rounded once.

    In float64 the product is exact. The sum is not, but made odd in its last bit wherever something was lost, it rounds
    to float32 as the exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    product, addend = a.astype(np.float64) * np.float64(b), np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    taken = total - product
    lost = (product - (total - taken)) + (addend - taken)
    even = total.view(np.int64) & 1 == 0
    outwards = np.where((lost > 0) == (total > 0), 1, -1)
    odd = total.view(np.int64) + np.where(even & (lost != 0), outwards, 0)
    narrow: Logits = odd.view(np.float64).astype(np.float32)
    return narrow


def _logprobs(logits: Logits, token: int, count: int) -> tuple[TokenLogprob, ...]:
    if count < 0:
        return ()
    total = logarithm(float(weights_of(logits, 1.0).sum()) / WHOLE)
    top = float(logits.max())
    best = np.argsort(-logits, kind="stable")[:count]
    return tuple(TokenLogprob(int(each), float(logits[each]) - top - total) for each in (token, *best))


def logarithm(number: float) -> float:
    """The natural logarithm of a number from 1 on: of its power of two, and of what is left by the series of artanh."""
    part, power = math.frexp(number)
    if part < 0.70710678118654752:
        part, power = part * 2, power - 1
    ratio = (part - 1) / (part + 1)
    square, series = ratio * ratio, 0.0
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    return 2 * ratio * series + power * 0.69314718055994531

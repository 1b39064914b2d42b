"""Sampling rule: logits in, a token out. A pure function, so that a token depends on its own sequence alone. No torch
here.

This module is the plain reference. The kernel (``native/kernels/sampling.h``) computes the same bits without sorting;
where the kernel is missing, this module draws.

**The score** of a token is its logit, changed in this order: its bias is added; it is divided by the repetition
penalty, or multiplied if it is not positive (tokens of the prompt and of the answer); the presence penalty and, for
each occurrence in the answer, the frequency penalty are subtracted. In float64. ``min_tokens`` forbids the end tokens,
unless no other token is left. Where a grammar restricts the tokens (``grammars``, which includes ``min_tokens``), all
others are forbidden. Temperature 0 and a top-k of 1 take the largest score.

**The weight** of a token is e to the (score - largest) / temperature, in float32 (scores are rounded to it and
multiplied by the inverse of the temperature), rounded to a whole number of units of 2^-36. The exponential is one
series of multiplications and additions, each rounded once (:func:`_exponential`), so no library decides its bits.

**The draw.** Weights are ordered: the largest first, among equals the lowest id. Top-k keeps the first k. Top-p keeps
the remaining tokens before which less than this share of the remaining sum lies. Min-p keeps the ones with at least
this share of a whole, which is the largest weight. Sums are of whole numbers, so they are exact, and the order of
addition does not matter. Then one number between 0 and 1 picks the token. Seed and position alone determine it (Philox,
a counter-based generator).

**Log probabilities** are the model's own: of its logits before all of the above. Their sum of exponentials is the sum
of the weights at temperature 1; its logarithm is plain float64 arithmetic.

The largest weight is 2^36 units. A token of less than half a unit is never drawn: all such tokens together have less
than one draw in 500,000 even in a vocabulary of 262,144, which is less than rounding the logits to float32 may shift.
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

FULL_WEIGHT = 2**36  # units of the largest weight
# largest vocabulary, so that sums of weights stay below 2^63; the largest today have 2^18 tokens
MAX_VOCABULARY = 2**20
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and its log probabilities if requested: its own first, then the most likely tokens'."""

    token: int
    logprobs: tuple[TokenLogprob, ...] = ()


def is_greedy(params: SamplingParams) -> bool:
    """Whether the largest score is taken, without randomness."""
    return params.greedy or params.top_k == 1


def is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Whether the largest logit is taken and no other parameter applies."""
    return (
        is_greedy(params)
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and num_generated >= params.min_tokens
    )


def forbidden_tokens(params: SamplingParams, num_generated: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that would end the answer while it has fewer than ``min_tokens`` tokens."""
    return (*eos_token_ids, *params.stop_token_ids) if num_generated < params.min_tokens else ()


def num_listed(params: SamplingParams, words: int) -> int:
    """Return how many log probabilities are reported in addition to the token's own; -1 if none at all."""
    return -1 if params.logprobs is None else min(params.logprobs, words)


def draw_token(
    logits: Logits,
    params: SamplingParams,
    *,
    history: Sequence[int],
    num_prompt: int,
    seed: int,
    eos_token_ids: Sequence[int] = (),
    allowed: Mask | None = None,
) -> SampledToken | None:
    """Return the token that follows ``history``, of which the first ``num_prompt`` tokens are the prompt.

    ``allowed`` restricts the tokens, whatever ``min_tokens`` is; it must contain at least one that the model has.
    Returns None if a logit is not a finite number. Ids that the model does not have are ignored.
    """
    if not np.isfinite(logits).all():
        return None
    if len(logits) > MAX_VOCABULARY:
        raise ModelError(f"the model has {len(logits)} tokens; sampling supports at most {MAX_VOCABULARY}")
    if allowed is None and is_plain_greedy(params, len(history) - num_prompt):
        return SampledToken(int(logits.argmax()))
    scores = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # no useful logit is that large
        _apply_bias(scores, params)
        _apply_penalties(scores, params, history, num_prompt)
    if allowed is None:
        _forbid(scores, forbidden_tokens(params, len(history) - num_prompt, eos_token_ids))
    else:
        scores[~unpack_mask(allowed, len(scores))] = -np.inf
    if is_greedy(params):
        token = int(scores.argmax())  # the first of equals
    else:
        weights = compute_weights(round_scores(scores), params.temperature)
        token = pick_token(filter_weights(weights, params), uniform_draw(seed, len(history)))
    return SampledToken(token, _logprobs(logits, token, num_listed(params, len(logits))))


def uniform_draw(seed: int, position: int) -> float:
    """Return a number in [0, 1) that only seed and position determine."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def round_scores(scores: Scores) -> Logits:
    """Round to the nearest float32, at most the largest finite one. Forbidden tokens stay at minus infinity."""
    narrow: Logits = np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32)
    narrow[scores == -np.inf] = -np.inf
    return narrow


def compute_weights(scores: Logits, temperature: float) -> Weights:
    """Return each token's relative frequency of being drawn, in units."""
    inverse = np.float32(min(1.0 / temperature, _LARGEST))
    with np.errstate(over="ignore", under="ignore"):
        scaled = (scores - scores.max()) * inverse
    weights: Weights = np.zeros(len(scores), np.int64)
    near = np.flatnonzero(scaled > -26)  # all others have less than half a unit
    weights[near] = np.rint(_exponential(scaled[near]).astype(np.float64) * FULL_WEIGHT).astype(np.int64)
    return weights


def filter_weights(weights: Weights, params: SamplingParams) -> Weights:
    """Return the weights after top-k, top-p and min-p; tokens that are filtered out get 0."""
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] > 0]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        order = order[before < math.ceil(float(weights[order].sum()) * params.top_p)]
    if params.min_p > 0.0:
        order = order[weights[order] >= math.ceil(params.min_p * FULL_WEIGHT)]
    left: Weights = np.zeros_like(weights)
    left[order] = weights[order]
    return left


def pick_token(weights: Weights, uniform_value: float) -> int:
    """Return the first token at which the cumulated weights exceed this share of the total."""
    cumulated = np.cumsum(weights)
    total = int(cumulated[-1])
    goal = min(int(uniform_value * float(total)), total - 1)
    return int(np.searchsorted(cumulated, goal, side="right"))


def _apply_bias(scores: Scores, params: SamplingParams) -> None:
    for token, bias in params.logit_bias.items():
        if token < len(scores):
            scores[token] += bias


def _apply_penalties(scores: Scores, params: SamplingParams, history: Sequence[int], num_prompt: int) -> None:
    tokens = np.asarray(history, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        token_ids = np.unique(tokens[tokens < len(scores)])
        token_scores = scores[token_ids]
        scores[token_ids] = np.where(
            token_scores > 0, token_scores / params.repetition_penalty, token_scores * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        answer = tokens[num_prompt:]
        answer_ids, counts = np.unique(answer[answer < len(scores)], return_counts=True)
        scores[answer_ids] -= params.presence_penalty + params.frequency_penalty * counts


def unpack_mask(mask: Mask, words: int) -> NDArray[np.bool_]:
    """Return the mask as one truth value per token."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=words, bitorder="little")
    return bits.view(np.bool_)


def _forbid(scores: Scores, tokens: Sequence[int]) -> None:
    valid = [token for token in tokens if token < len(scores)]
    if len(set(valid)) < len(scores):  # never forbid all of them
        scores[valid] = -np.inf


# Coefficients as float32, the highest power first.
_SERIES = [
    np.float32(each) for each in (1.98412698e-4, 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5)
]


def _exponential(x: Logits) -> Logits:
    """Return e to the x, for x between -26 and 0: the same operations as ``weight_of_word`` in weights.h."""
    n = np.rint(x * np.float32(1.44269504))
    rest = fused_multiply_add(-n, np.float32(0.693145752), x)
    rest = fused_multiply_add(-n, np.float32(1.42860677e-6), rest)
    total: Logits = np.full_like(x, _SERIES[0])
    for coefficient in (*_SERIES[1:], np.float32(1), np.float32(1)):
        total = fused_multiply_add(total, rest, coefficient)
    power: Logits = np.ldexp(total, n.astype(np.int32))
    return power


def fused_multiply_add(a: Logits, b: Logits | np.float32, c: Logits | np.float32) -> Logits:
    """Return ``a * b + c`` in float32, rounded once.

    In float64 the product is exact. The sum is not, but if its last bit is set to odd wherever something was lost, it
    rounds to float32 as the exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
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
    total = logarithm(float(compute_weights(logits, 1.0).sum()) / FULL_WEIGHT)
    top = float(logits.max())
    best = np.argsort(-logits, kind="stable")[:count]
    return tuple(TokenLogprob(int(each), float(logits[each]) - top - total) for each in (token, *best))


def logarithm(number: float) -> float:
    """Return the natural logarithm of a number of at least 1: of its power of two, and of the rest by the series of
    artanh."""
    part, power = math.frexp(number)
    if part < 0.70710678118654752:
        part, power = part * 2, power - 1
    ratio = (part - 1) / (part + 1)
    square, series = ratio * ratio, 0.0
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    return 2 * ratio * series + power * 0.69314718055994531

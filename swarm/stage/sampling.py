"""Logits in, a token out: a pure function, so that a token depends on its own sequence alone. No torch in here.

In this order: logit bias; repetition penalty (tokens of the prompt and of the answer), presence and frequency penalty
(tokens of the answer only); ``min_tokens`` forbids the ends; temperature; top-k; top-p over what is left; min-p over
what is left. Then one number between 0 and 1, which seed and position alone determine (Philox, a counter-based
generator), picks from the cumulated weights in the order of token ids. Temperature 0 takes the largest logit instead.
Among equals, the lowest id wins. Log probabilities are the model's own: of its logits before all of the above.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and log probabilities if they were asked for: its own first, then the most likely ones."""

    token: int
    logprobs: tuple[TokenLogprob, ...] = ()


def is_plain_greedy(params: SamplingParams, num_generated: int) -> bool:
    """Does the largest logit decide, with nothing else asked for?"""
    return (
        params.greedy
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and num_generated >= params.min_tokens
    )


def draw(
    logits: Logits,
    params: SamplingParams,
    *,
    history: Sequence[int],
    num_prompt: int,
    seed: int,
    eos_token_ids: Sequence[int] = (),
) -> Drawn:
    """The token that follows ``history``, the first ``num_prompt`` of which are the prompt.

    Raises ModelError if a logit is not a finite number. Biases of ids that the model doesn't have are ignored.
    """
    if not np.isfinite(logits).all():
        raise ModelError("the model gave logits that are not finite numbers; its weights or its dtype are unfit")
    model_scores = logits.astype(np.float64)
    scores = model_scores.copy()
    _bias(scores, params)
    _penalise(scores, params, history, num_prompt)
    if len(history) - num_prompt < params.min_tokens:
        _forbid(scores, (*eos_token_ids, *params.stop_token_ids))
    token = _largest(scores) if params.greedy else _pick(_weights(scores, params), uniform(seed, len(history)))
    return Drawn(token, _logprobs(model_scores, token, params.logprobs))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that only these two determine."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def _bias(scores: Scores, params: SamplingParams) -> None:
    for token, bias in params.logit_bias.items():
        if token < len(scores):
            scores[token] += bias


def _penalise(scores: Scores, params: SamplingParams, history: Sequence[int], num_prompt: int) -> None:
    if params.repetition_penalty != 1.0 and len(history):
        seen = np.unique(np.asarray(history, dtype=np.int64))
        found = scores[seen]
        scores[seen] = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(history) > num_prompt:
        said, counts = np.unique(np.asarray(history[num_prompt:], dtype=np.int64), return_counts=True)
        scores[said] -= params.presence_penalty + params.frequency_penalty * counts


def _forbid(scores: Scores, tokens: Sequence[int]) -> None:
    known = [token for token in tokens if token < len(scores)]
    if len(set(known)) < len(scores):  # never all of them
        scores[known] = -np.inf


def _largest(scores: Scores) -> int:
    return int(scores.argmax())  # the first of equals


def _weights(scores: Scores, params: SamplingParams) -> Scores:
    """Weights after temperature and the filters; 0 for what is filtered out."""
    scaled = (scores - scores.max()) / params.temperature
    weights: Scores = np.exp(scaled)
    if 0 < params.top_k < len(weights):
        _keep_first(weights, params.top_k)
    if params.top_p < 1.0:
        order = _by_weight(weights)
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0.0
    if params.min_p > 0.0:
        weights[weights < params.min_p * weights.max()] = 0.0
    return weights


def _keep_first(weights: Scores, count: int) -> None:
    """Keep the ``count`` largest; of those that equal the smallest kept, the lowest ids."""
    edge = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = weights > edge
    spare = count - int(above.sum())
    above[np.flatnonzero(weights == edge)[:spare]] = True
    weights[~above] = 0.0


def _by_weight(weights: Scores) -> NDArray[np.int64]:
    """Ids of nonzero weights, the largest first, the lowest id first among equals."""
    ids = np.flatnonzero(weights)
    return ids[np.argsort(-weights[ids], kind="stable")]


def _pick(weights: Scores, chance: float) -> int:
    cumulated = np.cumsum(weights)
    token = int(np.searchsorted(cumulated, chance * cumulated[-1], side="right"))
    # Rounding can land on the very end; then it is the last token that has any weight.
    return token if token < len(weights) and weights[token] > 0 else int(np.flatnonzero(weights)[-1])


def _logprobs(scores: Scores, token: int, count: int | None) -> tuple[TokenLogprob, ...]:
    if count is None:
        return ()
    top = scores.max()
    logs = scores - (top + np.log(np.exp(scores - top).sum()))
    best = _best(scores, min(count, len(scores)))
    return tuple(TokenLogprob(int(each), float(logs[each])) for each in (token, *best))


def _best(scores: Scores, count: int) -> list[int]:
    if count == 0:
        return []
    edge = np.partition(scores, len(scores) - count)[len(scores) - count]
    ids = np.flatnonzero(scores >= edge)
    return [int(each) for each in ids[np.argsort(-scores[ids], kind="stable")][:count]]

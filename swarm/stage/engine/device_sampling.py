"""Sampling of tokens on a device other than a CPU: the rule in ``sampling``, for many rows at once.

The logits stay on the device; only the drawn tokens and requested log probabilities are copied to the host.

The results have the CPU's bits, because nothing here depends on a library's rounding: comparisons, gathers, sums of
whole numbers, and additions, multiplications and divisions that IEEE 754 defines to the last bit, one operation at a
time. The exponential is the rule's own series, and the logarithm is computed on the host. Ties are broken by index with
comparisons, not by the device's argmax. A device may round otherwise (mps has no float64, and a compiler may fuse two
operations), so a device is compared with the CPU before its first draw (:func:`is_exact`). If it differs, rows are
copied to the host and drawn there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from swarm.log import get_logger
from swarm.stage.engine import sampling as rule
from swarm.stage.engine.sampling import FULL_WEIGHT, MAX_VOCABULARY, SampledToken
from swarm.wire.messages import TokenLogprob

if TYPE_CHECKING:
    from swarm.stage.engine.sampling import Mask
    from swarm.stage.executor import SampleJob

_LARGEST: Final = float(np.finfo(np.float32).max)
_MAX_NUMBERS: Final = 1 << 24  # logits of one block of rows: bounds the memory of float64 intermediates
_PROBE_SCORES: Final = 1 << 16  # numbers whose weights are compared with the CPU's

log = get_logger(__name__)


def supports(logits: torch.Tensor) -> bool:
    """Whether these rows are drawn on their device."""
    if logits.device.type == "cpu":  # its own kernel draws
        return False
    return logits.shape[-1] <= MAX_VOCABULARY and is_exact(logits.device)


@functools.cache
def is_exact(device: torch.device) -> bool:
    """Whether the device computes the weights and sums of random scores with the CPU's bits."""
    chance = np.random.default_rng(11)
    scores = (chance.normal(size=(4, _PROBE_SCORES // 4)) * [[0.3], [1], [4], [20]]).astype(np.float32)
    temperatures = (1.0, 0.7, 0.3, 10.0)
    inverses = np.asarray([1 / each for each in temperatures], np.float32)
    try:
        weights = _compute_weights(torch.from_numpy(scores).to(device), torch.from_numpy(inverses).to(device))
        sums, order = weights.cumsum(-1), weights.sort(dim=-1, descending=True, stable=True).indices
        found = [each.cpu().numpy() for each in (weights, sums, order)]
    except (RuntimeError, TypeError) as error:  # torch's errors for a dtype that the device does not have
        log.warning("sampling_on_host", device=str(device), why=str(error))
        return False
    expected = np.stack([rule.compute_weights(row, by) for row, by in zip(scores, temperatures, strict=True)])
    is_same = (
        np.array_equal(found[0], expected)
        and np.array_equal(found[1], expected.cumsum(-1))
        and np.array_equal(found[2], np.argsort(-expected, axis=-1, kind="stable"))
    )
    if not is_same:
        log.warning("sampling_on_host", device=str(device), why="the device rounds otherwise than a CPU")
    return is_same


def sample_rows_on_device(
    logits: torch.Tensor, jobs: Sequence[SampleJob], eos_token_ids: Sequence[int], masks: Sequence[Mask | None] = ()
) -> list[SampledToken | None]:
    """Draw the token after each job's history, from the row with the job's index. None where a logit is not a finite
    number.

    ``masks`` holds the tokens that are allowed in each row; without it, all tokens are allowed.
    """
    size = max(1, _MAX_NUMBERS // max(1, logits.shape[-1]))
    drawn: list[SampledToken | None] = []
    with torch.inference_mode():
        for first in range(0, len(jobs), size):
            block = slice(first, first + size)
            drawn += _Rows(logits[block], jobs[block], eos_token_ids, masks[block]).draw()
    return drawn


@dataclass(frozen=True, slots=True)
class _Touched:
    """Tokens of one row whose scores are not their logits, by id, and how each score is changed."""

    ids: np.ndarray
    biases: np.ndarray
    divided: np.ndarray  # whether the repetition penalty applies
    subtracted: np.ndarray
    forbidden: np.ndarray

    @classmethod
    def of(cls, job: SampleJob, words: int, eos_token_ids: Sequence[int], *, has_mask: bool) -> _Touched:
        params, history = job.params, np.asarray(job.history, np.int64)
        biases = {token: bias for token, bias in params.logit_bias.items() if token < words}
        divided = _known(history, words) if params.repetition_penalty != 1.0 else history[:0]
        answer, counts = history[:0], history[:0]
        if params.presence_penalty or params.frequency_penalty:
            answer, counts = np.unique(_known(history[job.num_prompt :], words), return_counts=True)
        forbidden = {
            token
            for token in rule.forbidden_tokens(params, len(history) - job.num_prompt, eos_token_ids)
            if token < words and not has_mask
        }
        if len(forbidden) == words:
            forbidden = set()  # never forbid all of them
        biased, barred = np.fromiter(biases, np.int64), np.fromiter(forbidden, np.int64)
        ids = np.unique(np.concatenate([biased, divided, answer, barred]))
        found = cls(ids, np.zeros(len(ids)), np.isin(ids, divided), np.zeros(len(ids)), np.isin(ids, barred))
        found.biases[np.searchsorted(ids, biased)] = np.fromiter(biases.values(), np.float64)
        found.subtracted[np.searchsorted(ids, answer)] = params.presence_penalty + params.frequency_penalty * counts
        return found


def _known(tokens: np.ndarray, words: int) -> np.ndarray:
    return tokens[tokens < words]


class _Rows:
    """Rows of logits and their jobs."""

    def __init__(
        self,
        logits: torch.Tensor,
        jobs: Sequence[SampleJob],
        eos_token_ids: Sequence[int],
        masks: Sequence[Mask | None],
    ) -> None:
        self._logits = logits
        self._jobs = jobs
        self._eos_token_ids = eos_token_ids
        self._masks = masks
        self._words = logits.shape[-1]
        self._finite = logits.isfinite().all(-1)

    def draw(self) -> list[SampledToken | None]:
        if self._is_plain_greedy():
            tokens = _first_largest(self._logits)
            return [SampledToken(token) if token >= 0 else None for token in self._finite_only(tokens)]
        self._logits = torch.where(self._finite.unsqueeze(-1), self._logits, 0).float()
        scores = self._scores()
        tokens = _first_largest(scores)
        if not all(rule.is_greedy(job.params) for job in self._jobs):
            greedy = self._column([rule.is_greedy(job.params) for job in self._jobs], torch.bool).squeeze(-1)
            tokens = torch.where(greedy, tokens, self._pick(self._filter(self._weigh(scores))))
        drawn = self._finite_only(tokens)
        logprobs = self._logprobs(tokens)
        return [SampledToken(token, logprobs.get(row, ())) if token >= 0 else None for row, token in enumerate(drawn)]

    def _is_plain_greedy(self) -> bool:
        return not any(mask is not None for mask in self._masks) and all(
            rule.is_plain_greedy(job.params, len(job.history) - job.num_prompt) for job in self._jobs
        )

    def _finite_only(self, tokens: torch.Tensor) -> list[int]:
        """Return the tokens, on the host; -1 for a row whose logits are not all finite."""
        on_host: list[int] = torch.where(self._finite, tokens, -1).cpu().tolist()
        return on_host

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._logits.device)

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Return one number per row, on the device."""
        return torch.tensor(values, dtype=dtype).to(self._logits.device).unsqueeze(-1)

    def _scores(self) -> torch.Tensor:
        """Return the scores in float64."""
        scores = self._logits.double()
        masks = self._masks or [None] * len(self._jobs)
        touched = [
            _Touched.of(job, self._words, self._eos_token_ids, has_mask=mask is not None)
            for job, mask in zip(self._jobs, masks, strict=True)
        ]
        if any(len(each.ids) for each in touched):
            self._change(scores, touched)
        for row, mask in enumerate(masks):
            if mask is not None:
                allowed = self._to_device(rule.unpack_mask(mask, self._words))
                scores[row] = torch.where(allowed, scores[row], -torch.inf)
        return scores

    def _change(self, scores: torch.Tensor, touched: Sequence[_Touched]) -> None:
        """Apply biases, penalties and bans, in the rule's order."""
        flat = scores.view(-1)
        places = self._to_device(np.concatenate([row * self._words + each.ids for row, each in enumerate(touched)]))
        penalties = self._to_device(
            np.concatenate(
                [
                    np.full(len(each.ids), job.params.repetition_penalty)
                    for job, each in zip(self._jobs, touched, strict=True)
                ]
            )
        )
        biases, divided, subtracted, forbidden = (
            self._to_device(np.concatenate([getattr(each, name) for each in touched]))
            for name in ("biases", "divided", "subtracted", "forbidden")
        )
        values = flat[places] + biases
        penalised = torch.where(values > 0, values / penalties, values * penalties)
        values = torch.where(divided, penalised, values) - subtracted
        flat[places] = torch.where(forbidden, -torch.inf, values)

    def _weigh(self, scores: torch.Tensor) -> torch.Tensor:
        rounded = scores.clamp(-_LARGEST, _LARGEST).float()
        rounded = torch.where(scores == -torch.inf, -torch.inf, rounded)
        inverses = [
            1.0 if rule.is_greedy(job.params) else min(1.0 / job.params.temperature, _LARGEST) for job in self._jobs
        ]
        return _compute_weights(rounded, self._column(inverses, torch.float32).squeeze(-1))

    def _filter(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights after top-k, top-p and min-p; tokens that are filtered out get 0."""
        params = [job.params for job in self._jobs]
        if any(each.top_k > 0 or each.top_p < 1.0 for each in params):
            ordered, order = weights.sort(dim=-1, descending=True, stable=True)
            top_k = self._column([each.top_k if each.top_k > 0 else self._words for each in params], torch.int64)
            rank = torch.arange(self._words, device=weights.device)
            ordered = torch.where(rank < top_k, ordered, 0)
            before = ordered.cumsum(-1) - ordered
            shares = self._column([each.top_p for each in params], torch.float64)
            limits = (ordered.sum(-1, keepdim=True).double() * shares).ceil().long()
            is_all = self._column([each.top_p >= 1.0 for each in params], torch.bool)
            ordered = torch.where(is_all | (before < limits), ordered, 0)
            weights = torch.zeros_like(weights).scatter(-1, order, ordered)
        if any(each.min_p > 0.0 for each in params):
            least = [_min_weight(each.min_p) for each in params]
            weights = torch.where(weights >= self._column(least, torch.int64), weights, 0)
        return weights

    def _pick(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the first token at which the cumulated weights exceed the drawn share of the total."""
        cumulated = weights.cumsum(-1)
        total = cumulated[:, -1:]
        draws = self._column([rule.uniform_draw(job.seed, len(job.history)) for job in self._jobs], torch.float64)
        goal = torch.minimum((draws * total.double()).long(), total - 1)
        return (cumulated <= goal).sum(-1)

    def _logprobs(self, tokens: torch.Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
        """Return the log probabilities of the rows whose jobs request them."""
        counts = [rule.num_listed(job.params, self._words) for job in self._jobs]
        rows = [row for row, count in enumerate(counts) if count >= 0]
        if not rows:
            return {}
        places = torch.tensor(rows).to(tokens.device)
        logits, most = self._logits[places], max(counts)
        totals = _compute_weights(logits, torch.ones(len(rows)).to(tokens.device)).sum(-1)
        best = (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :most]  # 0.0: -0.0 equals it
        ids = torch.cat([tokens[places].unsqueeze(-1), best], -1)
        values, largest = logits.gather(-1, ids).tolist(), logits.amax(-1).tolist()
        sums = [rule.logarithm(float(total) / FULL_WEIGHT) for total in totals.tolist()]
        return {
            row: tuple(
                TokenLogprob(token, value - top - total)
                for token, value in list(zip(row_ids, row_values, strict=True))[: 1 + counts[row]]
            )
            for row, row_ids, row_values, top, total in zip(rows, ids.tolist(), values, largest, sums, strict=True)
        }


def _min_weight(min_p: float) -> int:
    exact = min_p * FULL_WEIGHT
    whole = int(exact)
    return whole + (whole < exact)


def _first_largest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest number; of equals, the first."""
    words = numbers.shape[-1]
    places = torch.arange(words, device=numbers.device)
    return torch.where(numbers == numbers.amax(-1, keepdim=True), places, words).amin(-1)


def _compute_weights(scores: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """Return the weights of float32 scores, as ``sampling.compute_weights`` does row by row."""
    scaled = (scores - scores.amax(-1, keepdim=True)) * inverses.unsqueeze(-1)
    is_near = scaled > -26
    powers = _exponential(torch.where(is_near, scaled, 0))
    return torch.where(is_near, (powers.double() * FULL_WEIGHT).round().long(), 0)


# As in ``sampling``: coefficients of the series, the highest power first, and ln 2 in two parts, all in float32.
_SERIES: Final = tuple(
    float(np.float32(each))
    for each in (1.98412698e-4, 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1, 1)
)
_LOG2_E: Final = float(np.float32(1.44269504))
_LN2_HIGH: Final = float(np.float32(0.693145752))
_LN2_LOW: Final = float(np.float32(1.42860677e-6))


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """Return e to the x, for x between -26 and 0, by the operations of ``sampling._exponential``."""
    n = (x * _LOG2_E).round()
    rest = _fused_multiply_add(-n, _LN2_HIGH, x)
    rest = _fused_multiply_add(-n, _LN2_LOW, rest)
    total = torch.full_like(x, _SERIES[0])
    for coefficient in _SERIES[1:]:
        total = _fused_multiply_add(total, rest, coefficient)
    power = ((n.int() + 127) << 23).view(torch.float32)  # 2 to the n: the exponent's bits
    return total * power


def _fused_multiply_add(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Return ``a * b + c`` in float32, rounded once: see ``sampling.fused_multiply_add``."""
    product = a.double() * b
    addend = c.double() if isinstance(c, torch.Tensor) else c
    total = product + addend
    taken = total - product
    lost = (product - (total - taken)) + (addend - taken)
    bits = total.view(torch.int64)
    outwards = torch.where((lost > 0) == (total > 0), 1, -1)
    bits = bits + torch.where((bits & 1 == 0) & (lost != 0), outwards, 0)
    return bits.view(torch.float64).float()

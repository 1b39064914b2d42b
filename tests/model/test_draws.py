"""The kernel that draws tokens: the same ones as the rule written plainly, in every variant."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarm.params import SamplingParams
from swarm.stage import native
from swarm.stage.engine.batch_sampling import sample_rows
from swarm.stage.engine.native_sampling import sample_rows_native, supports
from swarm.stage.engine.sampling import SampledToken
from swarm.stage.executor import SampleJob

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

ENDS = (0, 2)
SIZES = (1, 2, 7, 16, 17, 100, 1023, 1024, 1025, 3001)
LARGE = (32_000, 151_936, 262_144, 262_145)
DTYPES = (torch.float32, torch.bfloat16)


def variants() -> list[str]:
    library = native.library()
    return [] if library is None else native.variants(library)


def some_logits(chance: np.random.Generator, words: int) -> torch.Tensor:
    """Flat, peaked, with many equals, in order of size, with one far above the others or near the ends of float32."""
    row = chance.normal(size=words) * chance.choice([0, 0.01, 1, 2, 5, 20, 1000])
    shape = chance.integers(8)
    if shape == 0:
        row = np.round(row)
    elif shape == 1:
        row = np.sort(row)
    elif shape == 2:
        row[chance.integers(words)] += 50
    elif shape == 3:
        row[chance.integers(words)] = chance.choice([3e38, -3e38])
    return torch.from_numpy(row.astype(np.float32)).to(DTYPES[chance.integers(2)])


def some_job(chance: np.random.Generator, words: int) -> SampleJob:
    history = chance.integers(words + 3, size=chance.choice([1, 3, 50, 400])).tolist()
    biased = chance.integers(words + 2, size=chance.choice([0, 0, 3, 20])).tolist()
    logprobs = int(chance.choice([-1, -1, 0, 1, 5, 20]))
    params = SamplingParams(
        temperature=float(chance.choice([0, 0.7, 0.7, 1, 1, 0.01, 5, 100, 1e-30, 1e-320])),
        top_k=int(chance.choice([0, 0, 1, 2, 50, 1000])),
        top_p=float(chance.choice([1, 1, 0.95, 0.5, 0.01, 0.999999, 1 - 2**-53])),
        min_p=float(chance.choice([0, 0, 0.05, 1e-9, 0.5, 1])),
        repetition_penalty=float(chance.choice([1, 1, 1.3, 0.5, 1e-320])),
        presence_penalty=float(chance.choice([0, 0, 1, -2])),
        frequency_penalty=float(chance.choice([0, 0, 0.3, -0.1])),
        logit_bias={each: float(chance.choice([1, -3, 100, -1000, 1000])) for each in biased},
        min_tokens=int(chance.choice([0, 0, 2, 5000])),
        stop_token_ids=tuple(chance.integers(words + 2, size=2).tolist()),
        logprobs=None if logprobs < 0 else logprobs,
    )
    return SampleJob(0, params, int(chance.integers(2**63)), history, int(chance.integers(1, len(history) + 1)))


def some_mask(chance: np.random.Generator, words: int) -> np.ndarray | None:
    """What a grammar allows: everything where there is none, one token, few, about half, all."""
    share = chance.choice([-1, -1, 0, 0.01, 0.5, 0.99, 1])
    if share < 0:
        return None
    allowed = chance.random(words) < share
    allowed[chance.integers(words)] = True
    mask = np.zeros(-(-words // 32) * 4, np.uint8)
    packed = np.packbits(allowed, bitorder="little")
    mask[: len(packed)] = packed
    return mask.view("<u4")


def rows_of(row: torch.Tensor) -> torch.Tensor:
    assert supports(row[None])
    return row[None]


@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize("seed", range(4))
def test_every_variant_follows_the_rule(name: str, seed: int) -> None:
    """Thousands of rows of any shape with parameters of any kind: tokens and log probabilities, bit for bit."""
    chance = np.random.default_rng(seed)
    for _ in range(500):
        words = int(chance.choice(SIZES))
        row, job, mask = some_logits(chance, words), some_job(chance, words), some_mask(chance, words)
        with native.using_variant(name):
            found = sample_rows_native(rows_of(row), [job], ENDS, 1, [mask])
        assert found == sample_rows(row[None], [job], ENDS, [mask]), (words, job, mask)


@pytest.mark.parametrize("words", LARGE)
def test_large_vocabularies_follow_the_rule(words: int) -> None:
    """So do those that models have."""
    chance = np.random.default_rng(words)
    for _ in range(12):
        row, job, mask = some_logits(chance, words), some_job(chance, words), some_mask(chance, words)
        expected = sample_rows(row[None], [job], ENDS, [mask])
        for name in variants():
            with native.using_variant(name):
                assert sample_rows_native(rows_of(row), [job], ENDS, 1, [mask]) == expected, (name, job)


@pytest.mark.parametrize("name", variants())
def test_what_a_grammar_forbids_is_never_drawn(name: str) -> None:
    """Whatever its logit and its bias; and the log probabilities are those of the model, as if all were allowed."""
    chance = np.random.default_rng(12)
    for _ in range(300):
        words = int(chance.choice(SIZES))
        row, job, mask = some_logits(chance, words), some_job(chance, words), some_mask(chance, words)
        if mask is None:
            continue
        with native.using_variant(name):
            (free,), (bound,) = (sample_rows_native(rows_of(row), [job], ENDS, 1, masks) for masks in ([], [mask]))
        assert free is not None
        assert bound is not None
        assert mask[bound.token >> 5] >> (bound.token & 31) & 1
        assert bound.logprobs[1:] == free.logprobs[1:]


def test_a_mask_is_of_its_own_row_alone() -> None:
    """Rows with and without a grammar side by side: each as alone."""
    rows, jobs = a_crowd(16, 3001)
    chance = np.random.default_rng(4)
    masks = [some_mask(chance, 3001) for _ in jobs]
    found = sample_rows_native(rows, jobs, ENDS, 3, masks)
    assert found == sample_rows(rows, jobs, ENDS, masks)
    assert found == [sample_rows_native(rows[i : i + 1], [job], ENDS, 1, [masks[i]])[0] for i, job in enumerate(jobs)]


@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize("row", ["equal", "one", "two values"])
def test_rows_that_leave_nothing_to_choose_by(name: str, row: str) -> None:
    """All equal, all but one out of reach, many equals on either side of the cut: found like any other."""
    words = 20_001
    logits = torch.full((words,), 1.5 if row == "equal" else -1e30 if row == "one" else 0.25)
    if row == "one":
        logits[17_000] = 3.0
    if row == "two values":
        logits[::3] = 0.5
    chance = np.random.default_rng(3)
    for top_p, top_k in [(1.0, 0), (0.5, 0), (0.95, 0), (1.0, 700), (0.3, 12_000)]:
        params = SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k, logprobs=20)
        job = SampleJob(0, params, int(chance.integers(2**63)), [1], 1)
        with native.using_variant(name):
            found = sample_rows_native(rows_of(logits), [job], ENDS, 1)
        assert found == sample_rows(logits[None], [job], ENDS)


def a_crowd(count: int, words: int) -> tuple[torch.Tensor, list[SampleJob]]:
    chance = np.random.default_rng(count)
    rows = torch.stack([some_logits(chance, words).float() for _ in range(count)])
    return rows, [replace(some_job(chance, words), row=row) for row in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_depends_on_its_own_row_alone(dtype: torch.dtype) -> None:
    """Whoever else is in the batch, at whatever place, with any number of threads, in rows that lie apart."""
    rows, jobs = a_crowd(24, 5003)
    rows = rows.to(dtype)
    alone = [sample_rows_native(rows[index : index + 1], [job], ENDS, 1)[0] for index, job in enumerate(jobs)]
    for threads in (1, 2, 3, 8):
        assert sample_rows_native(rows, jobs, ENDS, threads) == alone
        assert sample_rows_native(rows.flip(0), jobs[::-1], ENDS, threads) == alone[::-1]
    assert sample_rows_native(torch.cat((rows, rows), 1)[:, :5003], jobs, ENDS, 2) == alone


def test_callers_at_the_same_time_disturb_nobody() -> None:
    """Each thread has its own place to work in."""
    rows, jobs = a_crowd(12, 3001)
    alone = sample_rows_native(rows, jobs, ENDS, 1)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda count: sample_rows_native(rows, jobs, ENDS, 1 + count % 3) == alone, range(60)))


def test_what_is_not_finite_is_told() -> None:
    """Of that row alone, wherever in it; the logits are left as they are."""
    rows, jobs = a_crowd(6, 2050)
    alone = sample_rows_native(rows, jobs, ENDS, 1)
    for place, bad in [(0, math.nan), (1024, math.inf), (2049, -math.inf)]:
        broken = rows.clone()
        broken[2, place] = bad
        before = broken.clone()
        assert sample_rows_native(broken, jobs, ENDS, 2) == [*alone[:2], None, *alone[3:]]
        assert sample_rows(broken, jobs, ENDS)[2] is None
        assert torch.equal(torch.nan_to_num(broken), torch.nan_to_num(before))


def test_draws_follow_the_distribution() -> None:
    """Over many positions, every token comes as often as the softmax says, within four standard deviations."""
    logits = torch.from_numpy(np.random.default_rng(8).normal(size=(1, 40)).astype(np.float32))
    count = 20_000
    jobs = [SampleJob(0, SamplingParams(temperature=0.8), 5, range(position), 1) for position in range(1, count + 1)]
    drawn = [sample_rows_native(logits, [job], ENDS, 1)[0] for job in jobs]
    found = Counter(each.token for each in drawn if isinstance(each, SampledToken))
    shares = torch.softmax(logits[0].double() / 0.8, -1).tolist()
    for token, share in enumerate(shares):
        assert abs(found[token] - count * share) < 4 * math.sqrt(count * share * (1 - share)) + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_are_those_of_float64(dtype: torch.dtype) -> None:
    """Within a hundred-thousandth, for flat and for steep rows of a large vocabulary."""
    for scale in (0.1, 2.0, 8.0):
        row = (torch.from_numpy(np.random.default_rng(4).normal(size=(1, 151_936))) * scale).to(dtype)
        (found,) = sample_rows_native(row, [SampleJob(0, SamplingParams(logprobs=20), 0, [1], 1)], ENDS, 2)
        assert found is not None
        exact = torch.log_softmax(row[0].double(), -1)
        assert [each.token for each in found.logprobs[1:]] == torch.topk(exact, 20).indices.tolist() or dtype != DTYPES[
            0
        ]
        for each in found.logprobs:
            assert each.logprob == pytest.approx(float(exact[each.token]), abs=1e-5)

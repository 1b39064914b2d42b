"""Draws on another device than a CPU: the same tokens and log probabilities as the rule written plainly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.params import SamplingParams
from swarm.stage.engine import device_sampling
from swarm.stage.engine.batch_sampling import draw_rows, sample_rows
from swarm.stage.engine.device_sampling import sample_rows_on_device
from swarm.stage.executor import SampleJob
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.location import locate_model
from tests import fake_device
from tests.model.test_draws import SIZES, some_job, some_logits, some_mask

ENDS = (0, 2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("fake", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return fake_device.install() if request.param == "fake" else torch.device(request.param)


def some_rows(chance: np.random.Generator, count: int, words: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all shapes, some with an infinity or a NaN."""
    rows = torch.stack([some_logits(chance, words).float() for _ in range(count)])
    if dtype == torch.float16:
        rows = rows.clamp(-65504, 65504)
    for row in range(count):
        if chance.random() < 0.05:
            rows[row, chance.integers(words)] = float(chance.choice([np.inf, -np.inf, np.nan]))
    return rows.to(dtype)


def test_the_device_is_as_exact_as_a_cpu(device: torch.device) -> None:
    """Weights, sums and order are compared bit for bit before the first draw."""
    assert device_sampling.is_exact(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_draws_are_those_of_the_rule(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Batches of rows of any shape, with parameters and masks of any kind."""
    chance = np.random.default_rng(seed)
    for _ in range(60):
        words, count = int(chance.choice(SIZES)), int(chance.integers(1, 9))
        rows = some_rows(chance, count, words, dtype)
        jobs = [some_job(chance, words) for _ in range(count)]
        masks = [some_mask(chance, words) for _ in range(count)] if chance.random() < 0.5 else []
        drawn = sample_rows_on_device(rows.to(device), jobs, ENDS, masks)
        assert drawn == sample_rows(rows, jobs, ENDS, masks), (words, jobs, masks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_draws_take_the_first_of_equals(device: torch.device, dtype: torch.dtype) -> None:
    """However many are equal, and in whatever row."""
    chance = np.random.default_rng(5)
    jobs = [SampleJob(0, SamplingParams(), 0, (1, 2), 1)] * 64
    rows = torch.from_numpy(chance.integers(0, 3, (64, 1001)).astype(np.float32)).to(dtype)
    assert sample_rows_on_device(rows.to(device), jobs, ()) == sample_rows(rows, jobs, ())


def test_blocks_of_rows_are_drawn_like_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the memory of one block follow in the next."""
    chance, device = np.random.default_rng(8), fake_device.install()
    rows = some_rows(chance, 7, 100, torch.float32)
    jobs = [some_job(chance, 100) for _ in range(7)]
    masks = [some_mask(chance, 100) for _ in range(7)]
    expected = sample_rows_on_device(rows.to(device), jobs, ENDS, masks)
    monkeypatch.setattr(device_sampling, "_MAX_NUMBERS", 300)
    assert sample_rows_on_device(rows.to(device), jobs, ENDS, masks) == expected


def test_only_a_few_numbers_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the vocabulary."""
    device, copied = fake_device.install(), []
    chance = np.random.default_rng(3)
    rows = some_rows(chance, 4, 3001, torch.float32).to(device)
    jobs = [replace(some_job(chance, 3001), params=SamplingParams(temperature=0.7, top_p=0.9, seed=1))] * 4
    device_sampling.is_exact(device)
    unwrapped = fake_device.FakeTensor.cpu
    monkeypatch.setattr(
        fake_device.FakeTensor, "cpu", lambda tensor: (copied.append(tensor.numel()), unwrapped(tensor))[1]
    )
    sample_rows_on_device(rows, jobs, ())
    assert sum(copied) == 4


def test_a_device_that_rounds_otherwise_is_not_trusted(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are copied to the host and drawn there."""
    device = fake_device.install()
    monkeypatch.setattr(fake_device, "break_operation", "round")
    device_sampling.is_exact.cache_clear()
    try:
        assert not device_sampling.is_exact(device)
        monkeypatch.setattr(fake_device, "break_operation", "")
        chance = np.random.default_rng(3)
        rows, job = some_rows(chance, 1, 100, torch.float32), some_job(chance, 100)
        monkeypatch.setattr(device_sampling, "sample_rows_on_device", None)
        manifest = Checkpoint.at(locate_model(str(llama))).manifest("float32")
        assert draw_rows(rows.to(device), [job], manifest, 1) == draw_rows(rows, [job], manifest, 1)
    finally:
        device_sampling.is_exact.cache_clear()

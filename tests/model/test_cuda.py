"""The same model on a CUDA device: what it computes there, beside what a CPU computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.stage.engine.kernel_report import describe_kernels
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.wire.messages import LayerRange
from tests.model.cutting import MANY, Pipeline, nothing, random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOKENS = random_tokens(150, 9)
# Relative to the largest logit.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


def stages(folder: Path, device: str, dtype: str) -> Pipeline:
    found = []
    for layers in (LayerRange(0, 3), LayerRange(3, 8)):
        executor = TorchExecutor(str(folder), device=device, dtype=dtype, memory_limit=MANY)
        executor.prepare(layers, (), 8, nothing)
        executor.activate(layers)
        found.append(executor)
    return Pipeline(found)


def logits(pipeline: Pipeline, chunk: int) -> torch.Tensor:
    pipeline.open(1)
    parts = [pipeline.logits((1, at, TOKENS[at : at + chunk]))[0] for at in range(0, len(TOKENS), chunk)]
    return torch.cat(parts).float().cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_those_of_a_cpu(llama: Path, dtype: str) -> None:
    """Over two stages, as one chunk and in many."""
    expected = logits(stages(llama, "cpu", "float32"), 150)
    pipeline = stages(llama, "cuda", dtype)
    for chunk in (150, 32, 1):
        difference = (logits(pipeline, chunk) - expected).abs().max() / expected.abs().max()
        assert float(difference) < TOLERANCES[dtype], chunk


def test_forks_and_cuts(llama: Path) -> None:
    """A sequence that begins as another one, and one that is cut, go on as the first did."""
    pipeline = stages(llama, "cuda", "float32")
    expected = logits(pipeline, 150)
    for stage in pipeline.stages:
        stage.fork(2, 1, 96, 512)
    forked = pipeline.logits((2, 96, TOKENS[96:]))[0].float().cpu()
    pipeline.truncate(1, 50)
    cut = pipeline.logits((1, 50, TOKENS[50:]))[0].float().cpu()
    for found, start in ((forked, 96), (cut, 50)):
        assert torch.allclose(found, expected[start:], atol=1e-3 * float(expected.abs().max()))


def test_what_is_promised_there(llama: Path) -> None:
    """No test holds a GPU's kernels to the bits, so they are named inexact."""
    executor = stages(llama, "cuda", "float32").stages[0]
    assert "inexact" in describe_kernels(executor._skeleton, executor._active_stage().modules.values())


def test_keys_and_values_take_what_is_counted(llama: Path) -> None:
    """By the GPU's own count; and all is free again at the end."""
    pipeline = stages(llama, "cuda", "float32")
    logits(pipeline, 32)
    pipeline.release(1)
    before = torch.cuda.memory_allocated()
    logits(pipeline, 32)
    counted = sum(stage._arena.allocated_bytes for stage in pipeline.stages)
    assert counted <= torch.cuda.memory_allocated() - before <= counted * 1.05 + (1 << 20)
    pipeline.release(1)
    assert torch.cuda.memory_allocated() - before <= 1 << 20

"""Multi-head latent attention: one latent of a position is all that is stored of it, and that moves like keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.attention.racks import KvShape
from swarm.stage.engine.kernel_report import describe_kernels
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.modules import latents
from swarm.wire.messages import LayerRange
from tests.model.cutting import LIMIT, Pipeline, nothing, random_tokens, ready
from tests.model.models import LATENT, named_config

TOKENS = random_tokens(300, seed=21, vocabulary=251)
WHOLE, HALVES = LayerRange(0, 6), (LayerRange(0, 3), LayerRange(3, 6))
NUMBERS = 40 + 8  # of a latent and of a rotated key
KINDS = ["float32", "bfloat16", "bfloat16 without"]  # our own kernels


@pytest.fixture(scope="module")
def folder(save: Any) -> Path:
    path: Path = save(named_config("deepseek_v3"))
    return path


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind, _, without = str(request.param).partition(" ")
    if without:
        monkeypatch.setattr(native, "library", lambda: None)
    return kind


def test_a_position_takes_one_latent_in_a_layer(folder: Path, dtype: str) -> None:
    """In what is counted for 300 positions, in blocks, and in what is allocated: no key or value of any head."""
    executor, num_bytes = ready(folder, WHOLE, dtype), NUMBERS * (4 if dtype == "float32" else 2)
    assert executor.manifest.kv_bytes_per_token == (num_bytes,) * 6
    pipeline = Pipeline([executor])
    pipeline.open(1)
    free = executor.kv_free_bytes()
    pipeline.logits((1, 0, TOKENS))
    assert free - executor.kv_free_bytes() == 6 * 320 * num_bytes
    for layer in range(6):
        region = executor._arena.region(1, layer)
        assert region is not None
        assert region.shape == KvShape(1, NUMBERS, 0)
        assert (region.keys.nbytes, region.values.nbytes) == (LIMIT * num_bytes, 0)


def test_a_neighbour_continues_from_copies(folder: Path, dtype: str) -> None:
    second = HALVES[1]
    pipeline = Pipeline([ready(folder, layers, dtype) for layers in HALVES])
    pipeline.open(1, 2)
    pipeline.logits((2, 0, random_tokens(50, seed=22, vocabulary=251)))
    pipeline.logits((1, 0, TOKENS[:291]))
    survivor, dead = pipeline.stages
    survivor.keep((second,), nothing, lambda _: False)
    for start in range(0, 267, 96):
        survivor.write_kv(1, LIMIT, dead.read_kv(1, second, start, min(267, start + 96)))
    assert survivor.kv_copy_bytes() == 288 * 3 * NUMBERS * (4 if dtype == "float32" else 2)
    expected = pipeline.logits((1, 291, TOKENS[291:]))[0]
    survivor.prepare(WHOLE, (), 8, nothing)
    survivor.activate(WHOLE)
    survivor.logits(Pipeline.batch((1, 267, TOKENS[267:291])))
    assert torch.equal(survivor.logits(Pipeline.batch((1, 291, TOKENS[291:]))), expected)


def test_a_spare_worker_takes_over_before_it_has_loaded_layers(folder: Path, dtype: str) -> None:
    """It knows the shape of their latents from the configuration."""
    old = Pipeline([ready(folder, WHOLE, dtype)])
    old.open(1)
    old.logits((1, 0, TOKENS[:256]))
    spare = TorchExecutor(str(folder), dtype=dtype, memory_limit=1 << 30)
    spare.write_kv(1, LIMIT, old.stages[0].read_kv(1, WHOLE, 0, 256))
    spare.prepare(WHOLE, (), 8, nothing)
    spare.activate(WHOLE)
    rest = Pipeline.batch((1, 256, TOKENS[256:]))
    assert torch.equal(spare.logits(rest), old.stages[0].logits(rest))


@pytest.mark.parametrize("kind", LATENT)
def test_kernels_are_exact(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        skeleton = ModelSkeleton(named_config(kind), torch.device("cpu"), dtype)
        assert describe_kernels(skeleton, ()).endswith(", exact")


def test_attention_that_expands_latents_otherwise_is_refused() -> None:
    """Its cache would have another size than the manifest counts."""

    class Other(DeepseekV3Attention):
        def expand_kv(self, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ()

    part = Other(named_config("deepseek_v3"), 0)
    with pytest.raises(ModelError, match="Other attends to latents in a way that is not supported"):
        latents.check_known(nn.ModuleList([part]))

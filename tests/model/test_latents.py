"""Multi-head latent attention: one latent of a position is all that is stored of it, and that moves like keys."""

from __future__ import annotations

from dataclasses import dataclass
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
# What a position takes in each layer: a latent of 40 numbers, a rotated key of 8 and, in three of GLM-5's layers, a key
# of their index of 32. The other layers share an index.
NUMBERS = {"deepseek_v3": (48,) * 6, "glm_moe_dsa": (80, 48, 80, 48, 48, 80)}
# Without our own kernels; torch takes seconds for bfloat16 where the processor has no instruction for it.
KINDS = ["float32", "bfloat16", "float32 without", pytest.param("bfloat16 without", marks=pytest.mark.long)]


@dataclass(frozen=True)
class Model:
    folder: Path
    numbers: tuple[int, ...]

    def layer_bytes(self, dtype: str) -> tuple[int, ...]:
        return tuple(number * (4 if dtype == "float32" else 2) for number in self.numbers)


@pytest.fixture(scope="module", params=NUMBERS)
def model(request: pytest.FixtureRequest, save: Any) -> Model:
    return Model(save(named_config(request.param)), NUMBERS[request.param])


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind, _, without = str(request.param).partition(" ")
    if without:
        monkeypatch.setattr(native, "library", lambda: None)
    return kind


def test_a_position_takes_one_latent_in_a_layer(model: Model, dtype: str) -> None:
    """In what is counted for 300 positions, in blocks, and in what is allocated: no key or value of any head. An index
    adds its key."""
    executor, layer_bytes = ready(model.folder, WHOLE, dtype), model.layer_bytes(dtype)
    assert executor.manifest.kv_bytes_per_token == layer_bytes
    pipeline = Pipeline([executor])
    pipeline.open(1)
    free = executor.kv_free_bytes()
    pipeline.logits((1, 0, TOKENS))
    assert free - executor.kv_free_bytes() == 320 * sum(layer_bytes)
    for layer, numbers in enumerate(model.numbers):
        region = executor._arena.region(1, layer)
        assert region is not None
        assert region.shape == KvShape(1, numbers, 0)
        assert (region.keys.nbytes, region.values.nbytes) == (LIMIT * layer_bytes[layer], 0)


def test_a_neighbour_continues_from_copies(model: Model, dtype: str) -> None:
    second = HALVES[1]
    pipeline = Pipeline([ready(model.folder, layers, dtype) for layers in HALVES])
    pipeline.open(1, 2)
    pipeline.logits((2, 0, random_tokens(50, seed=22, vocabulary=251)))
    pipeline.logits((1, 0, TOKENS[:291]))
    survivor, dead = pipeline.stages
    survivor.keep((second,), nothing, lambda _: False)
    for start in range(0, 267, 96):
        survivor.write_kv(1, LIMIT, dead.read_kv(1, second, start, min(267, start + 96)))
    assert survivor.kv_copy_bytes() == 288 * sum(model.layer_bytes(dtype)[3:])
    expected = pipeline.logits((1, 291, TOKENS[291:]))[0]
    survivor.prepare(WHOLE, (), 8, nothing)
    survivor.activate(WHOLE)
    survivor.logits(Pipeline.batch((1, 267, TOKENS[267:291])))
    assert torch.equal(survivor.logits(Pipeline.batch((1, 291, TOKENS[291:]))), expected)


def test_a_spare_worker_takes_over_before_it_has_loaded_layers(model: Model, dtype: str) -> None:
    """It knows the shape of their latents from the configuration."""
    old = Pipeline([ready(model.folder, WHOLE, dtype)])
    old.open(1)
    old.logits((1, 0, TOKENS[:256]))
    spare = TorchExecutor(str(model.folder), dtype=dtype, memory_limit=1 << 30)
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

"""Whole models whose products are Triton's: stages load them, and compute what transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.stage import native
from swarm.stage.engine import selfcheck
from swarm.stage.engine.kernel_report import describe_kernels
from swarm.stage.engine.measure import _LayerBench
from swarm.stage.engine.selfcheck import MemorySource, Numerics
from swarm.stage.matmul import probe
from swarm.stage.matmul.triton_products import TritonLinear
from swarm.stage.model import build
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.model.weight_formats import PLAIN, WeightFormats
from swarm.stage.native.adapters import LowRank
from swarm.stage.quantization.gguf_formats import FORMATS
from swarm.wire.messages import LayerRange
from tests.model.kernels_in_triton import DEVICE, HAS_CUDA, MARKS
from tests.model.models import named_config, random_model

pytestmark = MARKS
_LAYER = {
    **{f"self_attn.{name}_proj.weight": FORMATS["Q4_K"] for name in "qkvo"},
    **{"mlp.gate_proj.weight": FORMATS["Q8_0"], "mlp.down_proj.weight": FORMATS["Q6_K"]},
}
_EXPERTS = {"mlp.experts.gate_up_proj": FORMATS["Q4_0"], "mlp.experts.down_proj": FORMATS["MXFP4"]}
CASES = {
    "llama": WeightFormats((tuple(_LAYER.items()),)),
    "gpt_oss": WeightFormats((tuple(_EXPERTS.items()),)),
    "qwen3_moe": PLAIN,
    "deepseek_v3": PLAIN,
}


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if HAS_CUDA:
        yield
        return
    monkeypatch.setattr(TritonLinear, "supports", staticmethod(lambda *_: True))
    # the interpreter is slow, and its products have one order of summation
    monkeypatch.setattr(probe, "_MAX_ROWS", 1)
    monkeypatch.setattr(probe, "_NUM_COMPARED", 1)
    monkeypatch.setattr(selfcheck, "_LENGTHS", (24, 3))
    monkeypatch.setattr(selfcheck, "_CHUNK", 23)
    with native.disabled("to test others"):
        yield


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.long) for kind in CASES if kind != "llama")]
)
def test_models_are_computed_as_by_transformers(kind: str) -> None:
    """In three stages, with plain and quantized matrices, with experts and latents."""
    text = selfcheck._tiny_config_json(AutoConfig.for_model(kind))
    difference = selfcheck._compute_difference(text, "float32", Numerics(CASES[kind]), DEVICE)
    assert difference <= selfcheck.TOLERANCE


def load(kind: str, **settings: Any) -> tuple[ModelSkeleton, Stage]:
    config = named_config(kind)
    skeleton = ModelSkeleton(config, DEVICE, torch.float32)
    weights = WeightLoader(skeleton, MemorySource(random_model(config).state_dict()), lambda _: None, **settings)
    return skeleton, Stage(skeleton, LayerRange(0, 1), {}, weights)


def test_the_report_names_the_kernels() -> None:
    """The tiles whose bits agree; a stage on a device is not called exact because of its products alone."""
    skeleton, stage = load("qwen3_moe")
    text = describe_kernels(skeleton, stage.modules.values())
    assert "linears Triton in tiles of 16/64/128; experts Triton, by group" in text
    assert "bits of torch" in text


def test_a_quantized_head_is_measured_by_the_product_that_serves() -> None:
    """Its rows are on the device, where the CPU's product can't read them. A tied embedding is the head, too."""
    skeleton = ModelSkeleton(named_config("llama"), DEVICE, torch.float32)
    for embedding in (skeleton.parts.output_embedding, skeleton.parts.input_embedding):
        skeleton.config.tie_word_embeddings = embedding == skeleton.parts.input_embedding
        bench = _LayerBench(skeleton, WeightFormats((), ((f"{embedding}.weight", FORMATS["Q8_0"]),)))
        assert isinstance(bench._head, TritonLinear)
        assert bench._time(bench._logits(1, 1)) > 0


class _Adapter:
    """An adapter of one module, in place of a folder's."""

    key = "small"

    def __init__(self, module: str, inputs: int, outputs: int) -> None:
        self._weights = {module: LowRank(torch.randn(2, inputs), torch.randn(outputs, 2), 1.0)}

    def read(self, prefix: str) -> dict[str, LowRank]:
        return {name: weights for name, weights in self._weights.items() if name.startswith(prefix)}

    def unsupported(self, missing: set[str]) -> Exception:
        return LookupError(f"no {missing}")


def test_adapters_find_their_products() -> None:
    """Joint ones, too; a module that is not there is an error, and adapters are dropped by key."""
    skeleton, stage = load("llama")
    name = f"{skeleton.parts.layers}.0"
    layer, width = stage.modules[name], skeleton.config.hidden_size
    outputs = skeleton.model.get_submodule(f"{name}.self_attn.k_proj").out_features
    build.add_adapter(layer, name, _Adapter(f"{name}.self_attn.k_proj", width, outputs))  # type: ignore[arg-type]
    adapted = [part for part in layer.modules() if isinstance(part, TritonLinear) and part.adapters]
    assert [part.adapters["small"][0].first for part in adapted] == [
        skeleton.model.get_submodule(f"{name}.self_attn.q_proj").out_features
    ]
    with pytest.raises(LookupError, match=r"no .*elsewhere"):
        build.add_adapter(layer, name, _Adapter(f"{name}.elsewhere", width, width))  # type: ignore[arg-type]
    build.keep_adapters(layer, frozenset())
    assert not adapted[0].adapters

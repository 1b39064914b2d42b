"""Adapters of many kinds of models and weights give what merged weights give, whole and cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.engine.tiny import tiny_config
from swarm.stage.model.decoders import count_layers
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import LayerRange
from tests.model.adapted_stages import alone, ready
from tests.model.adapters import Shape, make_adapter, merged_logits, write_adapter
from tests.model.cutting import random_tokens
from tests.model.gguf_files import write_model
from tests.model.models import named_config, random_model
from tests.model.test_gguf import choose
from tests.model.test_quantized_files import FORMATS, make_format
from tests.model.test_recurrent import KINDS

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")

Save = Callable[..., Path]
TOKENS = random_tokens(40, seed=9, vocabulary=60)  # some vocabularies are small
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")


def check_merged(
    model: Path, plain: Path, adapter: Path, num_layers: int, quantization: Quantization = AS_STORED
) -> None:
    """Compare a model with an adapter, whole and cut, with the one of plain files whose weights it was merged into."""
    lines = [LayerRange(0, num_layers)], [LayerRange(0, 1), LayerRange(1, num_layers)]
    whole, cut = (
        alone([ready(model, {"a": str(adapter)}, layers, quantization=quantization) for layers in line], TOKENS, "a")
        for line in lines
    )
    truth, without = (merged_logits(plain, each, TOKENS) for each in (adapter, None))
    most = truth.abs().max()
    assert torch.equal(whole, cut)
    assert (whole.double() - truth).abs().max() < 1e-3 * most
    assert (without - truth).abs().max() > 0.03 * most  # an adapter that changes less would show nothing


def linear_shapes(model: Any) -> dict[str, Shape]:
    """The shapes of all linear modules in a model's layers, by their paths."""
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and _LAYER.search(path)
    }


LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3")
OLDER = ("bloom", "falcon", "gpt_bigcode", "gptj", "mpt", "opt")
# Of the others with states, the layers are of the same classes, or their matrices are.
STATES = (
    *("falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba2", "minimax", "nemotron_h", "qwen3_next"),
    *("recurrent_gemma", "zamba", "zamba2"),
)


def config_of(kind: str) -> Any:
    return tiny_config(AutoConfig.for_model(kind, **KINDS[kind])) if kind in KINDS else named_config(kind)


@pytest.mark.parametrize("kind", [*LATENTS, *OLDER, *STATES])
def test_all_linear_modules_are_adapted(save: Save, tmp_path: Path, kind: str) -> None:
    """With latents, but for the matrix that is divided among heads; with states, shared experts, indexes of positions,
    and in layouts like GPT-2's."""
    config = config_of(kind)
    model = save(config)
    shapes = {
        path: shape for path, shape in linear_shapes(random_model(config)).items() if not path.endswith(".kv_b_proj")
    }
    adapter = write_adapter(tmp_path / "a", shapes, seed=4, r=5)
    check_merged(model, model, adapter, count_layers(config.get_text_config()))


def test_transposed_matrices_are_refused(save: Save, tmp_path: Path) -> None:
    """GPT-2's own, as peft writes their adapters, and as if they were linear."""
    model = save(named_config("gpt2"))
    for settings, problem in (
        ({"fan_in_fan_out": True}, r"is an adapter with transposed weights, .*; serve the merged weights"),
        ({}, r"changes transformer\.h\.0\.attn\.c_attn; only linear modules in transformer\.h can be adapted"),
    ):
        adapter = make_adapter(tmp_path / "a", model, seed=1, targets=("c_attn",), **settings)
        with pytest.raises(ModelError, match=problem):
            ready(model, {"a": str(adapter)}, LayerRange(0, 6))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_that_are_quantized_at_load(llama: Path, tmp_path: Path, weights: str) -> None:
    how = Quantization(weights=weights)
    executor = ready(llama, {}, quantization=how)
    dequantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        weight = executor._source.quantized(name)
        dequantized[name] = tensor if weight is None else weight.read().dequantize(torch.float32).contiguous()
        assert torch.equal(dequantized[name], tensor) is (weight is None)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    check_merged(llama, plain, make_adapter(tmp_path / "a", plain, seed=2, r=5), 8, how)


@pytest.mark.parametrize("format_", FORMATS)
def test_weights_of_quantized_files(tmp_path: Path, format_: str) -> None:
    """Also where the order of their inputs is another than the rows'."""
    make_format(tmp_path, "llama", format_)
    plain = tmp_path / "plain"
    check_merged(tmp_path, plain, make_adapter(tmp_path / "a", plain, seed=2, r=5), 2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "gpt_oss"])
def test_weights_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also where their outputs are in another order than the model's, as llama's queries and keys are."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixed = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gpt_oss" else {}
    original = random_model(named_config(kind, **sizes | mixed))
    write_model(tmp_path / "tiny.gguf", original, choose)
    original.save_pretrained(tmp_path / "plain")
    adapter = write_adapter(tmp_path / "a", linear_shapes(original), seed=2, r=5)
    check_merged(tmp_path / "tiny.gguf", tmp_path / "plain", adapter, 2)

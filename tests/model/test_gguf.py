"""Models of GGUF files have the logits of the weights that the files hold."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from swarm.hub.gguf import read_gguf
from swarm.hub.headers import StoredTensor
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.configuration import check_config, read_config
from swarm.stage.model.gguf_source import GgufSource
from swarm.stage.model.location import locate_model
from swarm.stage.quantization import reading
from swarm.stage.quantization.at_load import Quantization
from swarm.stage.quantization.gguf_formats import FORMATS
from swarm.wire.messages import LayerRange
from tests.model.cutting import Cutter, Pipeline, nothing, ready
from tests.model.gguf_files import write_model
from tests.model.models import ARCHITECTURES, named_config, random_model

TOKENS = torch.arange(100) * 7

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {},
    "phi3": {},
    "gpt_oss": {},
    "granite": {},
    "olmo2": {},
    "starcoder2": {},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))


def open_model(path: Path) -> Checkpoint:
    return Checkpoint.at(locate_model(str(path)))


def load(checkpoint: Checkpoint) -> Any:
    """The whole model by transformers, with the weights that our source reads."""
    config = read_config(checkpoint.folder)
    check_config(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    source = GgufSource(checkpoint)
    for name, parameter in model.named_parameters():
        tensor = source.read(name, parameter.shape)
        assert source.shape(name) == tensor.shape == parameter.shape, name
        parameter.data = tensor.float()
        weight = source.quantized(name)
        if weight is not None:
            values = weight.read().dequantize(torch.float32)
            is_transposed = config.model_type == "gpt_oss" and ".experts." in name
            assert torch.equal(values.transpose(-1, -2) if is_transposed else values, tensor), name
    model.tie_weights()
    return model.eval().requires_grad_(False)


def logits(model: Any) -> torch.Tensor:
    ids = TOKENS.unsqueeze(0) % model.config.vocab_size
    with torch.inference_mode():
        return model(ids).logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_0])
def test_a_file_has_the_logits_of_its_weights(tmp_path: Path, kind: str, type_: Type) -> None:
    original = random_model(named_config(kind, **KINDS[kind]))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original, type_)
    loaded = load(open_model(tmp_path / "tiny.gguf"))
    torch.testing.assert_close(logits(loaded), logits(original), rtol=0, atol=1e-4)


TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


def choose(name: str, array: np.ndarray) -> Type:
    """Another type for each kind of tensor."""
    kind = re.sub(r"\d+", "", name).replace("ffn_gate", "ffn_up")
    return Type[TYPES[zlib.crc32(kind.encode()) % len(TYPES)]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_computes_with_a_files_weights(tmp_path: Path, kind: str) -> None:
    """Whole and cut, with a type for each kind of tensor: rows of 256 make all of them possible."""
    changes = KINDS[kind] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if "layer_types" in ARCHITECTURES.get(kind, {}):
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    original = random_model(named_config(kind, **changes))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original, choose)
    expected = logits(original)
    tokens = (TOKENS % original.config.vocab_size).tolist()
    for lines in ((0, 2), (0, 1, 2)):
        pipeline = Cutter().cut(tmp_path / "tiny.gguf", lines)
        pipeline.open(1)
        result = pipeline.logits((1, 0, tokens))[0]
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("rope_type", ["llama3", "yarn", "linear"])
def test_scaled_positions_are_those_of_the_original(tmp_path: Path, rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 50000.0, "factor": 4.0}
    if rope_type != "linear":
        parameters["original_max_position_embeddings"] = 256
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = random_model(named_config("llama", rope_parameters=parameters, head_dim=64))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original)
    torch.testing.assert_close(logits(load(open_model(tmp_path / "tiny.gguf"))), logits(original), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_of_different_types_are_dequantized(tmp_path: Path, kind: str) -> None:
    """The joined matrix of gate and up needs one format for both."""
    original = random_model(named_config(kind, **KINDS[kind]))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original, lambda name, _: Type.Q4_0 if "ffn_gate" in name else Type.Q8_0)
    checkpoint = open_model(tmp_path / "tiny.gguf")
    source = GgufSource(checkpoint)
    assert source.quantized("model.layers.0.mlp.experts.gate_up_proj") is None
    assert source.weight_format("model.layers.0.self_attn.o_proj.weight") == FORMATS["Q8_0"]
    torch.testing.assert_close(logits(load(checkpoint)), logits(original), rtol=0, atol=1e-4)


def test_biases_of_queries_and_keys_have_the_order_of_their_rows(tmp_path: Path) -> None:
    original = random_model(named_config("llama", attention_bias=True, mlp_bias=True))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original, Type.Q8_0)
    torch.testing.assert_close(logits(load(open_model(tmp_path / "tiny.gguf"))), logits(original), rtol=0, atol=1e-4)


def test_a_stage_reads_the_bytes_of_its_own_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "tiny.gguf", random_model(named_config("llama")), Type.Q4_0)
    expected = {
        (tensor.offset, tensor.num_bytes)
        for name, tensor in read_gguf(tmp_path / "tiny.gguf").tensors.items()
        if name.startswith(("blk.2.", "blk.3."))
    }
    ranges: set[tuple[int, int]] = set()
    read_into = reading._read_into

    def note(stored: StoredTensor, target: memoryview) -> None:
        ranges.add((stored.offset, len(target)))
        read_into(stored, target)

    monkeypatch.setattr(reading, "_read_into", note)
    ready(tmp_path / "tiny.gguf", LayerRange(2, 4))
    assert ranges == expected


@pytest.mark.parametrize("weights", ["int8", "dense"])
def test_settings_of_quantization_apply_to_files(tmp_path: Path, weights: str) -> None:
    """A plain file is quantized at load, and a quantized one unpacked."""
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    original = random_model(named_config("llama", **changes))
    original.config._attn_implementation = "eager"
    write_model(tmp_path / "tiny.gguf", original, Type.Q8_0 if weights == "dense" else Type.F16)
    settings = Quantization(weights)
    checkpoint = Checkpoint.at(locate_model(str(tmp_path / "tiny.gguf")), settings)
    assert bool(checkpoint.quantized)
    executor = TorchExecutor(str(tmp_path / "tiny.gguf"), dtype="float32", quantization=settings)
    executor.prepare(LayerRange(0, 2), (), 8, nothing)
    executor.activate(LayerRange(0, 2))
    pipeline = Pipeline([executor])
    pipeline.open(1)
    expected = logits(original)
    result = pipeline.logits((1, 0, (TOKENS % 251).tolist()))[0]
    error = ((result - expected).norm() / expected.norm()).item()
    assert error < (1e-4 if weights == "dense" else 0.1)

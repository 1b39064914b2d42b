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

from swarm.stage.model.checkpoint import Checkpoint, locate_model
from swarm.stage.model.configuration import check_config, read_config
from swarm.stage.model.gguf_source import GgufSource
from tests.model.cutting import Cutter
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
        assert tensor.shape == parameter.shape, name
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

"""Gemma 3n and 4, Zamba and Zaya: what their stages pass on, and what each holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.stage.engine.tiny import tiny_config
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.checkpoint import Checkpoint
from tests.model.as_transformers import check_as_transformers
from tests.model.real_configurations import CONFIGURATIONS

BEFORE = ("embed_tokens", "per_layer_model_projection", "per_layer_projection_norm", "altup_projections")


@pytest.mark.parametrize("name", ["google/gemma-3n-E2B-it", "google/gemma-4-E2B-it"])
def test_a_manifest_states_the_width_of_rows_and_what_the_first_stage_holds(name: str, save: Any) -> None:
    """Plans, memory and messages follow from it; the model that is built has the same."""
    text = dict(CONFIGURATIONS[name]["text_config"])
    checkpoint = Checkpoint(save(tiny_config(AutoConfig.for_model(text.pop("model_type"), **text))))
    skeleton = ModelSkeleton.from_checkpoint(checkpoint, torch.device("cpu"), torch.float32)
    manifest = checkpoint.manifest("bfloat16")
    assert manifest.row_width == skeleton.row_width > manifest.hidden_size
    before = [tensor for name, tensor in checkpoint.tensors.items() if name.split(".")[1].startswith(BEFORE)]
    assert manifest.embed_bytes == sum(2 * tensor.num_elements for tensor in before)
    assert {name.partition(".")[2] for name in skeleton.parts.embed} == {
        name.split(".")[1] for name, tensor in checkpoint.tensors.items() if tensor in before
    }


# Three uses of two blocks, each with an adapter of its own.
ZAMBA2 = {
    **{
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
    },
    **{"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "adapter_rank": 8},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 16},
    **{"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def test_each_layer_of_zamba2_holds_its_block_and_its_own_adapter(save: Any) -> None:
    """A block is stored in the first layer that uses it, with the adapters of all its uses."""
    folder = save(AutoConfig.for_model("zamba2", **ZAMBA2), dtype=torch.float32)
    checkpoint = Checkpoint(folder)
    skeleton = ModelSkeleton.from_checkpoint(checkpoint, torch.device("cpu"), torch.float32)
    manifest = checkpoint.manifest("float32")
    stack = skeleton.model.get_submodule(skeleton.parts.layers)
    held = [sum(part.numel() for part in layer.parameters()) for layer in stack]
    assert list(manifest.layer_bytes) == [4 * numbers for numbers in held]
    assert held[1] == held[2] == held[4] > held[0]
    check_as_transformers(folder, num_new=12, most_stages=5)


@pytest.mark.parametrize("kind", ["zamba", "zaya"])
def test_a_manifest_states_the_width_of_what_layers_read_beside_hidden_states(kind: str, save: Any) -> None:
    checkpoint = Checkpoint(save(tiny_config(AutoConfig.for_model(kind))))
    skeleton = ModelSkeleton.from_checkpoint(checkpoint, torch.device("cpu"), torch.float32)
    assert checkpoint.manifest("float32").row_width == skeleton.row_width > checkpoint.hidden_size

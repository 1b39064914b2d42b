"""Gemma 3n and 4: what their stages pass on, and what the first stage holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.stage.engine.tiny import tiny_config
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.checkpoint import Checkpoint
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

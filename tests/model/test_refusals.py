"""Refusals that need transformers' defaults, or its classes' checks: the same line from commands and workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swarm.cli.doctor.facts import inspect_model
from swarm.cli.main import run as swarm
from swarm.cli.up.forkserver.process import find_refusal
from swarm.cli.up.models import resolve_models
from swarm.config import Settings
from swarm.demo import model_path
from swarm.errors import ModelError, UnservedModel
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.fitting import build_unloaded
from swarm.stage.model.folder_files import INDEX, SINGLE
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from tests.model.cutting import MANY
from tests.model.models import named_config, random_model

NUM_LAYERS = json.loads((model_path() / "config.json").read_text())["num_hidden_layers"]
ROPE = {"rope_theta": 10000.0}

# Changes of the demo model's config.json, None for a setting that is left out; and a part of the line.
UNBUILT: dict[str, tuple[dict[str, Any], str]] = {
    "an activation": ({"hidden_act": "unheard-of"}, "(unknown value 'unheard-of' of hidden_act)"),
    "an activation of another kind": ({"model_type": "opt", "activation_function": "x"}, "can't build this model"),
    "heads that do not divide": ({"num_attention_heads": 3, "head_dim": None}, "not a multiple of the number of att"),
    "a type of rotation": (
        {"rope_parameters": ROPE | {"rope_type": "spiral"}},
        "'spiral' of rope_parameters.rope_type",
    ),
    "a rotation without its factor": ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, "keys in `rope_parameters`"),
    "rotations that are a list": ({"rope_parameters": [1]}, "Validation error for field 'rope_parameters'"),
    "a type of layers": ({"layer_types": ["dreaming"] * 8}, "The `layer_types` entries must"),
    "a number that is a text": ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float"),
    "a token for padding by default": ({"model_type": "phi3", "pad_token_id": None}, "Padding_idx must be within"),
    "a window by default": ({"model_type": "doge", "keep_window_size": 16}, "keep_window_size 16 is less than"),
    "layers by default": ({"model_type": "gpt_neo", "num_layers": 8}, "Class validation error"),
}
# These are built, and cannot be computed.
UNCUT: dict[str, tuple[dict[str, Any], str]] = {
    "groups of heads that do not divide": ({"num_key_value_heads": 3}, "could not be computed in stages"),
    "sizes of latents by default": ({"model_type": "deepseek_v3"}, "could not be computed in stages"),
}
# These contradict the weights.
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"vocab_size": 900}, "tensor model.embed_tokens.weight has shape [768, 128], but config.json requires "),
    "width": ({"hidden_size": 64}, "tensor model.embed_tokens.weight has shape [768, 128], but config.json requires "),
    "inner width": ({"intermediate_size": 96}, "tensor model.layers.0.mlp.gate_proj.weight has shape"),
    "heads": ({"num_key_value_heads": 1}, "tensor model.layers.0.self_attn.k_proj.weight has shape"),
    "layers": ({"num_hidden_layers": NUM_LAYERS + 1}, f"has no weights for layer {NUM_LAYERS}; "),
    "fewer layers": ({"num_hidden_layers": NUM_LAYERS - 1}, f"but config.json has {NUM_LAYERS - 1} layers"),
}
# These lack what a manifest has. No import of torch is needed to find that.
UNSIZED: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({"max_position_embeddings": None}, "has no usable max_position_embeddings"),
    "layers": ({"num_hidden_layers": None}, "has no usable num_hidden_layers"),
    "heads": ({"num_key_value_heads": None, "num_attention_heads": None}, "has no usable num_attention_heads"),
    "width": ({"hidden_size": None}, "has no usable hidden_size"),
}


def folder_of(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """The demo model with a changed configuration. Its weights are whole, so that nothing else is refused."""
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


def lines_of_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What the check, which exits with 1, and the doctor write."""
    capsys.readouterr()
    assert swarm(["models", "check", str(folder)]) == 1
    facts = inspect_model(str(folder))
    assert facts is not None
    return {capsys.readouterr().err.removeprefix("swarm: ").removesuffix("\n"), facts.error}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNBUILT)
def test_what_cannot_be_built_is_refused_by_the_fork_server(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So no worker is forked. A worker that starts by itself, as on a GPU, has the same line."""
    changes, problem = UNBUILT[name]
    folder = folder_of(tmp_path, changes)
    (model,) = resolve_models(Settings(model=str(folder)))
    line = find_refusal(model.folder)
    assert problem in line
    assert "\n" not in line
    with pytest.raises(UnservedModel) as refusal:
        TorchExecutor(str(folder), memory_limit=MANY)
    assert str(refusal.value) == line
    assert lines_of_commands(folder, capsys) == {line}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNCUT)
def test_what_cannot_be_cut_is_refused_as_by_a_worker(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class of the error ends ``swarm up`` at the first worker's refusal."""
    changes, problem = UNCUT[name]
    folder = folder_of(tmp_path, changes)
    state = load_file(folder / "model.safetensors")  # without what would contradict the configuration
    save_file({key: value for key, value in state.items() if "norm" in key or "embed" in key}, folder / SINGLE)
    assert find_refusal(folder) == ""
    with pytest.raises(UnservedModel, match=problem) as refusal:
        TorchExecutor(str(folder), memory_limit=MANY)
    assert lines_of_commands(folder, capsys) == {str(refusal.value)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNFIT)
def test_files_that_contradict_the_configuration_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By all in the same line, before a worker starts; by a worker that starts by itself, before it joins."""
    changes, problem = UNFIT[name]
    folder = folder_of(tmp_path, changes)
    with pytest.raises(UnservedModel) as refusal:
        TorchExecutor(str(folder), memory_limit=MANY)
    line = str(refusal.value)
    assert problem in line
    assert find_refusal(folder) == line
    assert lines_of_commands(folder, capsys) == {line}
    facts = inspect_model(str(folder))
    assert facts is not None
    assert not facts.is_refused  # it may help to fetch the files again
    if "layers" in name:
        with pytest.raises(ModelError) as error:
            resolve_models(Settings(model=str(folder)))
        assert str(error.value) == line


@pytest.mark.parametrize("quantization", [AS_STORED, Quantization("int4")])
def test_fused_experts_of_another_size_are_refused_by_headers(quantization: Quantization, tmp_path: Path) -> None:
    """The model has one tensor of all experts, of which the file has two matrices for each."""
    random_model(named_config("mixtral")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    build_unloaded(tmp_path, Checkpoint(tmp_path, quantization=quantization))
    for setting in ("intermediate_size", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps(config | {setting: config[setting] // 2}))
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.\S+ has shape .* but config\.json requires"):
            build_unloaded(tmp_path, Checkpoint(tmp_path, quantization=quantization))


def test_a_folder_with_a_part_of_its_weights_is_checked_by_its_configuration(tmp_path: Path) -> None:
    """As before and during a download."""
    folder = folder_of(tmp_path, {"vocab_size": 900})
    (folder / SINGLE).rename(folder / "model-1.safetensors")
    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert swarm(["models", "check", str(folder)]) == 0


@pytest.mark.parametrize("name", UNSIZED)
def test_what_a_manifest_lacks_is_refused_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, problem = UNSIZED[name]
    folder = folder_of(tmp_path, changes)
    with pytest.raises(ModelError, match=problem) as refusal:
        resolve_models(Settings(model=str(folder)))
    assert lines_of_commands(folder, capsys) == {str(refusal.value)}


def test_a_model_that_is_served_is_not_refused() -> None:
    assert find_refusal(model_path()) == ""

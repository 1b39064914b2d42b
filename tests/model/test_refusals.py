"""Refusals that need transformers' defaults, or its classes' checks: the same line from commands and workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.doctor.facts import inspect_model
from swarm.cli.main import run as swarm
from swarm.cli.up.forkserver.process import find_refusal
from swarm.cli.up.models import resolve_models
from swarm.config import Settings
from swarm.demo import model_path
from swarm.errors import ModelError, UnservedModel
from swarm.stage.engine.torch_executor import TorchExecutor
from tests.model.cutting import MANY

ROPE = {"rope_theta": 10000.0}

# Changes of the demo model's config.json, None for a setting that is left out; and a part of the line.
UNBUILT: dict[str, tuple[dict[str, Any], str]] = {
    "an activation": ({"hidden_act": "unheard-of"}, "can't build this model ('unheard-of')"),
    "an activation of another kind": ({"model_type": "opt", "activation_function": "x"}, "can't build this model"),
    "heads that do not divide": ({"num_attention_heads": 3, "head_dim": None}, "not a multiple of the number of att"),
    "a type of rotation": ({"rope_parameters": ROPE | {"rope_type": "spiral"}}, "can't build this model ('spiral')"),
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
    assert find_refusal(folder) == ""
    with pytest.raises(UnservedModel, match=problem) as refusal:
        TorchExecutor(str(folder), memory_limit=MANY)
    assert lines_of_commands(folder, capsys) == {str(refusal.value)}


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

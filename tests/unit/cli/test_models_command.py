"""``swarm models`` and ``swarm pull``: what is checked without a hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from swarm.cli.doctor.facts import inspect_model
from swarm.cli.main import run as swarm
from swarm.cli.models import StoredModel, _describe
from swarm.cli.up.models import resolve_models
from swarm.config import Settings
from swarm.stage.model.location import ModelLocation
from tests.files_of_models import TINY_CONFIG, as_file, entry

pytestmark = pytest.mark.slow  # torch and transformers are imported

NUM_TOKENS = 100  # a check computes with tokens below 96
LLAMA = TINY_CONFIG | {"vocab_size": NUM_TOKENS, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def folder_of(tmp_path: Path, **more: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
    return str(tmp_path)


def test_a_folder_is_checked_by_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are not needed: ``swarm models check DIR`` before a download."""
    folder = folder_of(tmp_path)
    assert swarm(["models", "check", folder]) == 0
    assert capsys.readouterr().out == f"{folder} can be served (LlamaForCausalLM)\n"
    assert swarm(["models", "check", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": folder, "served": True, "problem": ""}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model_type": "unheard-of"}, "has no models of kind unheard-of"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "Swarm never runs a model's code"),
        ({"model_type": "moshi", "architectures": ["MoshiForCausalLM"]}, "speech and text together"),
        ({"architectures": [7]}, "names no architecture"),
    ],
)
def test_what_a_worker_would_refuse_is_refused(
    more: dict[str, object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, **more)
    assert swarm(["models", "check", folder]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert problem in shown.err
    assert shown.err.count("\n") == 1
    assert swarm(["models", "check", folder, "--json"]) == 1
    assert problem in json.loads(capsys.readouterr().out)["problem"]


def test_a_multimodal_model_is_said_to_be_served_for_text_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once by each command that a user names it to."""
    note = "text only: its parts for images or audio are not loaded"
    text = LLAMA | {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 4}
    folder = folder_of(tmp_path, model_type="llava", architectures=["LlavaForConditionalGeneration"], text_config=text)
    names = [f"language_model.model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)] + ["vision_tower.weight"]
    table = {"dtype": "F32", "shape": [NUM_TOKENS, 4], "data_offsets": [3 * 64, 3 * 64 + 16 * NUM_TOKENS]}
    header = {name: entry(index) for index, name in enumerate(names)} | {
        "language_model.model.embed_tokens.weight": table
    }
    (tmp_path / "model.safetensors").write_bytes(as_file(header, 3 * 64 + 16 * NUM_TOKENS))
    assert swarm(["models", "check", folder]) == 0
    assert capsys.readouterr().out == f"{folder} can be served (LlavaForConditionalGeneration; {note})\n"
    assert _describe("x", lambda: ModelLocation(tmp_path)).row()[-1] == "yes, text only"
    facts = inspect_model(folder)
    assert facts is not None
    assert (facts.limits, facts.weight_bytes) == (note, 2 * 64 + 16 * NUM_TOKENS)
    assert resolve_models(Settings(model=folder))[0].limits == note


def test_a_name_that_is_none_is_not_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "./a/b", "https://host/a/b"):
        assert swarm(["pull", name]) == 2
        assert "is no name of a model on a hub" in capsys.readouterr().err


def test_a_row_shows_how_much_is_here() -> None:
    assert StoredModel("a/b", 2048, 1024, "Q4_K").row() == ("a/b", "1.0 KiB of 2.0 KiB", "Q4_K", "yes")
    assert StoredModel("a/b", 2048, 0, "bfloat16", "x").row() == ("a/b", "2.0 KiB", "bfloat16", "no: x")


def test_every_revision_in_the_cache_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that ``swarm pull`` was given; a commit without a name, and a folder that no name fits, too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commits = tmp_path / "models--a--b", {"main": "1" * 40, "refs/pr/1": "2" * 40}
    (tmp_path / "models--a---b").mkdir()
    for commit in (*commits.values(), "3" * 40):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "model.safetensors").write_bytes(b"?")
    for name, commit in commits.items():
        (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    assert swarm(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = [model["name"] for model in listed]
    assert names == ["village (embedded)", "a/-b", "a/b", "a/b@refs/pr/1", f"a/b@{'3' * 40}"]
    assert [bool(model["problem"]) for model in listed] == [False, True, True, True, True]


def test_a_format_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    code = (
        "import sys; from swarm.cli.main import run; code = run(['models', 'check', sys.argv[1]]); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.stdout == "1 False\n"
    assert "bitsandbytes" in done.stderr

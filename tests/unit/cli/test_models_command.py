"""``swarm models`` and ``swarm pull``: what is checked without a hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.cli.main import run as swarm
from swarm.cli.models import StoredModel
from tests.files_of_models import TINY_CONFIG

pytestmark = pytest.mark.slow  # torch and transformers are imported

LLAMA = TINY_CONFIG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


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
        ({"model_type": "unheard-of"}, "transformers doesn't support this model"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "Swarm never runs a model's code"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "keep a state that is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions that depend on the whole batch"),
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


def test_a_name_that_is_none_is_not_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "./a/b", "https://host/a/b"):
        assert swarm(["pull", name]) == 2
        assert "is no name of a model on a hub" in capsys.readouterr().err


def test_a_row_shows_how_much_is_here() -> None:
    assert StoredModel("a/b", 2048, 1024, "Q4_K").row() == ("a/b", "1.0 KiB of 2.0 KiB", "Q4_K", "yes")
    assert StoredModel("a/b", 2048, 0, "bfloat16", "x").row() == ("a/b", "2.0 KiB", "bfloat16", "no: x")

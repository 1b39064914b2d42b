"""Refusals by ``config.json`` alone: one line, the same from every command, without an import of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.doctor.facts import inspect_model
from swarm.cli.main import run as swarm
from swarm.cli.up.models import resolve_models
from swarm.config import Settings
from swarm.errors import ModelError
from swarm.stage.model.kinds import REFUSED, check_folder, read_settings

CLASSIFIER = "LlamaForSequenceClassification"
NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": ({"model_type": "bert"}, "models of kind bert can't be served: an encoder"),
    "both": ({"model_type": "t5"}, "models of kind t5 can't be served: an encoder with a decoder"),
    "both, of a kind that is not listed": ({"model_type": "bert-generation", "is_encoder_decoder": True}, "an encoder"),
    "attention": ({"model_type": "inkling_text"}, "scores that depend on the query and the distance"),
    "neither, though transformers has it": ({"model_type": "gte"}, "no model of this kind that continues a text"),
    "a setting of the kind": ({"model_type": "doge", "is_moe": True}, "chosen by other tokens' scores"),
    "a setting of the tower": (
        {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
        "attention to later tokens",
    ),
    "labels": (
        {"model_type": "llama", "architectures": [CLASSIFIER]},
        "classifiers with 2 labels can't be served; one ",
    ),
    "named labels": (
        {"model_type": "llama", "architectures": [CLASSIFIER], "id2label": {"0": "a", "1": "b", "2": "c"}},
        "classifiers with 3 labels can't be served; one with a single label serves /v1/rerank",
    ),
    "code": ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "Swarm never runs a model's code"),
    "unknown": ({"model_type": "unheard-of"}, "has no models of kind unheard-of"),
    "format": ({"model_type": "llama", "quantization_config": {"quant_method": "exl2"}}, "quantized with EXL2"),
}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["XForCausalLM"]} | config))
    return path


@pytest.mark.parametrize("name", NAMED)
def test_each_command_gives_the_same_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check, the doctor, ``swarm up`` and a worker, of a folder without any weights."""
    config, problem = NAMED[name]
    folder = str(folder_of(tmp_path, config))
    with pytest.raises(ModelError) as refusal:
        check_folder(tmp_path)
    line = str(refusal.value)
    assert problem in line
    assert "\n" not in line
    with pytest.raises(ModelError) as refusal:
        resolve_models(Settings(model=folder))
    assert str(refusal.value) == line
    facts = inspect_model(folder)
    assert facts is not None
    assert facts.error == line
    assert facts.is_refused
    for command, code in ((["models", "check", folder], 1), (["worker", "--model", folder], 78)):
        assert swarm(command) == code
        assert capsys.readouterr().err == f"swarm: {line}\n"


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    """A folder of peft's is no model, and names the one that it belongs to."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    with pytest.raises(ModelError, match="is an adapter \\(peft\\) of owner/base, and no model"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "advice"),
    [("a.gguf", "to serve a GGUF file, name it: a.gguf"), ("a.bin", "no pickles"), ("a", "only saf")],
)
def test_weights_of_other_formats_are_named(file: str, advice: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"model_type": "llama"})
    (folder / file).touch()
    with pytest.raises(ModelError, match=advice):
        resolve_models(Settings(model=str(folder)))


def test_served_kinds_pass(tmp_path: Path) -> None:
    """Also a configuration that names no kind: transformers knows what it is."""
    for config in ({"model_type": "llama"}, {"model_type": "deepseek_v3"}, {}):
        check_folder(folder_of(tmp_path, config))


def test_a_kind_under_a_name_of_its_own_passes(tmp_path: Path) -> None:
    """Kimi K2 is DeepSeek V3, for which transformers has code: that of the folder is not needed."""
    settings = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    check_folder(folder_of(tmp_path, settings))
    assert read_settings(tmp_path)["model_type"] == "deepseek_v3"


def test_a_tower_of_text_in_a_kind_that_is_not_listed_passes(tmp_path: Path) -> None:
    check_folder(folder_of(tmp_path, {"model_type": "audioflamingo3", "text_config": {"model_type": "qwen2"}}))


def test_no_kind_has_two_reasons() -> None:
    kinds = [kind for kinds in REFUSED.values() for kind in kinds]
    assert len(kinds) == len(set(kinds))


def test_a_refusal_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """So it takes less than a second."""
    folder = folder_of(tmp_path, {"model_type": "t5"})
    code = f"""if 1:
        import sys
        from swarm.cli.main import run
        for command in (["models", "check", {str(folder)!r}], ["worker", "--model", {str(folder)!r}]):
            assert run(command)
        print(sorted({{"torch", "transformers"}} & sys.modules.keys()))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("labels", [{"id2label": {"0": "LABEL_0"}}, {"num_labels": 1}])
def test_a_classifier_with_one_label_is_served(labels: dict[str, Any], tmp_path: Path) -> None:
    """For reranking. Labels of other models, which transformers writes too, say nothing."""
    check_folder(folder_of(tmp_path, {"model_type": "llama", "architectures": [CLASSIFIER]} | labels))
    check_folder(folder_of(tmp_path, {"model_type": "llama", "id2label": {"0": "a", "1": "b"}}))

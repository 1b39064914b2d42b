"""The most used text models by their real configurations, shrunk: each is served as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from swarm.errors import ModelError
from swarm.stage.engine.tiny import tiny_config
from swarm.stage.model import text_models
from swarm.stage.model.kinds import check_kind, rename_kind
from tests.model.as_transformers import check_as_transformers
from tests.model.real_configurations import CONFIGURATIONS, WITH_CODE

SAMPLE = [
    *("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "microsoft/Phi-4-mini-instruct", "openai/gpt-oss-20b"),
    *("meta-llama/Llama-3.2-1B-Instruct", "allenai/Olmo-3-7B-Instruct", "Qwen/Qwen1.5-MoE-A2.7B"),
    *("microsoft/Phi-3.5-MoE-instruct", "tencent/Hunyuan-7B-Instruct", "meta-llama/Llama-3.2-11B-Vision-Instruct"),
    *("meituan-longcat/LongCat-Flash-Chat", "ibm-granite/granite-4.0-h-micro", "Qwen/Qwen3.5-27B"),
]


def check(name: str, save: Any, num_new: int, most_stages: int) -> None:
    """``longrope`` tables have their long factors on both sides: docs/reference/models.md says where that differs."""
    check_kind(Path(name), CONFIGURATIONS[name])
    values = dict(rename_kind(CONFIGURATIONS[name]))
    config = tiny_config(AutoConfig.for_model(values.pop("model_type"), **values), max(4, most_stages))
    text_models.register(config)
    check_as_transformers(save(config), num_new, most_stages)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_configuration_is_served(name: str, save: Any) -> None:
    check(name, save, num_new=12, most_stages=3)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_all_real_configurations_are_served(name: str, save: Any) -> None:
    check(name, save, num_new=64, most_stages=5)


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_model_with_code_of_its_own_is_refused_by_its_configuration(name: str) -> None:
    with pytest.raises(ModelError, match="brings Python code of its own"):
        check_kind(Path(name), WITH_CODE[name])

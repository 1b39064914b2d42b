"""Every kind of models: what the load check accepts is served like transformers does, and the table of families is what
it accepts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swarm.stage.engine.tiny import tiny_config
from swarm.stage.model import text_models
from swarm.stage.model.kinds import REFUSED
from tests.model.as_transformers import check_as_transformers

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("families", ROOT / "tools" / "families.py")
assert _SPEC is not None
assert _SPEC.loader is not None
families = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(families)
PAGE = (ROOT / "docs/reference/models.md").read_text()
SERVED = re.findall(r"`([^`]+)`", PAGE[PAGE.index("| served |") :].partition("\n")[0])
# One kind of each way to differ: latent attention, groups of experts, layers of unlike heads, rotations, routers.
SAMPLE = [
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4_text", "hunyuan_v1_moe", "granite_swa", "dbrx"),
    *("nemotron", "cohere_compass_text", "minicpm3", "gemma3n_text"),
]


@pytest.fixture(scope="module")
def folder(save: Any) -> Any:
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            config = tiny_config(families.real_config(kind))
            text_models.register(config)
            made[kind] = save(config, dtype=torch.float32)
        return made[kind]

    return folder_of


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_kind_is_served_as_transformers_does(kind: str, folder: Any) -> None:
    """From files, with the sizes' ratios of real models."""
    assert kind in SERVED
    check_as_transformers(folder(kind), num_new=12, most_stages=3)


@pytest.mark.long
@pytest.mark.parametrize("kind", SERVED)
def test_all_kinds_are_served_as_transformers_does(kind: str, folder: Any) -> None:
    check_as_transformers(folder(kind), num_new=64, most_stages=5)


def test_a_model_of_two_layers_is_tried_with_four() -> None:
    """So that each of three stages has one."""
    config = tiny_config(AutoConfig.for_model("mistral", num_hidden_layers=2, num_attention_heads=48, head_dim=80))
    assert config.num_hidden_layers == 4
    assert config.num_attention_heads // config.num_key_value_heads == 48 // 8
    assert config.head_dim == 80 // 4


def test_kinds_of_layers_and_their_lists_stay_together() -> None:
    """Two layers of each kind, dense ones first, and keys that later layers share come from earlier ones."""
    deepseek = tiny_config(families.real_config("deepseek_v3"))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (4, 2)
    gemma = tiny_config(AutoConfig.for_model("gemma3n_text"))
    first = gemma.num_hidden_layers - gemma.num_kv_shared_layers
    assert set(gemma.layer_types[first:]) == set(gemma.layer_types[:first]) == {"full_attention", "sliding_attention"}
    assert len(gemma.activation_sparsity_pattern) == gemma.num_hidden_layers


@pytest.mark.parametrize("kind", ["bert", "mamba", "longcat_flash", "diffllama"])
def test_what_is_noted_as_refused_is_refused_by_the_load_check(kind: str) -> None:
    """A kind that becomes served must leave the notes, by which it is refused before it is tried."""
    assert kind in {kind for kinds in REFUSED.values() for kind in kinds}
    assert families.check(kind)


@pytest.mark.long
def test_the_table_is_what_the_load_check_says() -> None:
    kinds = {kind: not families.check_alone(kind) for kind in families.causal_kinds()}
    assert [kind for kind, is_served in kinds.items() if is_served] == SERVED
    rows = families.render(SERVED, [kind for kind, is_served in kinds.items() if not is_served])
    assert rows in PAGE, "python tools/families.py"

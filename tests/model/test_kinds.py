"""Every kind of models: what the load check accepts is served like transformers does, and the table of families is what
it accepts."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from swarm.stage.engine.kv_transfers import shape_in_config
from swarm.stage.engine.tiny import tiny_config
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model import text_models
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.kinds import REFUSED
from swarm.wire.messages import LayerRange
from tests.model.as_transformers import check_as_transformers
from tests.model.cutting import MANY, nothing

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


def check_described(folder: Path) -> None:
    """Check what the files that transformers saved say about the model, before any weights are read."""
    config, checkpoint = AutoConfig.from_pretrained(folder).get_text_config(), Checkpoint(folder)
    manifest = checkpoint.manifest("float32")
    assert manifest.num_layers == len(manifest.layer_bytes) == config.num_hidden_layers
    assert (manifest.hidden_size, manifest.vocab_size) == (config.hidden_size, config.vocab_size)
    assert manifest.context == getattr(config, "max_position_embeddings", None) or manifest.context >= 2048
    numbers = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    stored = sum(number for name, number in numbers.items() if "embed_tokens_extend" not in name)  # towers of Phi 4
    table = config.vocab_size * config.hidden_size  # a tied one counts as embedding and as head
    assert manifest.weight_bytes(LayerRange(0, manifest.num_layers)) in (4 * stored, 4 * (stored + table))


def check_cache(folder: Path) -> None:
    """Check what files and configuration say about keys and values, which plans and moves need, by loaded layers."""
    executor = TorchExecutor(str(folder), dtype="float32", memory_limit=MANY)
    manifest, config = executor.manifest, executor._skeleton.config
    executor.prepare(LayerRange(0, manifest.num_layers), (), 8, nothing)
    shapes = executor._transfers._shapes
    assert shapes == {layer: shape_in_config(config, layer) for layer in shapes}
    if not manifest.state_stride:
        sizes = {layer: manifest.kv_bytes_per_token[layer] for layer in shapes}
        assert sizes == {layer: 4 * shape.numbers for layer, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["jetmoe", "mimo_v2_flash", "gemma4_text", "falcon", "nemotron_h"])
def test_keys_and_values_are_as_large_as_the_files_say(kind: str, folder: Any) -> None:
    check_cache(folder(kind))


@pytest.mark.parametrize("kind", [*SAMPLE, "kimi_linear", "nemotron_h"])
def test_a_kind_is_described_by_the_files_that_transformers_saves(kind: str, folder: Any) -> None:
    check_described(folder(kind))


def test_key_heads_of_dbrx_are_counted_as_it_was_released(folder: Any, tmp_path: Path) -> None:
    """Its configuration has their number in the section of attention alone; transformers saves it twice."""
    shutil.copytree(folder("dbrx"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    num = config.pop("num_key_value_heads")
    path.write_text(json.dumps(config))
    assert Checkpoint(tmp_path).num_kv_heads == num == config["attn_config"]["kv_n_heads"] < config["n_heads"]


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_kind_is_served_as_transformers_does(kind: str, folder: Any) -> None:
    """From files, with the sizes' ratios of real models."""
    assert kind in SERVED
    check_as_transformers(folder(kind), num_new=12, most_stages=3)


@pytest.mark.long
@pytest.mark.parametrize("kind", SERVED)
def test_all_kinds_are_served_as_transformers_does(kind: str, folder: Any) -> None:
    check_described(folder(kind))
    check_cache(folder(kind))
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


@pytest.mark.parametrize("kind", ["bert", "recurrent_gemma", "longcat_flash", "diffllama", "moshi"])
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

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

from swarm.errors import ModelError
from swarm.stage.engine.kv_transfers import shape_in_config
from swarm.stage.engine.selfcheck import check_served
from swarm.stage.engine.tiny import tiny_config
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model import text_models
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.configuration import check_config, read_config
from swarm.stage.model.decoders import count_layers
from swarm.stage.model.kinds import REFUSED
from swarm.wire.messages import LayerRange
from tests.model.as_transformers import check_as_transformers
from tests.model.cutting import MANY, nothing
from tests.model.real_configurations import CONFIGURATIONS

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
    *("nemotron", "cohere_compass_text", "minicpm3", "gemma3n_text", "longcat_flash", "diffllama", "doge", "ctrl"),
    *("megatron-bert", "roberta"),
]


@pytest.fixture(scope="module")
def folder(save: Any) -> Any:
    made: dict[tuple[str, int], Path] = {}

    def folder_of(kind: str, fewest_layers: int = 4) -> Path:
        if (kind, fewest_layers) not in made:
            config = tiny_config(families.real_config(kind), fewest_layers)
            text_models.register(config)
            made[kind, fewest_layers] = save(config, dtype=torch.float32)
        return made[kind, fewest_layers]

    return folder_of


def check_described(folder: Path) -> None:
    """Check what the files that transformers saved say about the model, before any weights are read."""
    config, checkpoint = AutoConfig.from_pretrained(folder).get_text_config(), Checkpoint(folder)
    manifest = checkpoint.manifest("float32")
    assert manifest.num_layers == len(manifest.layer_bytes) == count_layers(config)
    assert (manifest.hidden_size, manifest.vocab_size) == (config.hidden_size, config.vocab_size)
    most = getattr(config, "max_position_embeddings", None)
    if hasattr(config, "is_decoder") and manifest.context != most:  # RoBERTa's first positions stand for padding
        most -= config.pad_token_id + 1
    assert manifest.context == most or manifest.context >= 2048
    numbers = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    stored = sum(number for name, number in numbers.items() if not is_unused(name, config))
    if config.model_type == "zamba":  # its block is stored in one layer, and held by all that use it
        block = sum(number for name, number in numbers.items() if ".shared_transf." in name)
        stored += block * (config.layers_block_type.count("hybrid") - 1)
    width = getattr(config, "embedding_size", config.hidden_size)
    table = config.vocab_size * width  # a tied one counts as embedding and as head
    assert manifest.weight_bytes(LayerRange(0, manifest.num_layers)) in (4 * stored, 4 * (stored + table))


def is_unused(name: str, config: Any) -> bool:
    """Whether a tensor belongs to Phi 4's other towers, or to an expert of LongCat that gives back its input."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    is_zero = expert and config.model_type == "longcat_flash" and int(expert[1]) >= config.n_routed_experts
    return "embed_tokens_extend" in name or bool(is_zero)


def check_cache(folder: Path) -> None:
    """Check what files and configuration say about keys and values, which plans and moves need, by loaded layers."""
    executor = TorchExecutor(str(folder), dtype="float32", memory_limit=MANY)
    manifest, config = executor.manifest, executor._skeleton.config
    executor.prepare(LayerRange(0, manifest.num_layers), (), 8, nothing)
    shapes = executor._transfers._shapes
    assert shapes == {layer: shape_in_config(config, layer) for layer in shapes}
    sizes = {layer: size for layer in range(manifest.num_layers) if (size := manifest.kv_bytes(layer))}
    assert sizes == {layer: 4 * shape.numbers for layer, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["jetmoe", "mimo_v2_flash", "gemma4_text", "falcon", "nemotron_h", "longcat_flash"])
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


def test_a_tower_that_transformers_lists_no_causal_class_for_is_served(folder: Any) -> None:
    check_as_transformers(folder("mistral4"), num_new=12, most_stages=3)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_that_cannot_decode_alone_is_refused(kind: str) -> None:
    for changes in ({}, {"is_decoder": True, "add_cross_attention": True}):
        with pytest.raises(ModelError, match="without is_decoder, or with add_cross_attention"):
            check_config(AutoConfig.for_model(kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("doge", {"keep_window_size": 512}, "keep_window_size 512 is less than max_position_embeddings 2048"),
        ("doge", {"is_moe": True}, "experts are chosen by other tokens' scores"),
    ],
)
def test_what_the_other_tokens_of_a_batch_change_is_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelSkeleton(tiny_config(AutoConfig.for_model(kind, **changes)), torch.device("cpu"), torch.float32)


def refusal_of(folder: Path) -> str:
    try:
        check_served(folder)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("value", [0, -1, 1.5, 10**30, "x", [], {}], ids=str)
@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"])
def test_a_number_that_no_model_has_is_harmless_or_refused_in_one_line(name: str, value: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes["max_position_embeddings"] = 512
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check_served(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {name: value}))
    assert "\n" not in refusal_of(tmp_path)


def test_positions_without_their_factors_are_refused_in_one_line() -> None:
    config = AutoConfig.for_model("phi3", pad_token_id=0)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0}
    with pytest.raises(ModelError, match=r"settings that can't be used \(KeyError: '\w+_factor'\)$"):
        check_config(config)


def test_a_kind_under_a_name_of_its_own_is_read_without_its_code(tmp_path: Path) -> None:
    settings = CONFIGURATIONS["moonshotai/Kimi-K2-Instruct"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_config(tmp_path)
    assert (config.model_type, config.n_routed_experts) == ("deepseek_v3", 384)


@pytest.mark.long
@pytest.mark.parametrize("kind", SERVED)
def test_all_kinds_are_served_as_transformers_does(kind: str, folder: Any) -> None:
    model = folder(kind, fewest_layers=5)
    check_described(model)
    check_cache(model)
    check_as_transformers(model, num_new=64, most_stages=5)


def test_a_model_of_two_layers_is_tried_with_four() -> None:
    """So that each of three stages has one."""
    config = tiny_config(AutoConfig.for_model("mistral", num_hidden_layers=2, num_attention_heads=48, head_dim=80))
    assert config.num_hidden_layers == 4
    assert config.num_attention_heads // config.num_key_value_heads == 48 // 8
    assert config.head_dim == 80 // 4


def test_a_model_of_one_kind_of_layers_has_as_many_as_stages_are_wanted() -> None:
    assert tiny_config(AutoConfig.for_model("llama"), fewest_layers=5).num_hidden_layers == 5


def test_kinds_of_layers_and_their_lists_stay_together() -> None:
    """Two layers of each kind, dense ones first, and keys that later layers share come from earlier ones."""
    deepseek = tiny_config(families.real_config("deepseek_v3"))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (4, 2)
    gemma = tiny_config(AutoConfig.for_model("gemma3n_text"))
    first = gemma.num_hidden_layers - gemma.num_kv_shared_layers
    assert set(gemma.layer_types[first:]) == set(gemma.layer_types[:first]) == {"full_attention", "sliding_attention"}
    assert len(gemma.activation_sparsity_pattern) == gemma.num_hidden_layers
    falcon = tiny_config(AutoConfig.for_model("falcon_h1", num_hidden_layers=5))
    assert len(falcon.ssm_multipliers) == 5  # one for each part of a layer, of which there happen to be as many


@pytest.mark.parametrize("kind", ["xmod", "hrm_text", "bart", "moshi"])
def test_what_is_noted_as_refused_is_refused_by_the_load_check(kind: str) -> None:
    """A kind that becomes served must leave the notes, by which it is refused before it is tried."""
    assert kind in {kind for kinds in REFUSED.values() for kind in kinds}
    assert families.check(kind)


@pytest.mark.long
@pytest.mark.timeout(3600)  # each kind in a process of its own
def test_the_table_is_what_the_load_check_says() -> None:
    kinds = {kind: not families.check_alone(kind) for kind in families.causal_kinds()}
    assert [kind for kind, is_served in kinds.items() if is_served] == SERVED
    rows = families.render(SERVED, [kind for kind, is_served in kinds.items() if not is_served])
    assert rows in PAGE, "python tools/families.py"

"""Text towers of multimodal checkpoints, against transformers' whole multimodal model that is given text only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from swarm.errors import ModelError
from swarm.stage.engine.tiny import VOCABULARY, tiny_config
from swarm.wire.messages import LayerRange
from tests.model.adapted_stages import alone, ready
from tests.model.adapters import LLAMA, Shape, merged_logits, write_adapter
from tests.model.as_transformers import TOKENS, check_greedy, even_lines, logits_beside_a_stranger
from tests.model.cutting import Cutter
from tests.model.float64 import truth_of
from tests.model.models import TEXT_PART

NUM_LAYERS = 4
_TEXT: dict[str, Any] = TEXT_PART | {"num_hidden_layers": NUM_LAYERS}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "output_channels": 16,
    "global_attn_indexes": [0],
    "mlp_dim": 32,
    "projector_input_dim": 32,
    "vision_output_dim": 32,
}
_AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 40, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "mistral3": {"model_type": "mistral"},
    "llava": {"model_type": "llama", "tie_word_embeddings": False},
    "llava_next": {"model_type": "mistral"},
    "internvl": {"model_type": "qwen2"},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "qwen2_vl": {"rope_parameters": _MROPE},
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "qwen3_vl": {"rope_parameters": _MROPE},
    "qwen3_vl_moe": {"rope_parameters": _MROPE, **_EXPERTS},
    "glm4v": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
    "glm4v_moe": {
        "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        **_GLM_EXPERTS,
    },
    "got_ocr2": {"model_type": "qwen2"},
    "fuyu": {"model_type": "persimmon", "num_key_value_heads": 6},
    "moss_transcribe_diarize": {"model_type": "qwen3"},
    "glm_ocr": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
    "glm46v": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
    "mllama": {"num_hidden_layers": NUM_LAYERS + 2, "cross_attention_layers": [1, 4]},
    "deepseek_ocr2": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", *["sparse"] * (NUM_LAYERS - 1)]},
    },
    "granite_docling": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "hunyuan_vl": {"rope_parameters": _MROPE},
    "paddleocr_vl": {"rope_parameters": _MROPE},
    "pixtral": {"model_type": "mistral"},
    "llama4": {
        **{"intermediate_size_mlp": 136, "num_local_experts": 5, "interleave_moe_layer_step": 2},
        **{"attention_chunk_size": 40, "floor_scale": 16},
    },
    "gemma4": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"sliding_window": 40, "num_kv_shared_layers": 2, "global_head_dim": 32},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 251},
    },
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 40},
    "kimi_k25": {
        **{"model_type": "deepseek_v3", "num_key_value_heads": 6, "q_lora_rank": 48, "kv_lora_rank": 40},
        **{"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20, **_GLM_EXPERTS},
    },
}
PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
NUM_NEW = 24

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Saved multimodal models by kind, in the layout in which checkpoints of this kind are released."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        if (kind, dtype) not in made:
            whole = "llava" if kind == "pixtral" else kind  # a vision tower's name, unlike the others
            config = AutoConfig.for_model(whole, text_config=_TEXT | KINDS.get(kind, {}), **_other_towers(kind))
            model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                offset = 1.0 if parameter.ndim == 1 else 0.0
                parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.15 + offset).to(dtype)
            made[kind, dtype] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind, dtype])
            if kind == "kimi_k25":
                _store_as_released(made[kind, dtype])
        return made[kind, dtype]

    return folder


def _store_as_released(folder: Path) -> None:
    """Undo what transformers renames in Kimi K2.5's text tower when it saves one."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {
        name.replace("language_model.model.blocks", "language_model.model.layers"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    values = json.loads(config.read_text())
    values["text_config"]["model_type"] = "kimi_k2"
    config.write_text(json.dumps(values))


def _other_towers(kind: str) -> dict[str, Any]:
    if kind == "deepseek_ocr2":
        return {"vision_config": {"sam_config": _VISION, "encoder_config": _VISION | {"num_key_value_heads": 2}}}
    if kind == "gemma4":
        return {"vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 16}, "audio_config": _AUDIO}
    if kind == "kimi_k25":
        return {"vision_config": _VISION, "tie_word_embeddings": False}
    if kind == "pixtral":
        return {"vision_config": _VISION | {"model_type": kind}}
    return {"audio_config": _AUDIO} if kind == "moss_transcribe_diarize" else {"vision_config": _VISION}


def whole_model(folder: Path) -> Any:
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_whole_models(kind: str, folders: Folders) -> None:
    """Cut in one, two or four stages, logits are as near to the whole multimodal model's in float64 as float32 can
    be."""
    truth = truth_of(folders(kind), TOKENS, AutoModelForMultimodalLM)
    assert truth.bound < 1e-4  # a model that blurs more than that would show nothing
    cutter = Cutter()
    for lines in ((0, 4), (0, 3, 4), (0, 1, 2, 3, 4)):
        assert truth.off(logits_beside_a_stranger(cutter.cut(folders(kind), lines))) < truth.bound, lines


def test_the_text_tower_of_gemma_3n_is_the_text_model(save: Folders, tmp_path: Path) -> None:
    """Its vision tower needs timm, so transformers' multimodal model can't be made here: the bits are those of the text
    tower alone, which other tests compare with transformers'."""
    plain = save(tiny_config(AutoConfig.for_model("gemma3n_text")))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    for name in (
        "vision_tower.timm_model.blocks.0.0.conv_exp.weight",
        "audio_tower.conformer.0.attention.attn.q_proj.weight",
        "embed_vision.embedding.weight",
    ):
        tensors[f"model.{name}"] = torch.ones(8, 8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **{"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text},
                **{"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}},
            }
        )
    )
    tokens = [token % VOCABULARY for token in TOKENS]
    lines = even_lines(text["num_hidden_layers"], 2)
    of_plain, of_tower = (Cutter().cut(folder, lines) for folder in (plain, tmp_path))
    for pipeline in (of_plain, of_tower):
        pipeline.open(1)
    assert torch.equal(of_tower.logits((1, 0, tokens))[0], of_plain.logits((1, 0, tokens))[0])


def test_the_page_names_all_kinds_of_these_tests() -> None:
    assert [kind for kind in KINDS if f"`{kind}`" not in PAGE.read_text()] == []


# Logits of every kind are compared above; these have unlike positions, windows, experts and layouts of files.
GREEDY = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl_moe", "glm4v_moe", "fuyu")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in GREEDY else pytest.mark.long) for kind in KINDS]
)
def test_greedy_tokens_equal_generate(kind: str, folders: Folders) -> None:
    """Cut in three, greedy tokens are those of the whole model's ``generate``, up to the first where the two best
    scores are nearer to each other than two computations need to be."""
    check_greedy(whole_model(folders(kind)), Cutter().cut(folders(kind), (0, 1, 3, 4)), NUM_NEW)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_vl_moe", "mistral3"])
def test_bfloat16(kind: str, folders: Folders) -> None:
    """In bfloat16, logits are near the whole model's in float32, and have the same bits in chunks and whole."""
    folder = folders(kind, torch.bfloat16)
    with torch.inference_mode():
        expected = whole_model(folder)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    pipeline = Cutter().cut(folder, (0, 2, 4), "bfloat16")
    actual = logits_beside_a_stranger(pipeline)
    assert float((actual.float() - expected).abs().mean() / expected.abs().mean()) < 0.2
    pipeline.open(1)
    assert torch.equal(pipeline.logits((1, 0, TOKENS))[0], actual)


# Where this version's whole model has its text tower, and where a former version's had it.
TOWERS = {
    "gemma3": ("model.language_model.", "language_model.model."),
    "mistral3": ("model.language_model.", "language_model.model."),
    "idefics3": ("model.text_model.", "model.text_model."),
    "qwen2_5_vl": ("model.language_model.", "model."),
}


def adapted_shapes(folder: Path, start: str) -> dict[str, Shape]:
    """The linear modules of whole models that adapters usually change, by the paths that peft stores."""
    modules = whole_model(folder).named_modules()
    return {
        path: (module.out_features, module.in_features)
        for path, module in modules
        if path.startswith(start) and path.rpartition(".")[2] in LLAMA and isinstance(module, torch.nn.Linear)
    }


@pytest.mark.parametrize("kind", TOWERS)
def test_an_adapter_of_the_whole_model_changes_its_text_tower(kind: str, folders: Folders, tmp_path: Path) -> None:
    """Under the paths of this version and a former one. Patterns match these paths."""
    folder, (now, former) = folders(kind), TOWERS[kind]
    shapes = adapted_shapes(folder, f"{now}layers.")
    for prefix in (now, former):
        renamed = {path.replace(now, prefix): shape for path, shape in shapes.items()}
        ranks = {f"{prefix}layers.1.mlp.up_proj": 7}
        adapter = write_adapter(tmp_path / prefix, renamed, seed=1, rank_pattern=ranks, alpha_pattern=ranks)
        tokens = TOKENS[:40]
        truth = merged_logits(
            folder, adapter, tokens, lambda path, prefix=prefix: path.replace(prefix, now), AutoModelForMultimodalLM
        )
        ours = alone([ready(folder, {"a": str(adapter)}, LayerRange(0, NUM_LAYERS))], tokens, "a")
        assert (ours.double() - truth).abs().max() < 1e-3 * truth.abs().max(), prefix


def test_an_adapter_of_another_tower_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = folders("gemma3")
    adapter = write_adapter(tmp_path / "both", adapted_shapes(folder, "model."), seed=1)
    with pytest.raises(ModelError, match=r"changes model\.vision_tower\.\S+; only linear modules in model\.layers can"):
        ready(folder, {"a": str(adapter)}, LayerRange(0, NUM_LAYERS))


def test_an_adapter_with_one_module_under_two_paths_is_refused(folders: Folders, tmp_path: Path) -> None:
    paths = (f"{prefix}layers.0.mlp.up_proj" for prefix in TOWERS["gemma3"])
    adapter = write_adapter(tmp_path / "twice", dict.fromkeys(paths, (136, 96)), seed=1)
    with pytest.raises(ModelError, match=r"has both \S+ and \S+, which are the same module"):
        ready(folders("gemma3"), {"a": str(adapter)}, LayerRange(0, NUM_LAYERS))

"""Text towers of multimodal checkpoints, against transformers' whole multimodal model that is given text only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.model.as_transformers import TOKENS, check_greedy, logits_beside_a_stranger
from tests.model.cutting import Cutter
from tests.model.float64 import truth_of

NUM_LAYERS = 4
_TEXT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 251,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
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
            config = AutoConfig.for_model(kind, text_config=_TEXT | KINDS.get(kind, {}), **_other_towers(kind))
            model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                offset = 1.0 if parameter.ndim == 1 else 0.0
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + offset
            made[kind, dtype] = tmp_path_factory.mktemp(kind)
            model.to(dtype).save_pretrained(made[kind, dtype])
        return made[kind, dtype]

    return folder


def _other_towers(kind: str) -> dict[str, Any]:
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


def test_the_page_names_all_kinds_of_these_tests() -> None:
    assert [kind for kind in KINDS if f"`{kind}`" not in PAGE.read_text()] == []


@pytest.mark.parametrize("kind", KINDS)
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

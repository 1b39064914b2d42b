"""Small random models. Whoever makes none needs no torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

VOCABULARY = 500


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    from transformers import LlamaConfig

    return LlamaConfig(**(values | changes))


# The text part of a small multimodal model.
TEXT_PART: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 251,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# The kinds of models that are named as served, each with what is its own: a window shorter than the tests' contexts,
# layers of alternating kinds, experts, sinks. Sizes that are no multiple of a vector show what larger ones would hide.
_SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 251,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = 40
_MIXED_LAYERS = ["sliding_attention", "full_attention"] * 3
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"head_dim": 16, "sliding_window": _WINDOW},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": _WINDOW,
        "layer_types": _MIXED_LAYERS,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "tie_word_embeddings": True,
    },
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": _MIXED_LAYERS,
    },
}


# Kinds with multi-head latent attention, whose cache has one latent per position.
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 6, "q_lora_rank": 48, "kv_lora_rank": 40},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20},
}
_LATENT_EXPERTS: dict[str, Any] = _LATENT | {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 40},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
# An index selects fewer positions than the shortest prompts have.
_INDEXED: dict[str, Any] = _LATENT_EXPERTS | {"index_topk": 30, "index_head_dim": 32, "index_n_heads": 12}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT_EXPERTS | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": _LATENT_EXPERTS,
    "glm4_moe_lite": _LATENT_EXPERTS | {"n_group": 1},
    "axk1": _LATENT_EXPERTS,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED | {"indexer_types": ["full", "shared", "full", "shared", "shared", "full"]},
}


# Kinds whose attention, positions or masks are their own (``swarm/stage/model/older_kinds.py``).
_PAIRED: dict[str, Any] = {"num_attention_heads": 4, "rotary_dim": 8}
ADAPTED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": _PAIRED,
    "codegen": _PAIRED,
    "gpt_neo": {"attention_types": [[["global", "local"], 3]], "window_size": _WINDOW},
    "gpt_neox_japanese": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 136},
    "biogpt": {},
    "xglm": {"ffn_dim": 136},
    "bloom": {},
    "mpt": {"max_seq_len": 1024},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "stablelm": {"qk_layernorm": True},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 136,
        "num_local_experts": 5,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
        "floor_scale": 16,
    },
}


def named_config(kind: str, **changes: Any) -> Any:
    """A small model of one of the ``ARCHITECTURES``, of ``LATENT`` or ``ADAPTED``, or of another kind."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(_SMALL | (ARCHITECTURES | LATENT | ADAPTED).get(kind, {}) | changes))


def random_model(config: Any, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    """Weights of high entropy: a model that repeats itself hides errors. In float32, unless told otherwise."""
    import torch
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        offset = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + offset
    return model.to(dtype or torch.float32).eval().requires_grad_(False)


def load_whole(folder: Path, dtype: torch.dtype | None = None, attention: str = "eager") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, attn_implementation=attention)
    return model.eval().requires_grad_(False)

"""Configurations of the most used text models: what their ``config.json`` says about the computation, by their names on
the hub. Settings that equal the defaults of the kind's class are left out, as are names of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)


def _sized(kind: str, *sizes: Any, **others: Any) -> dict[str, Any]:
    """Return a configuration with the sizes that nearly all have. Contexts are those of most models."""
    context = 131072 if "rope_scaling" in others else 8192
    named = dict(zip(_NAMES, sizes, strict=True))
    return {"model_type": kind, **named, "max_position_embeddings": context, **others}


def _llama3(factor: float, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }


def _yarn(factor: float, original: int, **others: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **others}


def _longrope(pairs: int) -> dict[str, Any]:
    """Factors grow with the pair, as real ones do."""
    long = [round(1.0 + 60.0 * pair / pairs, 3) for pair in range(pairs)]
    return {"type": "longrope", "short_factor": [1.0 + pair / 50 for pair in range(pairs)], "long_factor": long}


_DEEPSEEK_YARN = _yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
_SLIDING_5 = [*["sliding_attention"] * 5, "full_attention"]
_LINEAR_3 = [*["linear_attention"] * 3, "full_attention"]


def _attention_at(num_layers: int, attention: Sequence[int], others: str) -> list[str]:
    return ["full_attention" if layer in attention else others for layer in range(num_layers)]


_QWEN_3_5_ROPE: dict[str, Any] = {
    **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
}
_GRANITE_4: dict[str, Any] = {
    **{"layer_types": _attention_at(40, (5, 15, 25, 35), "mamba"), "position_embedding_type": "nope"},
    **{"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "embedding_multiplier": 12},
    **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": True},
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _sized("llama", 4096, 11008, 32, 32, 32, 32000),
    "meta-llama/Meta-Llama-3-8B": _sized("llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
    "meta-llama/Llama-3.1-8B-Instruct": _sized(
        "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, rope_scaling=_llama3(8.0)
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _sized(
        *("llama", 2048, 8192, 16, 32, 8, 128256),
        **{"head_dim": 64, "tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": _llama3(32.0)},
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "model_type": "llama4",
        "text_config": _sized(
            *("llama4_text", 5120, 8192, 48, 40, 8, 202048),
            **{"head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1},
            **{"attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "use_qk_norm": True},
            **{"rope_theta": 500000.0, "rope_scaling": _llama3(16.0, 1.0, 1.0), "max_position_embeddings": 10485760},
        ),
    },
    "meta-llama/Llama-3.2-11B-Vision-Instruct": {
        "model_type": "mllama",
        "text_config": _sized(
            *("mllama_text_model", 4096, 14336, 40, 32, 8, 128256),
            **{"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
            **{"rope_theta": 500000.0, "rope_scaling": _llama3(8.0), "tie_word_embeddings": False},
        ),
    },
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _sized("llama", 2048, 5632, 22, 32, 4, 32000),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _sized(
        "llama", 576, 1536, 30, 9, 3, 49152, rope_theta=100000, tie_word_embeddings=True
    ),
    "HuggingFaceTB/SmolLM3-3B": _sized(
        "smollm3", 2048, 11008, 36, 16, 4, 128256, rope_theta=5000000.0, tie_word_embeddings=True
    ),
    "01-ai/Yi-1.5-6B-Chat": _sized("llama", 4096, 11008, 32, 32, 4, 64000, rope_theta=5000000.0),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _sized(
        "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, rope_scaling=_llama3(8.0)
    ),
    "tiiuae/Falcon3-7B-Instruct": _sized("llama", 3072, 23040, 28, 12, 4, 131072, head_dim=256, rope_theta=1000042),
    "mistralai/Mistral-7B-v0.1": _sized("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    "mistralai/Mistral-7B-Instruct-v0.3": _sized(
        "mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None, rope_theta=1000000.0
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": _sized(
        "mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None, rope_theta=1000000.0
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _sized(
        *("mixtral", 4096, 14336, 32, 32, 8, 32000),
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None},
    ),
    "mistralai/Ministral-8B-Instruct-2410": _sized(
        *("mistral", 4096, 12288, 36, 32, 8, 131072),
        **{"head_dim": 128, "sliding_window": 32768, "rope_theta": 100000000.0},
    ),
    "Qwen/Qwen1.5-7B-Chat": _sized(
        "qwen2", 4096, 11008, 32, 32, 32, 151936, max_window_layers=28, use_sliding_window=False, rope_theta=1000000.0
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _sized(
        *("qwen2_moe", 2048, 5632, 24, 16, 16, 151936),
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60},
        **{"num_experts_per_tok": 4, "norm_topk_prob": False, "max_window_layers": 21, "rope_theta": 1000000.0},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _sized(
        *("qwen2", 896, 4864, 24, 14, 2, 151936),
        **{"max_window_layers": 21, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen2.5-7B-Instruct": _sized(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, max_window_layers=28, rope_theta=1000000.0
    ),
    "Qwen/Qwen3-0.6B": _sized(
        *("qwen3", 1024, 3072, 28, 16, 8, 151936),
        **{"head_dim": 128, "max_window_layers": 28, "rope_theta": 1000000, "tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": _sized(
        "qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, max_window_layers=36, rope_theta=1000000
    ),
    "Qwen/Qwen3-30B-A3B": _sized(
        *("qwen3_moe", 2048, 6144, 48, 32, 4, 151936),
        **{"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "rope_theta": 1000000.0, "max_window_layers": 48},
    ),
    "google/gemma-7b": _sized("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "google/gemma-2-9b-it": _sized(
        *("gemma2", 3584, 14336, 42, 16, 8, 256000),
        **{"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
    ),
    "google/gemma-3-1b-it": _sized(
        *("gemma3_text", 1152, 6912, 26, 4, 1, 262144),
        **{"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000},
        **{"rope_theta": 1000000, "query_pre_attn_scalar": 256},
    ),
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": _sized(
            *("gemma3_text", 2560, 10240, 34, 8, 4, 262208),
            **{"head_dim": 256, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        ),
    },
    "google/gemma-3n-E2B-it": {
        "model_type": "gemma3n",
        "text_config": _sized(
            *("gemma3n_text", 2048, [8192] * 30, 30, 8, 2, 262400),
            **{"head_dim": 256, "num_kv_shared_layers": 10, "sliding_window": 512},
            **{"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6},
            **{"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20},
        ),
    },
    "google/gemma-4-E2B-it": {
        "model_type": "gemma4",
        "text_config": _sized(
            *("gemma4_text", 1536, 6144, 35, 8, 1, 262144),
            **{"head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
            **{"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "final_logit_softcapping": 30.0},
        ),
    },
    "google/gemma-4-26B-A4B-it": {
        "model_type": "gemma4",
        "text_config": _sized(
            *("gemma4_text", 2816, 2112, 30, 16, 8, 262144),
            **{"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            **{"layer_types": _SLIDING_5 * 5, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
            **{"use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0},
        ),
    },
    "microsoft/phi-1_5": _sized("phi", 2048, 8192, 24, 32, 32, 51200, partial_rotary_factor=0.5, hidden_act="gelu_new"),
    "microsoft/phi-2": _sized("phi", 2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4, hidden_act="gelu_new"),
    "microsoft/Phi-3-mini-4k-instruct": _sized("phi3", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047),
    "microsoft/Phi-3.5-mini-instruct": _sized(
        *("phi3", 3072, 8192, 32, 32, 32, 32064),
        **{"rope_scaling": _longrope(48), "max_position_embeddings": 131072, "sliding_window": 262144},
        **{"original_max_position_embeddings": 4096},
    ),
    "microsoft/Phi-3.5-MoE-instruct": _sized(
        *("phimoe", 4096, 6400, 32, 32, 8, 32064),
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
        **{"rope_scaling": {**_longrope(64), "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}},
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 131072},
    ),
    "microsoft/phi-4": _sized("phi3", 5120, 17920, 40, 40, 10, 100352, rope_theta=250000, sliding_window=None),
    "microsoft/Phi-4-mini-instruct": _sized(
        *("phi3", 3072, 8192, 32, 24, 8, 200064),
        **{"partial_rotary_factor": 0.75, "rope_scaling": _longrope(48), "max_position_embeddings": 131072},
        **{"original_max_position_embeddings": 4096, "sliding_window": 262144, "tie_word_embeddings": True},
    ),
    "openai/gpt-oss-20b": _sized(
        *("gpt_oss", 2880, 2880, 24, 64, 8, 201088),
        **{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12, "rope_theta": 150000, "swiglu_limit": 7.0},
        **{"rope_scaling": _yarn(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False), "attention_bias": True},
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": _sized(
        *("deepseek_v2", 2048, 10944, 27, 16, 16, 102400),
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        **{"first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        **{"rope_scaling": {**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-ai/DeepSeek-V3": _sized(
        *("deepseek_v3", 7168, 18432, 61, 128, 128, 129280),
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_scaling": _DEEPSEEK_YARN},
    ),
    "moonshotai/Kimi-K2-Instruct": _sized(
        *("kimi_k2", 7168, 18432, 61, 64, 64, 163840),
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.827, "rope_theta": 50000.0},
        **{"rope_scaling": _yarn(32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)},
        **{"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}},
    ),
    "deepseek-ai/DeepSeek-V3.2-Exp": _sized(
        *("deepseek_v32", 7168, 18432, 61, 128, 128, 129280),
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_scaling": _DEEPSEEK_YARN},
        **{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "max_position_embeddings": 163840},
    ),
    "zai-org/GLM-5": _sized(
        *("glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880),
        **{"kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
        **{"v_head_dim": 256, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5},
        **{"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "max_position_embeddings": 202752},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
    ),
    "meituan-longcat/LongCat-Flash-Chat": {
        **{"model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64},
        **{"ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256},
        **{"moe_topk": 12, "routed_scaling_factor": 6.0, "kv_lora_rank": 512, "q_lora_rank": 1536},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072},
        **{"rope_theta": 10000000.0, "max_position_embeddings": 131072, "attention_bias": False},
    },
    "zai-org/glm-4-9b-chat-hf": _sized(
        *("glm", 4096, 13696, 40, 32, 2, 151552),
        **{"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "zai-org/GLM-4-9B-0414": _sized("glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, partial_rotary_factor=0.5),
    "zai-org/GLM-4.5-Air": _sized(
        *("glm4_moe", 4096, 10944, 46, 96, 8, 151552),
        **{"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000},
        **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    ),
    "allenai/OLMo-7B-hf": _sized("olmo", 4096, 11008, 32, 32, 32, 50304),
    "allenai/OLMo-2-1124-7B": _sized("olmo2", 4096, 11008, 32, 32, 32, 100352, rope_theta=500000),
    "allenai/Olmo-3-7B-Instruct": _sized(
        *("olmo3", 4096, 11008, 32, 32, 32, 100278),
        **{"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "sliding_window": 4096},
        **{"rope_theta": 500000, "rope_scaling": _yarn(8.0, 8192, beta_fast=32.0, beta_slow=1.0)},
    ),
    "allenai/OLMoE-1B-7B-0924": _sized(
        "olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False
    ),
    "ibm-granite/granite-3.3-8b-instruct": _sized(
        *("granite", 4096, 12800, 40, 32, 8, 49159),
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
        **{"residual_multiplier": 0.22, "rope_theta": 10000000.0, "tie_word_embeddings": True},
    ),
    "ibm-granite/granite-3.1-3b-a800m-instruct": _sized(
        *("granitemoe", 1536, 512, 32, 24, 8, 49155),
        **{"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
        **{"residual_multiplier": 0.22, "num_local_experts": 40, "num_experts_per_tok": 8},
    ),
    "tiiuae/falcon-7b": {
        **{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
        **{"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False, "vocab_size": 65024},
    },
    "tiiuae/falcon-40b": {
        **{"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128},
        **{"num_kv_heads": 8, "new_decoder_architecture": True, "bias": False, "alibi": False, "vocab_size": 65024},
    },
    "stabilityai/stablelm-2-1_6b": _sized(
        "stablelm", 2048, 5632, 24, 32, 32, 100352, partial_rotary_factor=0.25, use_qkv_bias=True
    ),
    "stabilityai/stablelm-2-12b": _sized(
        *("stablelm", 5120, 13824, 40, 32, 8, 100352),
        **{"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "bigcode/starcoder2-3b": _sized(
        *("starcoder2", 3072, 12288, 30, 24, 2, 49152),
        **{"sliding_window": 4096, "use_bias": True, "rope_theta": 999999.4420358813},
    ),
    "CohereLabs/c4ai-command-r-v01": _sized(
        "cohere", 8192, 22528, 40, 64, 64, 256000, logit_scale=0.0625, rope_theta=8000000.0
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": _sized(
        *("cohere2", 4096, 14336, 32, 32, 8, 256000),
        **{"logit_scale": 0.25, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "internlm/internlm3-8b-instruct": _sized(
        *("internlm3", 4096, 10240, 48, 32, 2, 128512),
        **{"head_dim": 128, "rope_theta": 50000000, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}},
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": _sized(
        *("exaone4", 2048, 4096, 30, 32, 8, 102400),
        **{"head_dim": 64, "rope_theta": 1000000, "rope_scaling": _llama3(16.0), "sliding_window": None},
        **{"layer_types": ["full_attention"] * 30, "tie_word_embeddings": True},
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": _sized(
        *("exaone4", 5120, 27392, 64, 40, 8, 102400),
        **{"head_dim": 128, "rope_theta": 1000000, "rope_scaling": _llama3(16.0), "sliding_window": 4096},
        **{"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
    ),
    "nvidia/Minitron-4B-Base": _sized(
        "nemotron", 3072, 9216, 32, 24, 8, 256000, head_dim=128, partial_rotary_factor=0.5
    ),
    "tencent/Hunyuan-7B-Instruct": _sized(
        *("hunyuan_v1_dense", 4096, 14336, 32, 32, 8, 128167),
        **{"head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": _sized(
        *("ernie4_5_moe", 2560, 12288, 28, 20, 4, 103424),
        **{"moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 27, "rope_theta": 500000.0},
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _sized(
        *("seed_oss", 5120, 27648, 64, 80, 8, 155136),
        **{"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "rope_theta": 10000000.0},
    ),
    "databricks/dbrx-instruct": {
        **{"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352},
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "EleutherAI/pythia-1b": {
        **{"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 8, "rotary_pct": 0.25, "use_parallel_residual": True, "vocab_size": 50304},
    },
    "openai-community/gpt2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12},
    "facebook/opt-350m": {
        **{"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    },
    "bigscience/bloom-560m": {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "mosaicml/mpt-7b": {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432},
    "Zyphra/Zamba-7B-v1": {
        **{"model_type": "zamba", "hidden_size": 3712, "intermediate_size": 14848, "num_hidden_layers": 76},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "attention_head_dim": 464, "n_mamba_heads": 2},
        **{"attn_layer_offset": 4, "attn_layer_period": 6, "mamba_d_state": 16, "mamba_dt_rank": 232},
    },
    "Zyphra/Zamba2-1.2B": {
        **{"model_type": "zamba2", "hidden_size": 2048, "num_hidden_layers": 38, "num_attention_heads": 32},
        **{"n_mamba_heads": 64, "mamba_d_state": 128, "num_mem_blocks": 1, "use_mem_rope": True},
        **{"use_shared_attention_adapter": True, "adapter_rank": 128},
        "layers_block_type": [*["mamba"] * 5, "hybrid"] * 6 + ["mamba"] * 2,
    },
    "Zyphra/Zamba2-2.7B": {
        **{"model_type": "zamba2", "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32},
        **{"n_mamba_heads": 80, "mamba_d_state": 64, "num_mem_blocks": 2, "adapter_rank": 128},
    },
    "google/recurrentgemma-2b": {
        **{"model_type": "recurrent_gemma", "hidden_size": 2560, "intermediate_size": 15360, "num_hidden_layers": 26},
        **{"num_attention_heads": 10, "num_key_value_heads": 1, "lru_width": 2560, "attention_window_size": 2048},
    },
    "RWKV/rwkv-4-169m-pile": {
        **{"model_type": "rwkv", "hidden_size": 768, "attention_hidden_size": 768, "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "context_length": 1024, "rescale_every": 6},
    },
    "NX-AI/xLSTM-7b": {"model_type": "xlstm", "hidden_size": 4096, "num_blocks": 32, "num_hidden_layers": 32},
    "mistralai/Mistral-Small-24B-Instruct-2501": _sized(
        "mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None, rope_theta=100000000.0
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": {
        "model_type": "mistral3",
        "text_config": _sized(
            *("mistral", 5120, 32768, 40, 32, 8, 131072),
            **{"head_dim": 128, "sliding_window": None, "rope_theta": 1000000000.0, "max_position_embeddings": 131072},
        ),
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "text_config": _sized(
            *("qwen2_5_vl_text", 3584, 18944, 28, 28, 4, 152064),
            **{"max_window_layers": 28, "use_sliding_window": False, "rope_theta": 1000000.0},
            **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        ),
    },
    "Qwen/Qwen3-VL-8B-Instruct": {
        "model_type": "qwen3_vl",
        "text_config": _sized(
            *("qwen3_vl_text", 4096, 12288, 36, 32, 8, 151936),
            **{"head_dim": 128, "rope_theta": 5000000, "max_position_embeddings": 262144},
            **{"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
        ),
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _sized(
        *("qwen3_next", 2048, 5120, 48, 16, 2, 151936),
        **{"head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "full_attention_interval": 4},
        **{"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512},
        **{"num_experts_per_tok": 10, "norm_topk_prob": True, "mlp_only_layers": []},
    ),
    "Qwen/Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": _sized(
            *("qwen3_5_text", 5120, 17408, 64, 24, 4, 248320),
            **{"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "attn_output_gate": True},
            **{"layer_types": _LINEAR_3 * 16, "full_attention_interval": 4, "rope_parameters": _QWEN_3_5_ROPE},
        ),
    },
    "Qwen/Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "head_dim": 256},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256},
            **{"num_experts_per_tok": 8, "layer_types": _LINEAR_3 * 10, "rope_parameters": _QWEN_3_5_ROPE},
            **{"vocab_size": 248320, "max_position_embeddings": 262144},
        },
    },
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": _sized(
        *("kimi_linear", 2304, 9216, 27, 32, 32, 163840),
        **{"head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "mla_use_nope": True, "moe_intermediate_size": 1024, "num_experts": 256},
        **{"num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446},
        **{"num_expert_group": 1, "topk_group": 1, "model_max_length": 1048576},
        linear_attn_config={
            **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32},
            **{"kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4},
        },
    ),
    "zai-org/GLM-4.7-Flash": _sized(
        *("glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880),
        **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
        **{"v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"norm_topk_prob": True, "routed_scaling_factor": 1.8, "rope_theta": 1000000},
        **{"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1, "max_position_embeddings": 202752},
    ),
    "tiiuae/Falcon-H1-1.5B-Instruct": _sized(
        *("falcon_h1", 2048, 4096, 24, 8, 2, 65537),
        **{"head_dim": 128, "rope_theta": 100000000000.0, "mamba_d_head": 64, "mamba_d_ssm": 3072},
        **{"mamba_d_state": 256, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_norm_before_gate": False},
        **{"mamba_rms_norm": False, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375},
        **{"embedding_multiplier": 5.656854249492381, "key_multiplier": 0.39062499999999994},
        **{"lm_head_multiplier": 0.01953125, "mlp_multipliers": [0.8838834764831844, 0.5859375]},
        **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587},
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ),
    "ibm-granite/granite-4.0-h-micro": _sized(
        *("granitemoehybrid", 2048, 8192, 40, 32, 8, 100352),
        **{"attention_multiplier": 0.015625, "logits_scaling": 8, "mamba_n_heads": 64, "num_local_experts": 0},
        **{"num_experts_per_tok": 0, "shared_intermediate_size": 8192, **_GRANITE_4},
    ),
    "ibm-granite/granite-4.0-h-tiny": _sized(
        *("granitemoehybrid", 1536, 512, 40, 12, 4, 100352),
        **{"attention_multiplier": 0.0078125, "logits_scaling": 6, "mamba_n_heads": 48, "num_local_experts": 64},
        **{"num_experts_per_tok": 6, "shared_intermediate_size": 1024, **_GRANITE_4},
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": {
        **{"model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
        **{"mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128},
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    },
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        **{"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52},
        **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072},
        **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1},
        **{"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    "LiquidAI/LFM2-1.2B": {
        **{"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "conv_L_cache": 3},
        **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "rope_theta": 1000000.0, "vocab_size": 65536},
    },
    "LiquidAI/LFM2-8B-A1B": _sized(
        *("lfm2_moe", 2048, 7168, 24, 32, 8, 65536),
        **{"layer_types": _attention_at(24, (2, 6, 10, 14, 18, 21), "conv"), "conv_L_cache": 3},
        **{"moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4},
        **{"norm_topk_prob": True, "use_expert_bias": True, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0},
    ),
    "ai21labs/AI21-Jamba-Mini-1.5": _sized(
        *("jamba", 4096, 14336, 32, 32, 8, 65536),
        **{"attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2},
        **{"num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 256},
    ),
    "MiniMaxAI/MiniMax-Text-01-hf": _sized(
        *("minimax", 6144, 9216, 80, 64, 8, 200064),
        **{"head_dim": 128, "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10, "block_size": 256},
        **{"num_local_experts": 32, "num_experts_per_tok": 2, "rope_theta": 10000000, "partial_rotary_factor": 0.5},
        **{"full_attn_alpha_factor": 3.5565588200778455, "linear_attn_alpha_factor": 3.5565588200778455},
        **{"mlp_alpha_factor": 3.5565588200778455},
    ),
    "MiniMaxAI/MiniMax-M2": _sized(
        *("minimax_m2", 3072, 1536, 62, 48, 8, 200064),
        **{"head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256},
        **{"num_experts_per_tok": 8, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "state-spaces/mamba-130m-hf": {
        **{"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16},
        **{"time_step_rank": 48, "vocab_size": 50280, "expand": 2, "conv_kernel": 4},
    },
    "mistralai/Mamba-Codestral-7B-v0.1": {
        **{"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64},
        **{"n_groups": 8, "state_size": 128, "vocab_size": 32768, "tie_word_embeddings": False},
    },
    "EleutherAI/gpt-j-6b": {
        **{"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048},
        **{"rotary_dim": 64, "vocab_size": 50400, "activation_function": "gelu_new", "tie_word_embeddings": False},
    },
    "bigcode/starcoderbase-1b": {
        **{"model_type": "gpt_bigcode", "n_embd": 2048, "n_head": 16, "n_layer": 24, "n_inner": 8192},
        **{"n_positions": 8192, "multi_query": True, "vocab_size": 49152},
    },
}

# Models that their own Python code computes.
WITH_CODE: dict[str, dict[str, Any]] = {
    "baichuan-inc/Baichuan2-7B-Chat": {
        "model_type": "baichuan",
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
    },
    "internlm/internlm2-chat-7b": {
        "model_type": "internlm2",
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    },
    "zai-org/chatglm3-6b": {
        "model_type": "chatglm",
        "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    },
}

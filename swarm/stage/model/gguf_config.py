"""Configuration of the model in a GGUF file, as a ``config.json`` of transformers. Does not import torch.

transformers' own table has gaps for what Swarm serves: sizes of heads, soft caps, layers with windows, scaled
positions, the experts of Mixtral. So each architecture has a function here. A setting that is not understood is
refused, because the model would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel
from swarm.stage.model.gguf_metadata import GgufMetadata
from swarm.stage.model.gguf_rope import rope_parameters, rope_theta

Config = dict[str, Any]

_SOFTMAX = 1  # an expert_gating_func


def make_config(model: GgufModel) -> Config:
    """Return the contents of ``config.json``. Raises ``ModelError``."""
    metadata = GgufMetadata(model)
    make = _ARCHITECTURES.get(metadata.architecture)
    if make is None:
        raise ModelError(
            f"{metadata.path}: GGUF files of the architecture {metadata.architecture[:40]!r} are not supported; use "
            f"the model's safetensors files, or a model of {', '.join(_ARCHITECTURES)}"
        )
    metadata.require("attention.causal", True)
    config = make(metadata)
    metadata.check_all_used()
    return config


def _common(metadata: GgufMetadata, model_type: str, class_name: str) -> Config:
    model = metadata.model
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{metadata.path} has no token_embd.weight; is this a language model, and complete?")
    vocab_size = table.shape[0]
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    head_size = metadata.integer("attention.key_length", hidden // heads)
    metadata.require("attention.value_length", head_size)
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length", 1 if _has_experts(metadata) else None, least=0),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": metadata.token("bos", vocab_size),
        "eos_token_id": metadata.token("eos", vocab_size),
        "pad_token_id": metadata.token("padding", vocab_size),
    }


def _has_experts(metadata: GgufMetadata) -> bool:
    return metadata.integer("expert_count", 0, least=0) > 0


def _has_bias(metadata: GgufMetadata, *parts: str) -> bool:
    """Whether these parts of the layers have biases. Raises ``ModelError`` if only some have."""
    names = {f"blk.{layer}.{part}.bias" for layer in range(metadata.num_layers) for part in parts}
    present = names & metadata.model.tensors.keys()
    if present and present != names:
        raise ModelError(f"{metadata.path} has {min(present)} and no {min(names - present)}; download it again")
    return bool(present)


def _rms_eps(metadata: GgufMetadata) -> float:
    return metadata.number("attention.layer_norm_rms_epsilon")


def _full_rope(metadata: GgufMetadata, config: Config) -> Config:
    """Return the positions' parameters of a model that rotates whole heads."""
    metadata.require("rope.dimension_count", config["head_dim"])
    return {"rope_parameters": rope_parameters(metadata, config["head_dim"])}


def _llama(metadata: GgufMetadata) -> Config:
    if _has_experts(metadata):
        return _mixtral(metadata)
    window = metadata.integer("attention.sliding_window", 0, least=0)
    kind = ("mistral", "MistralForCausalLM") if window else ("llama", "LlamaForCausalLM")
    config = _common(metadata, *kind) | {"rms_norm_eps": _rms_eps(metadata)}
    metadata.require("expert_used_count", 0)
    if window:
        return config | _full_rope(metadata, config) | {"sliding_window": window}
    biases = {
        "attention_bias": _has_bias(metadata, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_bias(metadata, "ffn_gate", "ffn_up", "ffn_down"),
    }
    return config | _full_rope(metadata, config) | biases


def _mixtral(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "mixtral", "MixtralForCausalLM")
    metadata.require("expert_weights_norm", True)
    metadata.require("expert_feed_forward_length", config["intermediate_size"])
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return (
        config
        | _experts(metadata, "num_local_experts")
        | _full_rope(metadata, config)
        | {"rms_norm_eps": _rms_eps(metadata), "sliding_window": window or None}
    )


def _experts(metadata: GgufMetadata, name: str) -> Config:
    metadata.require("expert_gating_func", _SOFTMAX)
    metadata.require("expert_weights_scale", 0.0, 1.0)
    for key in ("expert_shared_count", "leading_dense_block_count", "expert_group_count", "expert_group_used_count"):
        metadata.require(key, 0)
    count, used = metadata.integer("expert_count"), metadata.integer("expert_used_count")
    if used > count:
        raise ModelError(f"{metadata.path} uses {used} of {count} experts; download it again")
    return {name: count, "num_experts_per_tok": used}


def _qwen2(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "qwen2", "Qwen2ForCausalLM")
    return config | _full_rope(metadata, config) | {"rms_norm_eps": _rms_eps(metadata), "use_sliding_window": False}


def _qwen3(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "qwen3", "Qwen3ForCausalLM")
    return config | _full_rope(metadata, config) | {"rms_norm_eps": _rms_eps(metadata), "use_sliding_window": False}


def _qwen3_moe(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "qwen3_moe", "Qwen3MoeForCausalLM")
    return (
        config
        | _experts(metadata, "num_experts")
        | _full_rope(metadata, config)
        | {
            "rms_norm_eps": _rms_eps(metadata),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "norm_topk_prob": metadata.raw("expert_weights_norm") in (None, True),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }
    )


def _gemma(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "gemma", "GemmaForCausalLM")
    gelu = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return config | _full_rope(metadata, config) | gelu | {"rms_norm_eps": _rms_eps(metadata)}


def _gemma2(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "gemma2", "Gemma2ForCausalLM")
    return (
        config
        | _full_rope(metadata, config)
        | {
            "rms_norm_eps": _rms_eps(metadata),
            "hidden_activation": "gelu_pytorch_tanh",
            # The file does not have it. Gemma 2 has three sizes; only the one with 46 layers differs.
            "query_pre_attn_scalar": _query_scalar(config, 46),
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0) or None,
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
            "sliding_window": metadata.integer("attention.sliding_window", 4096),
            "layer_types": _layer_types(metadata, 2),
        }
    )


def _gemma3(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "gemma3_text", "Gemma3ForCausalLM")
    metadata.require("rope.dimension_count", config["head_dim"])
    local = metadata.number("rope.freq_base_swa", 10000.0)
    positions = {
        "full_attention": rope_parameters(metadata, config["head_dim"], theta=rope_theta(metadata, 1000000.0)),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return config | {
        "rms_norm_eps": _rms_eps(metadata),
        "hidden_activation": "gelu_pytorch_tanh",
        # The file does not have it. Only the largest Gemma 3, with 62 layers, differs.
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": metadata.integer("attention.sliding_window", 1024),
        "layer_types": _layer_types(metadata, 6),
        "rope_parameters": positions,
        "use_bidirectional_attention": False,
    }


def _query_scalar(config: Config, layers_of_largest: int) -> int:
    if config["num_hidden_layers"] == layers_of_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(metadata: GgufMetadata, every: int) -> list[str]:
    """Return the layers' kinds: each ``every``-th sees all tokens, unless the file has a pattern of its own."""
    num_layers = metadata.num_layers
    pattern = metadata.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == num_layers:
        slides = [bool(each) for each in pattern]
    elif pattern is None or (type(pattern) is int and pattern > 0):
        slides = [(layer + 1) % (pattern or every) != 0 for layer in range(num_layers)]
    else:
        raise ModelError(f"{metadata.path} has an unusable attention.sliding_window_pattern; download it again")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _phi3(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "phi3", "Phi3ForCausalLM")
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    return config | {
        "rms_norm_eps": _rms_eps(metadata),
        "sliding_window": metadata.integer("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "rope_parameters": rope_parameters(metadata, rotated) | {"partial_rotary_factor": rotated / config["head_dim"]},
    }


def _gpt_oss(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "gpt_oss", "GptOssForCausalLM")
    metadata.require("rope.dimension_count", config["head_dim"])
    positions = rope_parameters(metadata, config["head_dim"])
    if positions["rope_type"] == "yarn":
        positions["truncate"] = False  # as in the original model; llama.cpp rounds the limits
    return (
        config
        | _experts(metadata, "num_local_experts")
        | {
            "intermediate_size": metadata.integer("expert_feed_forward_length", config["intermediate_size"]),
            "rms_norm_eps": _rms_eps(metadata),
            "attention_bias": True,
            "sliding_window": metadata.integer("attention.sliding_window"),
            "layer_types": _layer_types(metadata, 2),
            "rope_parameters": positions,
        }
    )


def _granite(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "granite", "GraniteForCausalLM")
    return (
        config
        | _full_rope(metadata, config)
        | {
            "rms_norm_eps": _rms_eps(metadata),
            "attention_bias": _has_bias(metadata, "attn_q", "attn_k", "attn_v", "attn_output"),
            "embedding_multiplier": metadata.number("embedding_scale", 1.0),
            "residual_multiplier": metadata.number("residual_scale", 1.0),
            "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
            "logits_scaling": metadata.number("logit_scale", 1.0),
        }
    )


def _olmo2(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "olmo2", "Olmo2ForCausalLM")
    return config | _full_rope(metadata, config) | {"rms_norm_eps": _rms_eps(metadata)}


def _starcoder2(metadata: GgufMetadata) -> Config:
    config = _common(metadata, "starcoder2", "Starcoder2ForCausalLM")
    return (
        config
        | _full_rope(metadata, config)
        | {
            "norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
            "use_bias": True,
            "sliding_window": metadata.integer("attention.sliding_window", 0, least=0) or None,
        }
    )


# By the files' architecture.
_ARCHITECTURES: dict[str, Callable[[GgufMetadata], Config]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
}

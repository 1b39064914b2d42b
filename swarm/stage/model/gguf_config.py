"""Configuration of the model in a GGUF file, as a ``config.json`` of transformers. Does not import torch.

transformers' own table has gaps for what Swarm serves: sizes of heads, soft caps, layers with windows, scaled
positions, the experts of Mixtral. So each architecture has a row in the table below: what its configuration has beside
the common settings. A setting that is not understood is refused, because the model would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel
from swarm.stage.model.gguf_metadata import GgufMetadata
from swarm.stage.model.gguf_rope import rope_parameters, rope_theta

Config = dict[str, Any]
Settings = Callable[[GgufMetadata, Config], Config]  # from the file, and from the settings so far

_SOFTMAX = 1  # an expert_gating_func


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model in transformers, and its settings beside those that all have."""

    model_type: str
    class_name: str
    settings: tuple[Settings, ...]


def make_config(model: GgufModel) -> Config:
    """Return the contents of ``config.json``. Raises ``ModelError``."""
    metadata = GgufMetadata(model)
    architecture = _ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise ModelError(
            f"{metadata.path}: GGUF files of the architecture {metadata.architecture[:40]!r} are not supported; use "
            f"the model's safetensors files, or a model of {', '.join(_ARCHITECTURES)}"
        )
    metadata.require("attention.causal", True)
    if architecture is _LLAMA:
        architecture = _choose_llama(metadata)
    config = _common(metadata, architecture)
    for settings in architecture.settings:
        config |= settings(metadata, config)
    metadata.check_all_used()
    return config


def _common(metadata: GgufMetadata, architecture: Architecture) -> Config:
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
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
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


def _rms_eps(metadata: GgufMetadata, config: Config) -> Config:
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def _rope(metadata: GgufMetadata, config: Config) -> Config:
    """Return the positions' parameters of a model that rotates whole heads."""
    metadata.require("rope.dimension_count", config["head_dim"])
    return {"rope_parameters": rope_parameters(metadata, config["head_dim"])}


def _fixed(**settings: Any) -> Settings:
    """Return settings that are the same for all models of an architecture."""
    return lambda metadata, config: dict(settings)


def _window(metadata: GgufMetadata, config: Config) -> Config:
    """Return the window of all layers, if the model has one."""
    return {"sliding_window": metadata.integer("attention.sliding_window", 0, least=0) or None}


def _layers(every: int, window: int | None = None) -> Settings:
    """Return windows of some layers: each ``every``-th sees all tokens. ``window`` is their default size."""
    return lambda metadata, config: {
        "sliding_window": metadata.integer("attention.sliding_window", window),
        "layer_types": _layer_types(metadata, every),
    }


def _layer_types(metadata: GgufMetadata, every: int) -> list[str]:
    """Return the layers' kinds: each ``every``-th sees all tokens, unless the file has a pattern of its own."""
    num_layers = metadata.num_layers
    pattern = metadata.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == num_layers:
        slides = [bool(slide) for slide in pattern]
    elif pattern is None or (type(pattern) is int and pattern > 0):
        slides = [(layer + 1) % (pattern or every) != 0 for layer in range(num_layers)]
    else:
        raise ModelError(f"{metadata.path} has an unusable attention.sliding_window_pattern; download it again")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _attention_bias(metadata: GgufMetadata, config: Config) -> Config:
    return {"attention_bias": _has_bias(metadata, "attn_q", "attn_k", "attn_v", "attn_output")}


def _mlp_bias(metadata: GgufMetadata, config: Config) -> Config:
    return {"mlp_bias": _has_bias(metadata, "ffn_gate", "ffn_up", "ffn_down")}


def _no_experts(metadata: GgufMetadata, config: Config) -> Config:
    metadata.require("expert_used_count", 0)
    return {}


def _experts(name: str) -> Settings:
    """Return the experts' numbers; ``name`` is what the configuration calls their count."""

    def settings(metadata: GgufMetadata, config: Config) -> Config:
        metadata.require("expert_gating_func", _SOFTMAX)
        metadata.require("expert_weights_scale", 0.0, 1.0)
        for key in (
            "expert_shared_count",
            "leading_dense_block_count",
            "expert_group_count",
            "expert_group_used_count",
        ):
            metadata.require(key, 0)
        count, used = metadata.integer("expert_count"), metadata.integer("expert_used_count")
        if used > count:
            raise ModelError(f"{metadata.path} uses {used} of {count} experts; download it again")
        return {name: count, "num_experts_per_tok": used}

    return settings


def _mixtral(metadata: GgufMetadata, config: Config) -> Config:
    metadata.require("expert_weights_norm", True)
    metadata.require("expert_feed_forward_length", config["intermediate_size"])
    return {}


def _qwen3_moe(metadata: GgufMetadata, config: Config) -> Config:
    return {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.raw("expert_weights_norm") in (None, True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(cap: float, final_cap: float, layers_of_largest: int) -> Settings:
    """Return the soft caps of Gemma 2 and 3, with their defaults, and the divisor of attention's scores.

    The file does not have the divisor. Among the sizes of each, only the largest has another one than the size of its
    heads; it is recognized by its number of layers.
    """

    def settings(metadata: GgufMetadata, config: Config) -> Config:
        is_largest = config["num_hidden_layers"] == layers_of_largest
        per_head = config["hidden_size"] // config["num_attention_heads"]
        return {
            "query_pre_attn_scalar": int(per_head if is_largest else config["head_dim"]),
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping", cap) or None,
            "final_logit_softcapping": metadata.number("final_logit_softcapping", final_cap) or None,
        }

    return settings


def _gemma3_rope(metadata: GgufMetadata, config: Config) -> Config:
    metadata.require("rope.dimension_count", config["head_dim"])
    local = metadata.number("rope.freq_base_swa", 10000.0)
    return {
        "rope_parameters": {
            "full_attention": rope_parameters(metadata, config["head_dim"], theta=rope_theta(metadata, 1000000.0)),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _phi3(metadata: GgufMetadata, config: Config) -> Config:
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    return {
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "rope_parameters": rope_parameters(metadata, rotated) | {"partial_rotary_factor": rotated / config["head_dim"]},
    }


def _gpt_oss(metadata: GgufMetadata, config: Config) -> Config:
    positions = config["rope_parameters"]
    if positions["rope_type"] == "yarn":
        positions["truncate"] = False  # as in the original model; llama.cpp rounds the limits
    return {"intermediate_size": metadata.integer("expert_feed_forward_length", config["intermediate_size"])}


def _granite(metadata: GgufMetadata, config: Config) -> Config:
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _starcoder2(metadata: GgufMetadata, config: Config) -> Config:
    return {"norm_epsilon": metadata.number("attention.layer_norm_epsilon"), "use_bias": True}


def _choose_llama(metadata: GgufMetadata) -> Architecture:
    """Return the kind of a file of llama's architecture, which also has Mistral and Mixtral models."""
    if _has_experts(metadata):
        return _MIXTRAL
    return _MISTRAL if metadata.integer("attention.sliding_window", 0, least=0) else _LLAMA


_NO_WINDOW = _fixed(use_sliding_window=False)
_GELU = _fixed(hidden_activation="gelu_pytorch_tanh")

_LLAMA = Architecture("llama", "LlamaForCausalLM", (_rms_eps, _rope, _no_experts, _attention_bias, _mlp_bias))
_MISTRAL = Architecture("mistral", "MistralForCausalLM", (_rms_eps, _rope, _no_experts, _window))
_MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", (_rms_eps, _rope, _mixtral, _experts("num_local_experts"), _window)
)

_ARCHITECTURES: dict[str, Architecture] = {  # by the files' name for it
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", (_rms_eps, _rope, _NO_WINDOW)),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", (_rms_eps, _rope, _NO_WINDOW)),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", (_rms_eps, _rope, _NO_WINDOW, _experts("num_experts"), _qwen3_moe)
    ),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", (_rms_eps, _rope, _GELU, _fixed(hidden_act="gelu_pytorch_tanh"))
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", (_rms_eps, _rope, _GELU, _gemma(50.0, 30.0, 46), _layers(2, 4096))
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            _rms_eps,
            _gemma3_rope,
            _GELU,
            _gemma(0.0, 0.0, 62),
            _layers(6, 1024),
            _fixed(use_bidirectional_attention=False),
        ),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", (_rms_eps, _window, _phi3)),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        (_rms_eps, _rope, _experts("num_local_experts"), _layers(2), _gpt_oss, _fixed(attention_bias=True)),
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", (_rms_eps, _rope, _attention_bias, _granite)),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", (_rms_eps, _rope)),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", (_rope, _window, _starcoder2)),
}

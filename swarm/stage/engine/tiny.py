"""Configurations of tiny models: a real one shrunk, with its ratios and every kind of layer that it has.

A configuration's settings are recognised by name, wherever transformers' classes share names, and what depends on
another setting is shrunk with it: head sizes by one power of two, heads and key heads by one factor, the width with the
heads. Layers are chosen among the real ones: two of each kind, in their order, so that lists with a value per layer,
lists of layers and numbers of first or last layers stay true.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig

from swarm.stage.model.decoders import count_layers
from swarm.stage.model.text_models import text_config_of

VOCABULARY = 96
_HEAD_SIZE = 16  # the smallest that a head becomes
_FEWEST_LAYERS, _MOST_LAYERS = 4, 8

# Largest values of settings that nothing else depends on.
_LIMITS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "shared_intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("dense_intermediate_size", "d_inner", "dim_ff", "decoder_ffn_dim"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "gated_norm_rank", "adapter_rank"), 16),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank"), 32),
    "q_lora_rank": 48,
    **dict.fromkeys(
        ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2
    ),
    **dict.fromkeys(("n_group", "num_expert_group", "zero_expert_num"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 40),
    "attention_chunk_size": 64,
    # Few positions, so that an index chooses some of a short prompt's; many heads, so that few scores are 0 and equal.
    **{"index_topk": 40, "index_n_heads": 16},
    "dff": 96,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}
_HEAD_SIZES = {
    *("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "swa_head_dim", "rotary_dim"),
    *("global_head_dim", "kv_channels", "attention_head_dim", "index_head_dim", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar"),
}
_HEADS = {
    *("num_attention_heads", "num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads"),
    *("num_attention_heads_per_layer", "num_global_key_value_heads", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_num_heads", "kv_n_heads", "num_kv_heads", "num_query_groups"),
    "num_heads",
}
_OF_WIDTH = {"word_embed_proj_dim", "lru_width", "attention_hidden_size", "embedding_dim"}
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_MAMBA_SIZES = {"mamba_d_head", "mamba_head_dim", "mamba_headdim"}
_PAIRS = {"short_factor", "long_factor"}  # lists with a number per rotated pair
_PART_LISTS = {"ssm_multipliers", "mlp_multipliers"}  # lists with a number per part of a layer
_LAYER_LISTS = {"moe_layers", "full_attn_idxs", "mlp_only_layers", "hybrid_layer_ids"}
_FIRST_LAYERS = {
    *("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index", "num_blocks"),
}
_LAST_LAYERS = {"num_kv_shared_layers"}
_PERIODS = {"attn_layer_period", "expert_layer_period"}  # of layers of a kind: the first layers have all kinds


def tiny_config(config: Any, fewest_layers: int = _FEWEST_LAYERS) -> Any:
    """Return the configuration of a small model of the same kind, with every kind of layer that it has."""
    text = text_config_of(config)
    settings = _Settings(text)
    settings.choose_layers(fewest_layers)
    settings.shrink_sizes()
    return AutoConfig.for_model(**settings.values)


class _Settings:
    """A configuration's settings, which are changed in place."""

    def __init__(self, text: Any) -> None:
        self.values: dict[str, Any] = copy.deepcopy(text.to_dict())
        self._stored = type(text).attribute_map  # the class's own names by the common ones
        self._common = {stored: name for name, stored in self._stored.items()}
        self._number = count_layers(text)

    def _get(self, *names: str) -> int:
        """Return the first of these settings that is a number; 0 if none is."""
        values = (self.values.get(self._stored.get(name, name)) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    def _find(self, names: set[str], kind: type) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name in names and isinstance(value, kind)}

    def choose_layers(self, fewest: int) -> None:
        """Keep two layers of each kind, and change everything that counts or names layers."""
        lists, first, last = (
            self._find(_LAYER_LISTS, list),
            self._find(_FIRST_LAYERS, int),
            self._find(_LAST_LAYERS, int),
        )
        by_layer = {int(index): value for index, value in (self.values.get("per_layer_config") or {}).items()}
        each = {
            name: value
            for name, value in self.values.items()
            if isinstance(value, list) and len(value) == self._number and name not in lists.keys() | _PART_LISTS
        }

        def kind(layer: int) -> tuple[object, ...]:
            return (
                *(str(value[layer]) for value in each.values()),
                str(by_layer.get(layer)),
                *(layer in value for value in lists.values()),
                *(layer < value for value in first.values()),
                *(layer < self._number - value for value in last.values()),
            )

        periods = {} if "layers_block_type" in each else self._find(_PERIODS, int)
        chosen = _choose([kind(layer) for layer in range(self._number)], fewest)
        if periods:
            chosen = list(range(min(self._number, max(fewest, *periods.values()))))
        name = "num_layers" if self.values["model_type"] == "longcat_flash" else "num_hidden_layers"
        self.values[self._stored.get(name, name)] = len(chosen)
        for name, value in each.items():
            self.values[name] = [value[layer] for layer in chosen]
        for name, value in lists.items():
            self.values[name] = [n for n, layer in enumerate(chosen) if layer in value]
        for name, value in first.items():
            self.values[name] = sum(layer < value for layer in chosen)
        for name, value in last.items():
            self.values[name] = sum(layer >= self._number - value for layer in chosen)
        if by_layer:
            self.values["per_layer_config"] = {n: by_layer[at] for n, at in enumerate(chosen) if at in by_layer}

    def shrink_sizes(self) -> None:
        width, heads = self._get("hidden_size"), self._get("num_attention_heads") or 1
        if not self._get("expand"):  # Mamba-2's heads are no attention's
            heads = self._get("num_attention_heads", "num_heads") or 1
        size = self._get("head_dim") or width // heads
        few_heads = _few_heads(heads, self._get("num_key_value_heads", "num_kv_heads") or heads)
        factor = self._size_factor(self._get("qk_nope_head_dim") or size)
        few_width = few_heads * (size // factor)  # where heads fill the width, they still do
        if heads * size != width:
            few_width = few_heads * max(1, 64 // few_heads)
        experts = 8 if self._get("n_group", "num_expert_group") > 1 else 4

        def shrink(name: str, value: int) -> int:
            if name == "hidden_size":
                return few_width
            if name in _OF_WIDTH:
                return value * few_width // width
            if name in _HEAD_SIZES:
                return max(2, value // factor)
            if name in _HEADS:
                return max(1, value * few_heads // heads)
            if name in _EXPERTS:
                return min(value, experts)
            return min(value, _LIMITS[name]) if name in _LIMITS else value

        self.values = {name: self._shrink(name, value, shrink, factor) for name, value in self.values.items()}
        if "attention_head_dim" in self.values and "attention_hidden_size" in self.values:  # Zamba's heads fill it
            self.values["attention_head_dim"] = self.values["attention_hidden_size"] // few_heads
        groups = self._get("n_group", "num_expert_group")
        if groups and self._get("topk_group"):
            self.values["topk_group"] = min(groups, self._get("topk_group"), max(1, groups - 1))
        mamba = next((name for name in _MAMBA_HEADS if self.values.get(name)), None)
        if mamba:
            self._shrink_mamba(mamba, few_width)
        elif self._get("expand") and self._get("num_heads"):  # Mamba-2's own names
            self.values |= {"num_heads": 4, "head_dim": few_width * self._get("expand") // 4}

    def _size_factor(self, size: int) -> int:
        """Return the power of two by which head sizes are divided: all stay whole, and rotated parts even."""
        sizes = [*_numbers(self.values, _HEAD_SIZES), size]
        rotated = [size * part for part in _numbers(self.values, {"partial_rotary_factor", "rotary_pct"})]
        factor = 1
        while size // (2 * factor) >= _HEAD_SIZE and all(int(part / (2 * factor)) % 2 == 0 for part in sizes + rotated):
            factor *= 2
        return factor

    def _shrink(self, name: str, value: Any, shrink: Callable[[str, int], int], factor: int) -> Any:
        name = self._common.get(name, name)
        if isinstance(value, dict):
            return {key: self._shrink(key, part, shrink, factor) for key, part in value.items()}
        if name in _PAIRS and isinstance(value, list):
            return value[::factor]
        if name == "mrope_section" and isinstance(value, list):
            few = [part // factor for part in value]
            return [*few[:-1], sum(value) // factor - sum(few[:-1])]
        if isinstance(value, list):
            return [self._shrink(name, part, shrink, factor) for part in value]
        return shrink(name, value) if isinstance(value, int) and not isinstance(value, bool) else value

    def _shrink_mamba(self, name: str, width: int) -> None:
        """Keep what a Mamba layer's heads and their sizes multiply to: the expanded width."""
        inner = width * self._get("mamba_expand", "expand")
        if "mamba_d_ssm" in self.values:
            inner = self.values["mamba_d_ssm"] = 2 * width
        self.values[name] = 4
        for size in _MAMBA_SIZES & self.values.keys():
            self.values[size] = inner // 4


def _numbers(values: dict[str, Any], names: set[str]) -> list[Any]:
    """Return the numbers of these names, at any depth."""
    numbers = []
    for name, value in values.items():
        if isinstance(value, dict):
            numbers += _numbers(value, names)
        elif name in names and isinstance(value, (int, float)):
            numbers.append(value)
    return numbers


def _few_heads(heads: int, key_heads: int) -> int:
    """Return a small number of heads with the same number per key head, of which there are two then."""
    if heads == key_heads or heads % key_heads:
        return min(heads, 4)
    return min(heads, 8) if key_heads == 1 else 2 * (heads // key_heads)


def _choose(kinds: list[tuple[object, ...]], fewest: int) -> list[int]:
    """Return the first two layers of each kind, or the first one where that gives many; at least ``fewest``."""
    for most in (2, 1):
        chosen = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < most]
        if len(chosen) <= _MOST_LAYERS:
            break
    others = [n for n in range(len(kinds)) if n not in chosen]
    chosen = sorted([*chosen, *others[: max(0, fewest - len(chosen))]])
    while len(chosen) < fewest:  # a model of fewer layers has each more than once
        chosen = sorted(2 * chosen)
    return chosen

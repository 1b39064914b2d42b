"""GGUF files of small models, written with the gguf package in the way of llama.cpp's converter.

What the converter does to tensors is written down here a second time, from its source and not from ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

PLAIN = {Type.F32, Type.F16, Type.BF16}
K_TYPES = {Type.Q4_K, Type.Q5_K, Type.Q6_K}

# transformers' model type -> architecture of the file
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
PAIRED = {"llama", "mistral", "mixtral", "granite"}

ChooseType = Callable[[str, np.ndarray], Type]


def write_model(path: Path, model: Any, choose: ChooseType | Type = Type.F32, **metadata: Any) -> None:
    """Write the file, and set the model's weights to what the file holds."""
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(kind, kind))
    add_shape(writer, config)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    names = gguf.get_tensor_name_map(ARCH[ARCHITECTURES.get(kind, kind)], config.num_hidden_layers)
    for name, tensor in state.items():
        back = []
        for stored_name, array, order in converted(name, tensor.float().numpy(), config, names):
            type_ = allowed(choose if isinstance(choose, Type) else choose(stored_name, array), stored_name, array)
            data, values = encode(array if order is None else array[order], type_)
            writer.add_tensor(stored_name, data, raw_dtype=type_)
            if order is not None:
                unordered = np.empty_like(values)
                unordered[order] = values
                values = unordered
            back.append(values)
        tensor.copy_(torch.from_numpy(joined(name, back, config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def allowed(wanted: Type, name: str, array: np.ndarray) -> Type:
    """As in llama.cpp: vectors, biases and routers are float32, and rows that are no whole blocks aren't quantized."""
    if array.ndim < 2 or name.endswith(".bias") or "ffn_gate_inp" in name:
        return Type.F32
    return wanted if array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else Type.F16


def encode(array: np.ndarray, kind: Type) -> tuple[np.ndarray, np.ndarray]:
    """The bytes, and the values that they stand for."""
    if kind in K_TYPES:
        data = random_blocks(array, kind)
    else:
        data = gguf.quants.quantize(np.ascontiguousarray(array, dtype=np.float32), kind)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32)


def random_blocks(array: np.ndarray, kind: Type) -> np.ndarray:
    """The package has no quantizer of the K types; any bytes with small scales are valid blocks."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(array.size)
    blocks = generator.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block, num_bytes), dtype=np.uint8)
    scales = generator.uniform(1e-4, 3e-4, (*blocks.shape[:-1], 2)).astype(np.float16).view(np.uint8)
    if kind is Type.Q6_K:
        blocks[..., 208:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(*array.shape[:-1], -1)


def converted(
    name: str, array: np.ndarray, config: Any, names: gguf.TensorNameMap
) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """A tensor as the converter writes it: its name, its contents, and the order in which its rows are written."""
    kind, order = config.model_type, None
    if ".experts." in name:
        yield from converted_experts(name, array, config)
        return
    stem, _, leaf = name.rpartition(".")
    if stem.endswith("self_attn") and leaf == "sinks":
        yield f"blk.{layer_of(name)}.attn_sinks.weight", array, None
        return
    if kind in PAIRED and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        order = np.arange(len(array)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        array = array + 1
    stored = names.get_name(stem)
    assert stored is not None, name
    yield f"{stored}.{leaf}", array, order


def converted_experts(name: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray, None]]:
    layer, leaf = layer_of(name), "bias" if name.endswith("_bias") else "weight"
    if config.model_type == "gpt_oss" and leaf == "weight":
        array = array.swapaxes(1, 2)
    if ".down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{leaf}", array, None
        return
    gate, up = (array[:, 0::2], array[:, 1::2]) if config.model_type == "gpt_oss" else np.split(array, 2, axis=1)
    yield f"blk.{layer}.ffn_gate_exps.{leaf}", gate, None
    yield f"blk.{layer}.ffn_up_exps.{leaf}", up, None


def joined(name: str, parts: list[np.ndarray], config: Any) -> np.ndarray:
    """What the parts were made of."""
    is_oss = config.model_type == "gpt_oss"
    whole = parts[0]
    if len(parts) == 2:
        whole = np.concatenate(parts, axis=1)
        if is_oss:
            whole[:, 0::2], whole[:, 1::2] = parts
    if is_oss and ".experts." in name and not name.endswith("_bias"):
        whole = whole.swapaxes(1, 2)
    return whole - 1 if config.model_type.startswith("gemma") and name.endswith("norm.weight") else whole


def layer_of(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    assert match is not None
    return int(match[1])


def add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """The settings that llama.cpp's converter writes for this kind of model."""
    kind = config.model_type
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if kind == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_rope(writer, config, head_size)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind in ("mixtral", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "phi3", "mistral", "starcoder2") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    every = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(kind)  # what llama.cpp assumes
    if every and slides(config) != [(layer + 1) % every != 0 for layer in range(config.num_hidden_layers)]:
        writer.add_array(f"{ARCHITECTURES.get(kind, kind)}.attention.sliding_window_pattern", slides(config))
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def slides(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def add_rope(writer: gguf.GGUFWriter, config: Any, head_size: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type == "phi3":
        head_size = int(head_size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(head_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_size))


def llama3_divisors(rope: dict[str, Any], size: int) -> np.ndarray:
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
    lengths = 2 * np.pi / frequencies
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / lengths - low) / (high - low)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    divisors[lengths < original / high] = 1
    divisors[lengths > original / low] = factor
    return divisors.astype(np.float32)

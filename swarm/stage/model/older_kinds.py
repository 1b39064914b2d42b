"""Forwards for kinds of models whose own code attends, embeds positions or builds masks by itself.

A kind's modules and weights stay as they are; only ``forward`` of its base model and of its attention is replaced, with
the same computation by the current pass: positions come from there, and attention is ours. A base model of these kinds
also states which of its modules run before and after the layers, since their order in the class need not be that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.ctrl.modeling_ctrl import positional_encoding

from swarm.errors import ModelError
from swarm.stage.attention.function import attend_rows, is_chunked
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.attention.passes import current_pass
from swarm.stage.matmul.elementwise import apply_aligned
from swarm.stage.matmul.experts import describe_experts, mix_experts
from swarm.stage.model import attention_variants as variants
from swarm.stage.model import layer_inputs, shared_indexes
from swarm.stage.model.decoders import find_base, find_decoder, run_decoder
from swarm.stage.model.portable_math import logarithm, portable_math
from swarm.stage.modules.recognition import function_of

OWN_TABLE = frozenset({"falcon", "gptj", "gpt_neo"})  # kinds that look for attention in a table of their own


def replace_forwards(model: Any) -> None:
    """Replace the forwards of a model's modules of these kinds."""
    base, _ = find_base(model)
    decoder = find_decoder(base)
    if layer_inputs.is_wide(base):
        layer_inputs.replace_forward(base)
    elif shared_indexes.is_shared(base):
        shared_indexes.replace_forward(base)
    elif decoder is not None:
        base = getattr(base, decoder.holder) if decoder.holder else base
        base.swarm_decoder, base.forward = decoder, MethodType(run_decoder, base)
        base._buffers.clear()  # masks, and a factor
        for index, layer in enumerate(base.get_submodule(decoder.layers)):
            for name, part in list(layer.named_modules()):
                _prepare_part(layer, name, part, index)
                _replace_forward(part, _ATTENTIONS, model.config)
    for part in base.modules():
        _replace_forward(part, _PARTS, model.config)


def _prepare_part(layer: nn.Module, name: str, part: Any, index: int) -> None:
    kind = type(part).__name__
    if kind == "BloomGelu":
        layer.set_submodule(name, ACT2FN["gelu_pytorch_tanh"])
    elif kind == "FalconLinear":
        part.__class__ = nn.Linear  # its bias is added after the product is rounded, in bfloat16
    elif kind in _ATTENTIONS:
        part._buffers.pop("bias", None)  # a mask
        part.layer_idx = index


def _replace_forward(part: Any, replacements: Mapping[str, _Replacement], config: Any) -> None:
    change = _CHANGES.get(type(part).__name__)
    if change is not None:
        change(part, config)
    replacement = replacements.get(type(part).__name__)
    if replacement is not None:
        prepare, forward = replacement
        prepare(part, config)
        part.forward = MethodType(forward, part)


# --- attention ---


def _attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    slopes: torch.Tensor | None = None,
    rounded: float | None = None,
) -> torch.Tensor:
    """Attend with ``[1, tokens, heads, size]``; return the heads side by side."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    slopes = None if slopes is None else slopes.to(query.device)
    options = AttentionOptions(scale, window, None, None, None, slopes, rounded)
    return attend_rows(self.layer_idx, query[0], key[0], value[0], options).flatten(1).unsqueeze(0)


def _no_preparation(_: Any, __: Any) -> None:
    pass


def _bloom_slopes(heads: int) -> torch.Tensor:
    power = 2 ** math.floor(math.log2(heads))
    base, between = (2.0 ** -(2.0 ** -(math.log2(n) - 3)) for n in (power, 2 * power))
    slopes = [base**n for n in range(1, power + 1)] + [between**n for n in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _mpt_slopes(heads: int, most: float) -> torch.Tensor:
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(n * most / power) for n in range(1, power + 1)]
    return torch.tensor(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads], dtype=torch.float32)


def _prepare_bloom(self: Any, _: Any) -> None:
    self.slopes = _bloom_slopes(self.num_heads)


def _attend_bloom(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_: object) -> Any:
    qkv = self.query_key_value(hidden_states).view(1, -1, self.num_heads, 3, self.head_dim)
    mixed = _attend(self, *qkv.unbind(3), slopes=self.slopes)
    return self.dense(mixed) + residual, None


def _prepare_mpt(self: Any, config: Any) -> None:
    self.slopes = _mpt_slopes(self.n_heads, 8)


def _attend_mpt(self: Any, hidden_states: torch.Tensor, **_: object) -> Any:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = qkv.view(1, -1, 3, self.n_heads, self.head_dim).unbind(2)
    return self.out_proj(_attend(self, query, key, value, scale=self.softmax_scale, slopes=self.slopes)), None


def _prepare_falcon(self: Any, config: Any) -> None:
    self.slopes = _bloom_slopes(self.num_heads) if config.alibi else None
    self.rotate = function_of(self, "apply_rotary_pos_emb")


def _attend_falcon(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: object) -> Any:
    qkv = self.query_key_value(hidden_states)
    if not self.new_decoder_architecture and not self.multi_query:
        query, key, value = qkv.view(1, -1, self.num_heads, 3, self.head_dim).unbind(3)
    else:
        group = self.num_heads // self.num_kv_heads
        query, key, value = qkv.view(1, -1, self.num_kv_heads, group + 2, self.head_dim).split((group, 1, 1), 3)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
    if self.slopes is not None:
        return self.dense(_attend(self, query, key, value, slopes=self.slopes, rounded=self.head_dim**-0.5)), None
    query, key = self.rotate(query, key, *position_embeddings, unsqueeze_dim=2)
    return self.dense(_attend(self, query, key, value)), None


def _prepare_paired(self: Any, _: Any) -> None:
    self.rotate = function_of(self, "apply_rotary_pos_emb")


def _rotate_pairs(self: Any, heads: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Rotate the first elements of ``[1, tokens, heads, size]``, neighbours against each other."""
    sines, cosines = self.embed_positions[position_ids].to(heads.dtype).chunk(2, -1)
    if self.rotary_dim is None:
        turned: torch.Tensor = self.rotate(heads, sines, cosines)
        return turned
    front, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
    return torch.cat([self.rotate(front, sines, cosines), rest], -1)


def _attend_gptj(self: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor, **_: object) -> Any:
    shape = (1, -1, self.num_attention_heads, self.head_dim)
    query, key, value = (part(hidden_states).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
    query, key = (_rotate_pairs(self, part, position_ids) for part in (query, key))
    return self.out_proj(_attend(self, query, key, value)), None


def _attend_codegen(self: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor, **_: object) -> Any:
    # The matrix was cut for four devices, each of which has queries, values and keys of a quarter of the heads.
    qkv = self.qkv_proj(hidden_states).view(1, hidden_states.shape[1], 4, 3, -1)
    query, value, key = (part.reshape(1, -1, self.num_attention_heads, self.head_dim) for part in qkv.unbind(3))
    query, key = (_rotate_pairs(self, part, position_ids) for part in (query, key))
    return self.out_proj(_attend(self, query, key, value)), None


def _prepare_gpt_neo(self: Any, config: Any) -> None:
    self.window = config.window_size if self.attention_type == "local" else None


def _attend_gpt_neo(self: Any, hidden_states: torch.Tensor, **_: object) -> Any:
    shape = (1, -1, self.num_heads, self.head_dim)
    parts = (part(hidden_states).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
    return self.out_proj(_attend(self, *parts, scale=1.0, window=self.window)), None


def _attend_xglm(self: Any, hidden_states: torch.Tensor, **_: object) -> Any:
    shape = (1, -1, self.num_heads, self.head_dim)
    parts = (part(hidden_states).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
    return self.out_proj(_attend(self, *parts, scale=self.scaling)), None


def _attend_japanese(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: object) -> Any:
    qkv = self.query_key_value(hidden_states).view(1, -1, self.num_attention_heads, 3, self.head_size)
    query, key, value = qkv.unbind(3)
    turned = self.rotary_ndims
    rotated = self.rotate(query[..., :turned], key[..., :turned], *position_embeddings, unsqueeze_dim=2)
    query, key = (torch.cat([part, rest[..., turned:]], -1) for part, rest in zip(rotated, (query, key), strict=True))
    return self.dense(_attend(self, query, key, value)), None, self.dense_bias


def _attend_openai(self: Any, hidden_states: torch.Tensor, **_: object) -> Any:
    query, key, value = self.c_attn(hidden_states).view(1, hidden_states.shape[1], 3, self.n_head, -1).unbind(2)
    return [self.c_proj(_attend(self, query, key, value, scale=None if self.scale else 1.0))]


def _attend_bert(self: Any, hidden_states: torch.Tensor, **_: object) -> Any:
    shape = (1, -1, self.num_attention_heads, self.attention_head_size)
    query, key, value = (part(hidden_states).view(shape) for part in (self.query, self.key, self.value))
    return _attend(self, query, key, value), None


# --- Llama 4 ---


def _turn_llama4(self: Any, _: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines instead of complex numbers."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rotate_llama4(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    even, odd = heads.float().view(*heads.shape[:-1], -1, 2).unbind(-1)
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
    turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1)
    return turned.flatten(-2).to(heads.dtype)


@lru_cache(maxsize=8)
def _temperatures(num_steps: int, scale: float) -> torch.Tensor:
    logarithms = torch.tensor([logarithm(1.0 + n) for n in range(num_steps)], dtype=torch.float32)
    return logarithms * scale + 1.0


def _prepare_llama4(self: Any, config: Any) -> None:
    if self.floor_scale != int(self.floor_scale):
        raise ModelError(f"config.json has floor_scale {self.floor_scale}, which is no whole number; download it again")
    self.temperatures = _temperatures(config.max_position_embeddings // int(self.floor_scale) + 1, self.attn_scale)


def _attend_llama4(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: object) -> Any:
    """Attend as the model does, with temperatures by the pass's positions."""
    shape = (1, -1, self.num_attention_heads, self.head_dim)
    query = self.q_proj(hidden_states).view(shape)
    shape = (1, -1, self.num_key_value_heads, self.head_dim)
    key, value = (part(hidden_states).view(shape) for part in (self.k_proj, self.v_proj))
    if self.use_rope:
        query, key = (_rotate_llama4(part, *position_embeddings) for part in (query, key))
    if hasattr(self, "qk_norm"):
        query, key = self.qk_norm(query), self.qk_norm(key)
    if self.attn_temperature_tuning and not self.use_rope:
        steps = (current_pass().positions + 1) // int(self.floor_scale)
        query = (query * self.temperatures.to(query.device)[steps][..., None, None]).to(query.dtype)
    chunk = self.config.attention_chunk_size if is_chunked(self) else None
    options = AttentionOptions(self.scaling, None, None, None, chunk)
    return self.o_proj(attend_rows(self.layer_idx, query[0], key[0], value[0], options).flatten(1).unsqueeze(0)), None


def _mix_llama4(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Scale rows by their weights, and multiply them by the chosen experts only; the model multiplies by all."""
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits, chosen = torch.topk(nn.functional.linear(rows, self.router.weight), self.top_k, dim=1)
    chosen, order = chosen.sort(dim=1)
    weights = apply_aligned(torch.sigmoid, logits.gather(1, order).float()).to(rows.dtype)
    mixed, ones = self.shared_expert(rows), torch.ones_like(weights[:, :1], dtype=torch.float32)
    for choice in (slice(n, n + 1) for n in range(self.top_k)):
        mixed = mixed + self.experts(rows * weights[:, choice], chosen[:, choice], ones)
    return mixed, None


def _prepare_experts(self: Any, _: Any) -> None:
    describe_experts(self, is_transposed=True)


# --- embedded tokens ---


class _Scaled(nn.Module):
    """Product with a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


class _Positions(nn.Module):
    """Table of positions that is computed, not stored."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weights = table


@lru_cache(maxsize=8)
def _ctrl_table(num_positions: int, width: int) -> torch.Tensor:
    with portable_math():
        table: torch.Tensor = positional_encoding(num_positions, width, torch.float32)
    return table


def _prepare_ctrl(self: Any, config: Any) -> None:
    table = _ctrl_table(config.n_positions, config.n_embd)
    self.swarm_scale, self.swarm_positions = _Scaled(math.sqrt(config.n_embd)), _Positions(table)


def _prepare_recurrent_gemma(self: Any, config: Any) -> None:
    self.swarm_scale = _Scaled(float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16)))


# --- other parts ---


def _embed_modernbert(self: Any, input_ids: Any = None, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
    """Embed and norm tokens. A later stage's hidden states are normed already."""
    if inputs_embeds is not None:
        return inputs_embeds
    embedded: torch.Tensor = self.norm(self.tok_embeddings(input_ids))
    return embedded


def _prepare_no_images(self: Any, _: Any) -> None:
    self._modules.clear()


def _embed_no_images(_: Any, __: Any, inputs_embeds: torch.Tensor, **___: object) -> torch.Tensor:
    return inputs_embeds


# By class: what is done once with a module and the model's configuration, and its forward.
_Replacement = tuple[Callable[[Any, Any], None], Callable[..., Any]]
_ATTENTIONS: dict[str, _Replacement] = {
    "BloomAttention": (_prepare_bloom, _attend_bloom),
    "MptAttention": (_prepare_mpt, _attend_mpt),
    "FalconAttention": (_prepare_falcon, _attend_falcon),
    "GPTJAttention": (_prepare_paired, _attend_gptj),
    "CodeGenAttention": (_prepare_paired, _attend_codegen),
    "GPTNeoSelfAttention": (_prepare_gpt_neo, _attend_gpt_neo),
    "XGLMAttention": (_no_preparation, _attend_xglm),
    "GPTNeoXJapaneseAttention": (_prepare_paired, _attend_japanese),
    "MegatronBertSelfAttention": (_no_preparation, _attend_bert),
    "RemBertSelfAttention": (_no_preparation, _attend_bert),
    "Attention": (_no_preparation, _attend_openai),
}
_PARTS: dict[str, _Replacement] = {
    "DiffLlamaAttention": (variants.prepare_difference, variants.attend_difference),
    "DogeAttention": (variants.prepare_doge, variants.attend_doge),
    "LongcatFlashExperts": (variants.prepare_zero_experts, mix_experts),
    "LongcatFlashMoE": (_no_preparation, variants.mix_with_zero_experts),
    "Llama4TextAttention": (_prepare_llama4, _attend_llama4),
    "Llama4TextMoe": (_no_preparation, _mix_llama4),
    "Llama4TextExperts": (_prepare_experts, mix_experts),
    "Llama4TextRotaryEmbedding": (_no_preparation, _turn_llama4),
    "ModernBertDecoderEmbeddings": (_no_preparation, _embed_modernbert),
    "Phi4MultimodalFeatureEmbedding": (_prepare_no_images, _embed_no_images),
}
# By class: what is done once with a module that keeps its forward.
_CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "CTRLModel": _prepare_ctrl,
    "RecurrentGemmaModel": _prepare_recurrent_gemma,
    "DogeCDMoE": variants.prepare_mixture,
    "LongcatFlashDecoderLayer": variants.prepare_longcat,
    "LongcatFlashTopkRouter": variants.prepare_router,
}

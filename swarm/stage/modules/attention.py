"""Attention modules with our own products, norms and rotations: queries and keys are changed in place in the product's
output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.modules.matrices import JoinedProducts, make_joined, make_linear, name_outputs
from swarm.stage.modules.mlps import load_linear
from swarm.stage.modules.norms import NativeRmsNorm, replace_norm
from swarm.stage.modules.reading import Matrix, WeightReader
from swarm.stage.modules.recognition import same_code
from swarm.stage.native.linears import NativeLinear, NativeModule
from swarm.stage.quantization.tensors import QuantizedWeight

_QKV = ("q_proj", "k_proj", "v_proj")


def _no_value(module: Any) -> None:
    return None


def _layers_window(module: Any) -> int | None:
    window: int | None = module.sliding_window
    return window


def _models_window(module: Any) -> int | None:
    return getattr(module.config, "sliding_window", None)


def _softcap(module: Any) -> float | None:
    softcap: float | None = module.attn_logit_softcapping
    return softcap


@dataclass(frozen=True, slots=True)
class _AttentionKind:
    """Properties of a kind of attention module."""

    window: Callable[[Any], int | None] = _no_value  # reads the window from the module
    softcap: Callable[[Any], float | None] = _no_value  # reads the soft cap from the module
    has_sinks: bool = False
    is_partial: bool = False  # whether only the first part of a head is rotated
    has_half_tables: bool = False  # whether the rotary tables have one number for both halves of that part


_KINDS: dict[type[nn.Module], _AttentionKind] = {
    LlamaAttention: _AttentionKind(),
    MistralAttention: _AttentionKind(_models_window),
    Qwen2Attention: _AttentionKind(_layers_window),
    Qwen3Attention: _AttentionKind(_layers_window),
    Gemma2Attention: _AttentionKind(_layers_window, _softcap),
    Gemma3Attention: _AttentionKind(_layers_window),
    Olmo2Attention: _AttentionKind(),
    GptOssAttention: _AttentionKind(_layers_window, has_sinks=True, has_half_tables=True),
    Phi3Attention: _AttentionKind(_models_window, is_partial=True),
    GPTNeoXAttention: _AttentionKind(is_partial=True),
}


class NativeAttention(NativeModule):
    """Attention module: multiply by one joint matrix, norm and rotate queries and keys, attend, and multiply again."""

    def __init__(
        self,
        qkv: NativeLinear | JoinedProducts,
        out: NativeLinear,
        norms: tuple[NativeRmsNorm, ...],
        *,
        size: int,
        query_heads: int,
        kind: _AttentionKind,
    ) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self._turn, self._number = library.swarm_turn, native.KINDS[qkv.dtype]
        self.qkv, self.out = qkv, out
        self.size, self.query_heads = size, query_heads
        # queries and keys; there are as many values as keys
        self._num_rotated_heads = (qkv.out_features // size + query_heads) // 2
        self._kind, self.norms = kind, nn.ModuleList(norms)
        first, heads = query_heads * size, self._num_rotated_heads - query_heads
        # First column of the queries and of the keys, and the number of pieces of a norm's length.
        places = [(0, first), (first, heads * size)][: len(norms)]
        self.norm_places = [
            (norm, at, width // len(norm.weight)) for norm, (at, width) in zip(norms, places, strict=True)
        ]

    def copy_options(self, module: Any, sinks: torch.Tensor | None) -> None:
        """Copy the parameters of attention from the model's module."""
        kind = self._kind
        self.layer_idx = int(module.layer_idx)
        self.options = AttentionOptions(module.scaling, kind.window(module), kind.softcap(module), sinks)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> tuple[torch.Tensor, None]:
        rows: torch.Tensor = self.qkv(hidden_states)[0]
        for norm, first, count in self.norm_places:
            norm.norm_in_place(rows, first, count)
        self._turn_heads(rows, *position_embeddings)
        heads = rows.view(len(rows), -1, self.size)
        turned, queries = self._num_rotated_heads, self.query_heads
        rows = attention.attend_rows(
            self.layer_idx, heads[:, :queries], heads[:, queries:turned], heads[:, turned:], self.options
        )
        result: torch.Tensor = self.out(rows.view(1, len(rows), -1))
        return result, None

    def _turn_heads(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Rotate the queries and keys of the rows in place."""
        turned = self.num_rotated(cosines, sines)
        cosines, sines = cosines.contiguous(), sines.contiguous()
        tables = cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1], native.KINDS[cosines.dtype]
        where = rows.data_ptr(), rows.shape[1], len(rows)
        self._turn(self._number, *where, self._num_rotated_heads, self.size, turned, *tables)

    def num_rotated(self, cosines: torch.Tensor, sines: torch.Tensor) -> int:
        """Return how many elements of a head these tables rotate. Raises ``ValueError`` if they do not fit."""
        table = cosines.shape[-1]
        turned = 2 * table if self._kind.has_half_tables else table
        fits = turned <= self.size if self._kind.is_partial else turned == self.size
        if not fits or cosines.shape != sines.shape or cosines.dtype is not sines.dtype:
            raise ValueError(f"tables of {table} {cosines.dtype} for heads of {self.size}")
        if cosines.dtype not in native.KINDS:
            raise ValueError(f"tables of {cosines.dtype}, which our own kernels don't read")
        return turned


def replace_attention(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our module that attends as this one does; None if it is of an unknown kind."""
    match = next(((known, kind) for known, kind in _KINDS.items() if same_code(part, known)), None)
    if match is None:
        return None
    known, kind = match
    norms = _norms(part, read)
    if norms is None or not _all_plain(part):
        return None
    joint: NativeLinear | JoinedProducts
    if known is GPTNeoXAttention:
        heads, size = part.config.num_attention_heads, part.head_size
        joint, out = _reorder_qkv(part, read, heads, size), load_linear(part.dense, read.under("dense"))
    elif known is Phi3Attention:
        heads, size = part.config.num_attention_heads, part.head_dim
        joint, out = load_linear(part.qkv_proj, read.under("qkv_proj")), load_linear(part.o_proj, read.under("o_proj"))
    else:
        heads, size = part.q_proj.out_features // part.head_dim, part.head_dim
        joint, out = _join_qkv(part, read), load_linear(part.o_proj, read.under("o_proj"))
    replacement = NativeAttention(joint, out, norms, size=size, query_heads=heads, kind=kind)
    replacement.copy_options(part, read.tensor("sinks", part.sinks) if kind.has_sinks else None)
    return replacement


def _all_plain(part: nn.Module) -> bool:
    return all(type(child) is nn.Linear for name, child in part.named_children() if not name.endswith("_norm"))


def _norms(part: Any, read: WeightReader) -> tuple[NativeRmsNorm, ...] | None:
    """Return the norms of queries and keys, if the module has any; None if they are of an unknown kind."""
    norms = []
    for name, child in part.named_children():
        if name in ("q_norm", "k_norm"):
            norm = replace_norm(child, read.under(name))
            if not isinstance(norm, NativeRmsNorm):
                return None
            norms.append(norm)
    return tuple(norms)


def _join_qkv(part: Any, read: WeightReader) -> NativeLinear | JoinedProducts:
    """Return one product for queries, keys and values."""
    parts: list[nn.Linear] = [getattr(part, name) for name in _QKV]
    matrices = [read.matrix(f"{name}.weight", each.weight) for name, each in zip(_QKV, parts, strict=True)]
    biases = [
        None if each.bias is None else read.tensor(f"{name}.bias", each.bias)
        for name, each in zip(_QKV, parts, strict=True)
    ]
    product = make_joined(matrices, biases, read.rows)
    name_outputs(product, [(f"{read.prefix}{name}", each.out_features) for name, each in zip(_QKV, parts, strict=True)])
    return product


def _reorder_qkv(part: Any, read: WeightReader, heads: int, size: int) -> NativeLinear:
    """Return the joint matrix reordered: all queries first, instead of each head's query, key and value in turn."""
    whole = part.query_key_value
    order = torch.arange(whole.out_features).view(heads, 3, size).transpose(0, 1).flatten()
    matrix: Matrix = read.matrix("query_key_value.weight", whole.weight)
    if isinstance(matrix, QuantizedWeight):
        matrix = matrix.reordered(f"queries of {heads} heads first", order)
    else:
        matrix = matrix[order]
    bias = None if whole.bias is None else read.tensor("query_key_value.bias", whole.bias)[order]
    return make_linear(matrix, bias, read.rows)

"""Multi-head latent attention, whose cache has one latent and one rotated key per position, shared by all heads.

Each head's keys and values are products of a latent with matrices of its own. A key's matrix can as well multiply the
query, and a value's matrix the result: then attention reads the latents themselves, which are its only key head, and
keys and values are never expanded. The model's own code runs up to the attention and after it; it is given
:class:`LatentHeads` and latents instead of expanded keys and values. Every position is computed by this one rule:
expanding a long prompt's keys would take fewer operations, but give other bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.axk1.modeling_axk1 import AXK1Attention
from transformers.models.axk2.modeling_axk2 import AXK2Attention
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridAttention
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteTextAttention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention

from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.attention.function import ALL_SEEN, INDEXER, LATENT_HEADS
from swarm.stage.attention.options import Latents
from swarm.stage.matmul import linears
from swarm.stage.matmul.triton_products import TritonLinear, TritonProduct, plain_matrix
from swarm.stage.modules import indexers
from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import same_code, same_function
from swarm.stage.native import cores
from swarm.stage.native.linears import NativeLinear, NativeModule, allocate_packed, pack_rows

PLACE = "latent_place"  # of an attention module that shares a layer: which one it is, and how many there are
_KINDS: tuple[type[nn.Module], ...] = (
    DeepseekV2Attention,
    DeepseekV3Attention,
    AXK1Attention,
    KimiLinearAttention,
    MiniCPM3Attention,
    Mistral4Attention,
    LongcatFlashMLA,
    BailingHybridAttention,
    DeepseekV32Attention,
    GlmMoeDsaAttention,
    AXK2Attention,
    Dots3NoteTextAttention,
    HYV4Attention,
)


_MANY_TOKENS = 64  # from which on a call for each head, which copies nothing, takes less time than one for all


class NativeHeadProducts(NativeModule):
    """A product by our own kernel for each head."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        heads, self._outputs, inputs = weights.shape
        self._packed, self._multiply = (
            allocate_packed(heads, self._outputs, inputs, weights.dtype),
            library.swarm_multiply,
        )
        for packed, weight in zip(self._packed, weights, strict=True):
            pack_rows(packed, weight)
        kind = native.KINDS[weights.dtype]
        self._matrices = (native.NativeMatrix * heads)(
            *(
                native.NativeMatrix(packed.data_ptr(), None, self._outputs, inputs, 0, kind, 0.0, 0.0)
                for packed in self._packed
            )
        )

    def forward(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Return ``[tokens, heads, width]``, of which the first columns are the products of ``[tokens, heads,
        inputs]``."""
        if rows.shape[0] < _MANY_TOKENS:
            return self._multiply_together(rows.transpose(0, 1).contiguous(), width).transpose(0, 1)
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        num_tokens, heads, _ = rows.shape
        out = rows.new_empty(num_tokens, heads, width)
        offsets, size = (ctypes.c_int64 * 2)(0, num_tokens), ctypes.sizeof(native.NativeMatrix)
        for head in range(heads):
            some, room = rows[:, head], out[:, head]
            where = native.NativeRows(some.data_ptr(), some.stride(0), room.data_ptr(), room.stride(0))
            matrix = ctypes.byref(self._matrices, head * size)
            native.check_status(self._multiply(matrix, offsets, 1, ctypes.byref(where), cores.num_threads()))
        return out

    def _multiply_together(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Multiply ``[heads, tokens, inputs]`` in one call."""
        heads, num_tokens, inputs = rows.shape
        out = rows.new_empty(heads, num_tokens, width)
        where = native.NativeRows(rows.data_ptr(), inputs, out.data_ptr(), width)
        offsets = (ctypes.c_int64 * (heads + 1))(*range(0, heads * num_tokens + 1, max(1, num_tokens)))
        native.check_status(self._multiply(self._matrices, offsets, heads, ctypes.byref(where), cores.num_threads()))
        return out


class TritonHeadProducts(nn.Module):
    """The products of all heads in one call, on a CUDA device: heads are multiplied as experts are."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self._product = TritonProduct(plain_matrix(weights.contiguous()), None, weights.dtype)

    @property
    def exact(self) -> bool:
        return self._product.proof.exact

    def forward(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """As ``NativeHeadProducts``."""
        num_tokens, heads, size = rows.shape
        by_head = rows.transpose(0, 1).reshape(heads * num_tokens, size)
        products = self._product.multiply_groups(by_head, num_tokens).view(heads, num_tokens, -1)
        return functional.pad(products, (0, width - products.shape[2])).transpose(0, 1)


class TorchHeadProducts(nn.Module):
    """A product by torch's kernels for each head. On a CPU they are proven as those of linear layers."""

    def __init__(self, weights: torch.Tensor, kernel: linears.LinearKernel) -> None:
        super().__init__()
        is_proven = weights.device.type == "cpu"
        self.heads = nn.ModuleList(linears.build_linear(kernel, each, None) for each in (weights if is_proven else ()))
        self._weights = weights.new_empty(0) if is_proven else weights

    @property
    def exact(self) -> bool:
        """Whether nothing is computed here but by the heads' own modules, which have proofs."""
        return not len(self._weights)

    def forward(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """As ``NativeHeadProducts``."""
        by_head = rows.transpose(0, 1)
        if self.heads:
            products = torch.stack([head(some.contiguous()) for head, some in zip(self.heads, by_head, strict=True)])
        else:
            products = torch.bmm(by_head, self._weights.transpose(1, 2))
        return functional.pad(products, (0, width - products.shape[2])).transpose(0, 1)


def build_head_products(weights: torch.Tensor, kernel: linears.LinearKernel) -> nn.Module:
    """Return the products with each head's matrix, from ``[heads, outputs, inputs]``."""
    if kernel is TritonLinear:
        return TritonHeadProducts(weights)
    return NativeHeadProducts(weights) if kernel is NativeLinear else TorchHeadProducts(weights, kernel)


class LatentHeads(NativeModule):
    """The heads' matrices of an attention module (``attention.function.LatentHeads``).

    ``weight``: of the keys' and values' product, ``[heads, key and value, latent]``.
    """

    def __init__(self, weight: torch.Tensor, key_size: int, latents: Latents, kernel: linears.LinearKernel) -> None:
        super().__init__()
        self.latents, self._key_size, self._value_size = latents, key_size, weight.shape[1] - key_size
        parts = (weight[:, :key_size].transpose(1, 2).contiguous(), weight[:, key_size:].contiguous())
        self.keys, self.values = (build_head_products(part, kernel) for part in parts)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries for latents and rotated keys, from queries ``[tokens, heads, size]``."""
        size, rank = self._key_size, self.latents.value_size
        out: torch.Tensor = self.keys(query[..., :size], rank + query.shape[2] - size)
        out[..., rank:] = query[..., size:]
        return out

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return each head's values from mixed latents ``[tokens, heads, size]``."""
        values: torch.Tensor = self.values(mixed, self._value_size)
        return values


def is_latent(part: Any) -> bool:
    """Whether this attention module expands keys and values from latents, as we know it."""
    expand = getattr(type(part), "expand_kv", None)
    if not same_function(expand, DeepseekV3Attention.expand_kv) or not any(same_code(part, each) for each in _KINDS):
        return False
    indexer = getattr(part, INDEXER, None)
    return indexer is None or indexers.is_known(indexer)


def check_known(model: nn.Module) -> None:
    """Raise ``ModelError`` if a module attends to latents in another way: their cache would be of another size."""
    for part in model.modules():
        if hasattr(part, "expand_kv") and not is_latent(part):
            raise ModelError(f"{type(part).__name__} attends to latents in a way that is not supported")


def share_latents(part: Any, read: WeightReader, kernel: linears.LinearKernel) -> None:
    """Make the attention module store latents instead of keys and values, and read its heads' matrices, which are
    dequantized if they are quantized."""
    whole = read.tensor("kv_b_proj.weight", part.kv_b_proj.weight)
    weight = whole.view(part.num_heads, -1, part.kv_lora_rank)
    heads = LatentHeads(weight, part.qk_nope_head_dim, Latents(part.kv_lora_rank, *getattr(part, PLACE, ())), kernel)
    setattr(part, LATENT_HEADS, heads)
    part.kv_b_proj, part.expand_kv = None, _join_latents
    if hasattr(part, INDEXER):
        part.register_forward_pre_hook(_mask_nothing, with_kwargs=True)
        if part.indexer is not None:
            indexers.replace_forward(part.indexer)


def _join_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((latents, rotated), dim=-1), latents


def _mask_nothing(_: nn.Module, args: Any, settings: dict[str, Any]) -> Any:
    """Give an attention module with an index a mask to read, which it passes on."""
    return args, {**settings, "attention_mask": ALL_SEEN}

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
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention

from swarm.errors import ModelError
from swarm.stage import native
from swarm.stage.attention.function import LATENT_HEADS
from swarm.stage.attention.options import Latents
from swarm.stage.matmul import linears
from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import same_code, same_function
from swarm.stage.native import cores
from swarm.stage.native.linears import NativeLinear, NativeModule, allocate_packed, pack_rows

_KINDS: tuple[type[nn.Module], ...] = (
    DeepseekV2Attention,
    DeepseekV3Attention,
    AXK1Attention,
    MiniCPM3Attention,
    Mistral4Attention,
    LongcatFlashMLA,
)


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
        """Return ``[heads, rows, width]``, of which the first columns are the products of ``[heads, rows, inputs]``."""
        rows = rows.contiguous()
        heads, num_rows, inputs = rows.shape
        out = rows.new_empty(heads, num_rows, width)
        where = native.NativeRows(rows.data_ptr(), inputs, out.data_ptr(), width)
        offsets = (ctypes.c_int64 * (heads + 1))(*range(0, heads * num_rows + 1, max(1, num_rows)))
        native.check_status(self._multiply(self._matrices, offsets, heads, ctypes.byref(where), cores.num_threads()))
        return out


class TorchHeadProducts(nn.Module):
    """A product by torch's kernels for each head. On a CPU they are proven as those of linear layers."""

    def __init__(self, weights: torch.Tensor, kernel: linears.LinearKernel) -> None:
        super().__init__()
        is_proven = weights.device.type == "cpu"
        self.heads = nn.ModuleList(linears.build_linear(kernel, each, None) for each in (weights if is_proven else ()))
        self._weights = weights.new_empty(0) if is_proven else weights

    def forward(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        if self.heads:
            products = torch.stack([head(some.contiguous()) for head, some in zip(self.heads, rows, strict=True)])
        else:
            products = torch.bmm(rows, self._weights.transpose(1, 2))
        return functional.pad(products, (0, width - products.shape[2]))


class LatentHeads(NativeModule):
    """The heads' matrices of an attention module (``attention.function.LatentHeads``).

    ``weight``: of the keys' and values' product, ``[heads, key and value, latent]``.
    """

    def __init__(self, weight: torch.Tensor, key_size: int, latents: Latents, kernel: linears.LinearKernel) -> None:
        super().__init__()
        self.latents, self._key_size, self._value_size = latents, key_size, weight.shape[1] - key_size
        parts = (weight[:, :key_size].transpose(1, 2).contiguous(), weight[:, key_size:].contiguous())
        self.keys, self.values = (
            NativeHeadProducts(part) if kernel is NativeLinear else TorchHeadProducts(part, kernel) for part in parts
        )

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries for latents and rotated keys, from queries ``[tokens, heads, size]``."""
        by_head, size = query.transpose(0, 1), self._key_size
        rank, num_rotated = self.latents.value_size, query.shape[2] - size
        out: torch.Tensor = self.keys(by_head[..., :size], rank + num_rotated)
        out[..., rank:] = by_head[..., size:]
        return out.transpose(0, 1)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return each head's values from mixed latents ``[tokens, heads, size]``."""
        values: torch.Tensor = self.values(mixed.transpose(0, 1), self._value_size)
        return values.transpose(0, 1)


def is_latent(part: Any) -> bool:
    """Whether this attention module expands keys and values from latents, as we know it."""
    expand = getattr(type(part), "expand_kv", None)
    return same_function(expand, DeepseekV3Attention.expand_kv) and any(same_code(part, known) for known in _KINDS)


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
    heads = LatentHeads(weight, part.qk_nope_head_dim, Latents(part.kv_lora_rank), kernel)
    setattr(part, LATENT_HEADS, heads)
    part.kv_b_proj, part.expand_kv = None, _join_latents


def _join_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((latents, rotated), dim=-1), latents

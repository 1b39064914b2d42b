"""Norms by our own kernels: one pass over the data, no temporaries, and a row's bits that depend on the row alone."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from swarm.stage import native
from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import same_code, same_function
from swarm.stage.native.linears import NativeModule


class NativeRmsNorm(NativeModule):
    """RMS norm by our own kernel.

    ``rounded``: whether the normed value is rounded before it is weighted, as in Llama; else it is rounded once, at the
    end. The weight may be in float32 or in the dtype of the rows, which is ``dtype``.
    """

    def __init__(
        self, weight: torch.Tensor, epsilon: float, rounded: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
        self.dtype, self.variance_epsilon, self.rounded = dtype or weight.dtype, epsilon, rounded
        self._size, self._kind, self._address = len(weight), native.KINDS[self.dtype], self.weight.data_ptr()
        self._norm = library.swarm_rms_norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[-1]
        if rows.dtype is not self.dtype or size != self._size:
            raise ValueError(f"rows of {size} {rows.dtype} for a norm of {self._size} {str(self.dtype)[6:]}")
        rows = rows if rows.is_contiguous() else rows.contiguous()
        out = torch.empty_like(rows)
        self._apply_norm(native.NativeRows(rows.data_ptr(), size, out.data_ptr(), size), rows.numel() // size, 1)
        return out

    def norm_in_place(self, rows: torch.Tensor, first: int, count: int) -> None:
        """Norm ``count`` pieces of each row in place, beginning with column ``first``."""
        assert rows.dtype is self.dtype
        where, width = rows.data_ptr() + first * rows.element_size(), rows.shape[1]
        self._apply_norm(native.NativeRows(where, width, where, width), rows.shape[0], count)

    def _apply_norm(self, where: native.NativeRows, num_rows: int, count: int) -> None:
        epsilon = self.variance_epsilon
        self._norm(self._kind, ctypes.byref(where), num_rows, count, self._size, self._address, epsilon, self.rounded)


class NativeLayerNorm(NativeModule):
    """Layer norm by our own kernel: ``(x - mean) / deviation * weight + bias``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float().contiguous(), requires_grad=False)
        self.dtype, self._epsilon = weight.dtype, epsilon
        self._norm = library.swarm_layer_norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[-1]
        if rows.dtype is not self.dtype or size != len(self.weight):
            raise ValueError(f"rows of {size} {rows.dtype} for a norm of {len(self.weight)} {str(self.dtype)[6:]}")
        rows = rows if rows.is_contiguous() else rows.contiguous()
        out = torch.empty_like(rows)
        self._norm(
            native.KINDS[self.dtype],
            ctypes.byref(native.NativeRows(rows.data_ptr(), size, out.data_ptr(), size)),
            rows.numel() // size,
            size,
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self._epsilon,
        )
        return out


def replace_norm(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our norm that computes what this module does; None if it is of an unknown kind."""
    if type(part) is nn.LayerNorm and len(part.normalized_shape) == 1 and part.weight is not None:
        bias = None if part.bias is None else read.tensor("bias", part.bias)
        return NativeLayerNorm(read.tensor("weight", part.weight), bias, part.eps)
    if same_code(part, LlamaRMSNorm):
        return NativeRmsNorm(read.tensor("weight", part.weight), part.variance_epsilon)
    # by name: importing its file takes long, and other kinds do not need it
    if type(part).__name__ == "xLSTMRMSNorm" and part.weight is not None and part.bias is None:
        return NativeRmsNorm(read.tensor("weight", part.weight), part.eps)
    if same_code(part, Olmo2RMSNorm):
        return NativeRmsNorm(read.tensor("weight", part.weight), part.variance_epsilon, rounded=False)
    if same_code(part, Gemma2RMSNorm) and same_function(type(part)._norm, Gemma2RMSNorm._norm):
        weight = read.tensor("weight", part.weight)
        return NativeRmsNorm(1.0 + weight.float(), part.eps, rounded=False, dtype=weight.dtype)
    return None

"""MLP modules: activations, and pairs of products with an activation between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from swarm.stage import native
from swarm.stage.modules.matrices import make_gated, make_linear, name_outputs, split_halves
from swarm.stage.modules.reading import Matrix, WeightReader
from swarm.stage.modules.recognition import Function, find_activation, same_code
from swarm.stage.native.adapters import Site
from swarm.stage.native.linears import FUNCTIONS, NativeLinear, NativeModule


class NativeActivation(NativeModule):
    """Elementwise function whose bits depend on the element alone."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self._activate, self._function = library.swarm_activate, FUNCTIONS[function]

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        out = torch.empty_like(tensor)
        kind = native.KINDS[tensor.dtype]
        self._activate(kind, self._function, tensor.data_ptr(), out.data_ptr(), tensor.numel())
        return out


class NativeMlp(NativeModule):
    """Two products; the first one applies the function between them before it rounds and writes."""

    def __init__(self, first: NativeLinear, down: NativeLinear) -> None:
        super().__init__()
        self.first, self.down = first, down

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.first(rows))
        return result


class NoOp(NativeModule):
    """Replacement of dropout, which has no effect outside of training."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def replace_dropout(part: nn.Module, read: WeightReader) -> NativeModule | None:
    return NoOp() if type(part) is nn.Dropout else None


def replace_activation(part: nn.Module, read: WeightReader) -> NativeModule | None:
    function = find_activation(part)
    return None if function is None else NativeActivation(function)


def replace_mlp(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our module that computes what this one does; None if it is of an unknown kind."""
    if same_code(part, LlamaMLP) and _are_plain(part.gate_proj, part.up_proj):
        sites = [Site(f"{read.prefix}{name}", 0, part.gate_proj.out_features) for name in ("gate_proj", "up_proj")]
        return _make_gated(part.act_fn, part.down_proj, read, lambda: _read_gate_up(part, read), sites)
    if same_code(part, Phi3MLP) and _are_plain(part.gate_up_proj):
        half = part.gate_up_proj.out_features // 2
        sites = [Site(f"{read.prefix}gate_up_proj", first, half) for first in (0, half)]
        return _make_gated(part.activation_fn, part.down_proj, read, lambda: _split_gate_up(part, read), sites)
    if same_code(part, GPTNeoXMLP) and (function := find_activation(part.act)) is not None:
        first = load_linear(part.dense_h_to_4h, read.under("dense_h_to_4h"), function)
        return NativeMlp(first, load_linear(part.dense_4h_to_h, read.under("dense_4h_to_h")))
    return None


def load_linear(
    part: nn.Linear, read: WeightReader, function: Function = ("none", ""), limit: float = 0.0
) -> NativeLinear:
    """Return the product of a linear part, and a function applied to its result."""
    bias = None if part.bias is None else read.tensor("bias", part.bias)
    product = make_linear(read.matrix("weight", part.weight), bias, read.rows, function, limit)
    name_outputs(product, [(read.prefix.removesuffix("."), part.out_features)])
    return product


def _are_plain(*parts: nn.Module) -> bool:
    return all(type(part) is nn.Linear and part.bias is None for part in parts)


def _make_gated(
    act: nn.Module,
    down: nn.Linear,
    read: WeightReader,
    weights: Callable[[], tuple[Matrix, Matrix]],
    sites: list[Site],
) -> NativeModule | None:
    function = find_activation(act)
    if function is None or type(down) is not nn.Linear:
        return None
    first = make_gated(*weights(), read.rows, function)
    first.sites = tuple((site,) for site in sites)  # of the gate, and of what it gates
    return NativeMlp(first, load_linear(down, read.under("down_proj")))


def _read_gate_up(part: Any, read: WeightReader) -> tuple[Matrix, Matrix]:
    gate = read.matrix("gate_proj.weight", part.gate_proj.weight)
    return gate, read.matrix("up_proj.weight", part.up_proj.weight)


def _split_gate_up(part: Any, read: WeightReader) -> tuple[Matrix, Matrix]:
    return split_halves(read.matrix("gate_up_proj.weight", part.gate_up_proj.weight))

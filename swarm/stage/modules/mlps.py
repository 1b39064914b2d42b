"""MLP modules: activations, and pairs of products with an activation between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from swarm.stage import native
from swarm.stage.modules.recognition import Function, activation, same_code
from swarm.stage.native.linears import FUNCTIONS, NativeGated, NativeLinear, Own


class NativeActivation(Own):
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


class NativeMlp(Own):
    """Two products; the first one applies the function between them before it rounds and writes."""

    def __init__(self, first: NativeLinear, down: NativeLinear) -> None:
        super().__init__()
        self.first, self.down = first, down

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.first(rows))
        return result


class Nothing(Own):
    """Replacement of dropout, which has no effect outside of training."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def nothing_of(part: nn.Module, read: native.Read) -> Own | None:
    return Nothing() if type(part) is nn.Dropout else None


def activation_of(part: nn.Module, read: native.Read) -> Own | None:
    function = activation(part)
    return None if function is None else NativeActivation(function)


def mlp_of(part: Any, read: native.Read) -> Own | None:
    """Return our module that computes what this one does; None if it is of an unknown kind."""
    if same_code(part, LlamaMLP) and _plain(part.gate_proj, part.up_proj):
        return _gated(part.act_fn, part.down_proj, "down_proj", read, lambda: _two(part, read))
    if same_code(part, Phi3MLP) and _plain(part.gate_up_proj):
        return _gated(part.activation_fn, part.down_proj, "down_proj", read, lambda: _halves(part, read))
    if same_code(part, GPTNeoXMLP) and (function := activation(part.act)) is not None:
        first = linear(part.dense_h_to_4h, "dense_h_to_4h", read, function)
        return NativeMlp(first, linear(part.dense_4h_to_h, "dense_4h_to_h", read))
    return None


def linear(part: nn.Linear, name: str, read: native.Read, function: Function = ("none", "")) -> NativeLinear:
    """Return the product of a linear part with this name, and a function applied to its result."""
    bias = None if part.bias is None else read(f"{name}.bias", part.bias)
    return NativeLinear(read(f"{name}.weight", part.weight), bias, function)


def _plain(*parts: nn.Module) -> bool:
    return all(type(part) is nn.Linear and part.bias is None for part in parts)


def _gated(act: nn.Module, down: nn.Linear, name: str, read: native.Read, weights: Any) -> Own | None:
    function = activation(act)
    if function is None or type(down) is not nn.Linear:
        return None
    gate, up = weights()
    return NativeMlp(NativeGated(gate, up, function), linear(down, name, read))


def _two(part: Any, read: native.Read) -> tuple[torch.Tensor, torch.Tensor]:
    gate = read("gate_proj.weight", part.gate_proj.weight)
    return gate, read("up_proj.weight", part.up_proj.weight)


def _halves(part: Any, read: native.Read) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = read("gate_up_proj.weight", part.gate_up_proj.weight).chunk(2)
    return gate, up

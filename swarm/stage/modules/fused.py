"""Modules that fuse several of the model's, with the same result, around torch's kernels.

With few rows, computing takes little longer than calling. Matrices with a common input therefore become one,
activations move into the products before and after them, and a norm makes no copies. Where our own kernels can be used,
``families`` does more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from swarm.stage.matmul.linears import FUSED_TIMES, PackedLinear
from swarm.stage.modules.matrices import are_alike, join_biases, join_matrices
from swarm.stage.modules.reading import Matrix, WeightReader
from swarm.stage.modules.recognition import same_code, unwrap_activation

# oneDNN's name and algorithm of the functions that models use in gated products.
_ONEDNN_ACTIVATIONS = {"SiLUActivation": ("swish", ""), "SiLU": ("swish", ""), "GELUTanh": ("gelu", "tanh")}
_QKV = ("q_proj", "k_proj", "v_proj")


def is_gated(module: Any) -> bool:
    """Whether this computes ``down(act(gate(x)) * up(x))`` with a function that oneDNN can apply itself."""
    return same_code(module, LlamaMLP) and type(unwrap_activation(module.act_fn)).__name__ in _ONEDNN_ACTIVATIONS


def is_rms_norm(module: nn.Module) -> bool:
    return same_code(module, LlamaRMSNorm)


def has_qkv(module: Any) -> bool:
    """Whether there are three plain matrices for queries, keys and values of one input."""
    parts: list[Any] = [getattr(module, name, None) for name in _QKV]
    return all(type(part) is nn.Linear for part in parts) and len({part.in_features for part in parts}) == 1


def can_fuse(module: Any) -> bool:
    """Whether a gated module's products are equally exact with function and product inside the kernels."""
    gate, up = module.gate_proj, module.up_proj
    if not isinstance(gate, PackedLinear) or not isinstance(up, PackedLinear):
        return False
    return gate.can_fuse(*onednn_activation(module.act_fn)) and up.can_fuse(*FUSED_TIMES)


class GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``; the kernels apply function and product before they round and write."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._function, self._algorithm = onednn_activation(act)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj.apply_activated(rows, self._function, self._algorithm)
        result: torch.Tensor = self.down_proj(self.up_proj.apply_times(rows, gate))
        return result


def onednn_activation(act: nn.Module) -> tuple[str, str]:
    """Return oneDNN's name and algorithm of an activation."""
    return _ONEDNN_ACTIVATIONS[type(unwrap_activation(act)).__name__]


class RmsNorm(nn.Module):
    """RMS norm with the same order of rounding as the model's own code, and fewer copies."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        inverse = (wide * wide).mean(-1, keepdim=True).add_(self.variance_epsilon).rsqrt_()
        return (wide * inverse).to(rows.dtype).mul_(self.weight)


class FusedLinear(nn.Module):
    """One matrix in place of several; each of its :class:`FusedColumns` modules returns its own columns."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self._last = threading.local()  # the last rows and their product, per thread, because threads share layers

    def columns(self, rows: torch.Tensor, start: int, stop: int, last: bool) -> torch.Tensor:
        previous: tuple[Any, Any] = getattr(self._last, "value", (None, None))
        rows_before, result = previous
        if rows_before is not rows:
            result = self.linear(rows)
        # The last share drops the result, so that nothing is held longer than needed.
        self._last.value = (None, None) if last else (rows, result)
        columns: torch.Tensor = result[..., start:stop]
        return columns

    def __deepcopy__(self, memo: dict[int, object]) -> FusedLinear:
        return self


class FusedColumns(nn.Module):
    """Some columns of a joint matrix, in place of the original matrix."""

    def __init__(self, joint: FusedLinear, start: int, stop: int, last: bool) -> None:
        super().__init__()
        self.joint, self._start, self._stop, self._last = joint, start, stop, last

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.joint.columns(rows, self._start, self._stop, self._last)


# builds the product of a matrix and a bias, which stands for these modules, with their numbers of outputs
BuildLinear = Callable[[Matrix, torch.Tensor | None, list[tuple[str, int]]], nn.Module]


def join_qkv(module: nn.Module, read: WeightReader, build: BuildLinear) -> None:
    """Read the three matrices, and replace each by its columns of their joint matrix; or by its own product, if they
    are quantized differently."""
    parts: list[nn.Linear] = [getattr(module, name) for name in _QKV]
    matrices = [read.matrix(f"{name}.weight", part.weight) for name, part in zip(_QKV, parts, strict=True)]
    biases = [
        None if part.bias is None else read.tensor(f"{name}.bias", part.bias)
        for name, part in zip(_QKV, parts, strict=True)
    ]
    outputs = [(f"{read.prefix}{name}", part.out_features) for name, part in zip(_QKV, parts, strict=True)]
    if not are_alike(matrices):
        for name, matrix, bias, output in zip(_QKV, matrices, biases, outputs, strict=True):
            setattr(module, name, build(matrix, bias, [output]))
        return
    joint, start = FusedLinear(build(join_matrices(matrices), join_biases(matrices, biases), outputs)), 0
    for name, part in zip(_QKV, parts, strict=True):
        stop = start + part.out_features
        setattr(module, name, FusedColumns(joint, start, stop, name == _QKV[-1]))
        start = stop

"""Modules that do in fewer steps what several of the model's do, with the same result.

Few rows take little longer to compute than to call. So matrices with a common input become one, activations move
into the products before and after them, and a norm wastes no copies. What a module computes is recognised by
its code, not by its name: transformers' models share most of theirs, and what is not recognised stays as it is.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from swarm.stage import attention, native
from swarm.stage.linears import NativeGated, NativeLinear, PackedLinear
from swarm.stage.steady import Steady

# What oneDNN calls the functions that models use in gated products: name and algorithm.
_FUSED = {"SiLUActivation": ("swish", ""), "SiLU": ("swish", ""), "GELUTanh": ("gelu", "tanh")}
_QKV = ("q_proj", "k_proj", "v_proj")


def is_gated(module: Any) -> bool:
    """Does it compute ``down(act(gate(x)) * up(x))`` with a function that the kernel can apply by itself?"""
    return _same_code(module, LlamaMLP) and type(_bare(module.act_fn)).__name__ in _FUSED


def _bare(function: nn.Module) -> nn.Module:
    return function.function if isinstance(function, Steady) else function


def is_rms_norm(module: nn.Module) -> bool:
    return _same_code(module, LlamaRMSNorm)


def has_qkv(module: Any) -> bool:
    """Are there three plain matrices for queries, keys and values of one input?"""
    parts: list[Any] = [getattr(module, name, None) for name in _QKV]
    return all(type(part) is nn.Linear for part in parts) and len({part.in_features for part in parts}) == 1


# What a forward calls by its module's own names: equal code around another function of that name computes other things.
_CALLED = ("apply_rotary_pos_emb", "rotate_half")


def _same_code(module: nn.Module, known: type[nn.Module]) -> bool:
    return _same_function(type(module).forward, known.forward)


def _same_function(mine: Any, theirs: Any) -> bool:
    mine, theirs = inspect.unwrap(mine), inspect.unwrap(theirs)
    if not inspect.isfunction(mine) or not inspect.isfunction(theirs):
        return False
    if _essence(mine.__code__) != _essence(theirs.__code__):
        return False
    names = [name for name in _CALLED if name in mine.__code__.co_names]
    return all(_same_function(mine.__globals__.get(name), theirs.__globals__.get(name)) for name in names)


def _essence(code: Any) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts[1:]  # the first is what it says of itself


class GatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))``: the kernels apply function and product before they round and write."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._function, self._algorithm = fused(act)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj.activated(rows, self._function, self._algorithm)
        result: torch.Tensor = self.down_proj(self.up_proj.times(rows, gate))
        return result


class NativeMlp(nn.Module):
    """The same in two products."""

    def __init__(self, gated: NativeGated, down: nn.Module) -> None:
        super().__init__()
        self.gated, self.down_proj = gated, down

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.gated(rows))
        return result


def join_gate(module: Any, read: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Read gate and up and put their joint matrix in the gate's place."""
    gate, up = (read(f"{name}.weight", getattr(module, name).weight) for name in ("gate_proj", "up_proj"))
    module.gate_proj, module.up_proj = NativeGated(gate, up, fused(module.act_fn)), nn.Identity()


def fused(act: nn.Module) -> tuple[str, str]:
    """oneDNN's name and algorithm of an activation."""
    return _FUSED[type(_bare(act)).__name__]


def rms_norm(weight: torch.Tensor, epsilon: float) -> nn.Module:
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and native.library() is not None:
        return NativeRmsNorm(weight, epsilon)
    return RmsNorm(weight, epsilon)


class NativeRmsNorm(nn.Module):
    """One reading, no temporaries."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "rms_norm() asked"
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.variance_epsilon = epsilon
        self._norm = library.swarm_rms_norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype is not torch.bfloat16 or rows.shape[-1] != len(self.weight):
            raise ValueError(f"rows of {rows.shape[-1]} {rows.dtype} for a norm of {len(self.weight)} bfloat16")
        rows = rows if rows.is_contiguous() else rows.contiguous()
        out, size = torch.empty_like(rows), rows.shape[-1]
        self._norm(
            rows.data_ptr(), self.weight.data_ptr(), self.variance_epsilon, rows.numel() // size, size, out.data_ptr()
        )
        return out


class RmsNorm(nn.Module):
    """The model's own order of rounding, without its copies."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        inverse = (wide * wide).mean(-1, keepdim=True).add_(self.variance_epsilon).rsqrt_()
        return (wide * inverse).to(rows.dtype).mul_(self.weight)


class Joint(nn.Module):
    """One matrix for several; each of its :class:`Share` modules answers with its columns."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self._last = threading.local()  # the last rows and what they gave: layers are shared by threads

    def columns(self, rows: torch.Tensor, start: int, stop: int, last: bool) -> torch.Tensor:
        kept: tuple[Any, Any] = getattr(self._last, "value", (None, None))
        rows_before, result = kept
        if rows_before is not rows:
            result = self.linear(rows)
        self._last.value = (None, None) if last else (rows, result)
        columns: torch.Tensor = result[..., start:stop]
        return columns

    def __deepcopy__(self, memo: dict[int, object]) -> Joint:
        return self


_WINDOWS: dict[type[nn.Module], Callable[[Any], int | None]] = {
    LlamaAttention: lambda module: None,
    MistralAttention: lambda module: getattr(module.config, "sliding_window", None),
    Qwen2Attention: lambda module: module.sliding_window,
}


def is_plain_attention(module: Any) -> bool:
    """Does it turn queries and keys of one joint matrix by their positions, attend, and multiply once more?"""
    return (
        any(_same_code(module, known) for known in _WINDOWS)
        and isinstance(module.q_proj, Share)
        and isinstance(module.q_proj.joint.linear, NativeLinear)
        and isinstance(module.o_proj, NativeLinear)
    )


class PlainAttention(nn.Module):
    """The same with the queries and keys turned where the product left them."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "is_plain_attention() asked for its products"
        self._turn = library.swarm_turn
        self.qkv, self.o_proj = module.q_proj.joint.linear, module.o_proj
        self._as_it_was = module  # for tables of another width or type than this one turns by
        self.layer_idx, self._size = module.layer_idx, module.head_dim
        self._query_heads = module.config.num_attention_heads
        self._heads = module.config.num_key_value_heads
        window = next(found for known, found in _WINDOWS.items() if _same_code(module, known))(module)
        self._how = attention.How(module.scaling, window, None, None)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **others: object
    ) -> tuple[torch.Tensor, None]:
        if any(part.dtype is not torch.bfloat16 or part.shape[-1] != self._size for part in position_embeddings):
            mixed: tuple[torch.Tensor, None] = self._as_it_was(hidden_states, position_embeddings, **others)
            return mixed
        rows: torch.Tensor = self.qkv(hidden_states)[0]
        self._turned(rows, *position_embeddings)
        heads = rows.view(len(rows), -1, self._size)
        turned = self._query_heads + self._heads
        query, key, value = heads[:, : self._query_heads], heads[:, self._query_heads : turned], heads[:, turned:]
        rows = attention.attend_rows(self.layer_idx, query, key, value, self._how)
        result: torch.Tensor = self.o_proj(rows.view(1, len(rows), -1))
        return result, None

    def _turned(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Turn the queries and keys of the rows, where they are."""
        cosines, sines = cosines.contiguous(), sines.contiguous()
        heads = self._query_heads + self._heads
        self._turn(rows.data_ptr(), rows.shape[1], len(rows), heads, self._size, cosines.data_ptr(), sines.data_ptr())


class Share(nn.Module):
    """Some columns of a joint matrix, in the place of the matrix that they were."""

    def __init__(self, joint: Joint, start: int, stop: int, last: bool) -> None:
        super().__init__()
        self.joint, self._start, self._stop, self._last = joint, start, stop, last

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.joint.columns(rows, self._start, self._stop, self._last)


def join_qkv(
    module: nn.Module,
    read: Callable[[str, torch.Tensor], torch.Tensor],
    kernel: Callable[[torch.Tensor, torch.Tensor | None], nn.Module],
) -> None:
    """Read the three matrices and put a share of their joint one in each one's place."""
    parts: list[nn.Linear] = [getattr(module, name) for name in _QKV]
    sizes = [part.out_features for part in parts]
    weight = torch.cat([read(f"{name}.weight", part.weight) for name, part in zip(_QKV, parts, strict=True)])
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat(
            [
                weight.new_zeros(part.out_features) if part.bias is None else read(f"{name}.bias", part.bias)
                for name, part in zip(_QKV, parts, strict=True)
            ]
        )
    joint, start = Joint(kernel(weight, bias)), 0
    for name, size in zip(_QKV, sizes, strict=True):
        setattr(module, name, Share(joint, start, start + size, name == _QKV[-1]))
        start += size

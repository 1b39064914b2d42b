"""Mixtures of experts by our own kernels: the rows of an expert are multiplied together, and experts run in parallel.

A layer's experts are packed one after the other in one piece of memory. One call chooses the experts of every row,
sorts the rows by expert, multiplies them by two matrices of each expert, and adds up the results in the order of the
experts' numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from swarm.stage import native
from swarm.stage.modules.reading import WeightReader
from swarm.stage.modules.recognition import find_activation, same_code, same_function
from swarm.stage.native import cores
from swarm.stage.native.linears import (
    FUNCTIONS,
    UNGATED,
    NativeLinear,
    NativeModule,
    allocate_packed,
    gated_bias,
    pack_gated,
    pack_rows,
)
from swarm.stage.native.quantized import QuantizedExperts
from swarm.stage.quantization.tensors import QuantizedWeight

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class _ExpertsArgs(ctypes.Structure):
    """Arguments of a mixture: ``SwarmExperts`` of experts.h."""

    _fields_ = [
        *((name, _pointer) for name in ("router", "inner", "down")),
        *((name, _count) for name in ("experts", "choices", "normed", "rounded")),
    ]


class ExpertMatrices:
    """One packed matrix for each expert, all in one piece of memory."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, inputs: int) -> None:
        self.packed, self.bias = packed, None if bias is None else bias.float().contiguous()
        self._outputs, self.inputs = outputs, inputs
        self.dtype, self.num_experts = packed.dtype, len(packed)

    def table(self, function: int = 0, alpha: float = 0.0, limit: float = 0.0) -> ctypes.Array[native.NativeMatrix]:
        """Return the table of addresses by which the kernel reads the matrices."""
        kind = native.KINDS[self.packed.dtype]
        biases = [None] * len(self.packed) if self.bias is None else [row.data_ptr() for row in self.bias]
        return (native.NativeMatrix * len(self.packed))(
            *(
                native.NativeMatrix(packed.data_ptr(), bias, self._outputs, self.inputs, function, kind, alpha, limit)
                for packed, bias in zip(self.packed, biases, strict=True)
            )
        )


AnyExperts = ExpertMatrices | QuantizedExperts


class NativeExperts(NativeModule):
    """A layer's experts, for rows whose experts are already chosen."""

    def __init__(
        self, inner: AnyExperts, down: AnyExperts, function: int, alpha: float = 0.0, limit: float = 0.0
    ) -> None:
        super().__init__()
        library = native.library()
        assert library is not None, "the caller has checked that there is a library"
        self._mix, self.dtype, self.num_experts = library.swarm_mix, down.dtype, down.num_experts
        self.hidden = inner.inputs
        self._kept = inner, down  # the tables hold their addresses
        self.inner, self.down = inner.table(function, alpha, limit), down.table()

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted results. ``rows`` is [rows, hidden]; chosen experts and their weights are [rows,
        choices]."""
        chosen, weights = chosen.to(torch.int32).contiguous(), weights.float().contiguous()
        how = self.make_args(None, chosen.shape[1], normed=False, rounded=False)
        return self.mix(how, rows, chosen.data_ptr(), weights.data_ptr())

    def make_args(self, router: NativeLinear | None, choices: int, normed: bool, rounded: bool) -> _ExpertsArgs:
        """Return the kernel's arguments: the router, if the kernel chooses experts, and how choices are weighted."""
        chooser = None if router is None else ctypes.addressof(router.matrix)
        tables = ctypes.addressof(self.inner), ctypes.addressof(self.down)
        return _ExpertsArgs(chooser, *tables, self.num_experts, choices, normed, rounded)

    def mix(
        self, args: _ExpertsArgs, rows: torch.Tensor, chosen: int | None = None, weights: int | None = None
    ) -> torch.Tensor:
        size = rows.shape[-1]
        if rows.dtype is not self.dtype or size != self.hidden:
            raise ValueError(f"rows of {size} {rows.dtype} for experts of {self.hidden} {self.dtype} inputs")
        rows = rows if rows.is_contiguous() else rows.contiguous()
        out = torch.empty_like(rows)
        where = native.NativeRows(rows.data_ptr(), size, out.data_ptr(), size)
        count = rows.numel() // size
        native.check_status(
            self._mix(ctypes.byref(args), ctypes.byref(where), count, chosen, weights, cores.num_threads())
        )
        return out


class NativeMixture(NativeModule):
    """Router and experts in one call. ``pair``: whether the model's module returns a pair, of which only the first is
    used."""

    def __init__(
        self, router: NativeLinear, experts: NativeExperts, choices: int, *, normed: bool, rounded: bool, pair: bool
    ) -> None:
        super().__init__()
        self.router, self.experts, self._pair = router, experts, pair
        self.args = experts.make_args(router, choices, normed, rounded)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        mixed = self.experts.mix(self.args, hidden_states)
        return (mixed, None) if self._pair else mixed


@dataclass(frozen=True, slots=True)
class _MixtureKind:
    """Kind of mixture: its module class, its router's class and attribute name, and how the router's weights are
    treated."""

    block: type[nn.Module]
    router: type[nn.Module]
    name: str
    normed: bool | None  # whether chosen weights are scaled to a sum of 1; None: the router's own setting
    rounded: bool  # whether weights are rounded to the dtype of the rows
    pair: bool = False  # whether the module returns a pair


_MIXTURE_KINDS = (
    _MixtureKind(MixtralSparseMoeBlock, MixtralTopKRouter, "gate", normed=True, rounded=False),
    _MixtureKind(Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter, "gate", normed=None, rounded=True),
    _MixtureKind(GptOssMLP, GptOssTopKRouter, "router", normed=True, rounded=True, pair=True),
)


def _mixture_kind(part: Any) -> _MixtureKind | None:
    for kind in _MIXTURE_KINDS:
        router = getattr(part, kind.name, None)
        if router is not None and same_code(part, kind.block) and same_code(router, kind.router):
            return kind if gate_function(getattr(part, "experts", None)) is not None else None
    return None


def replace_mixture(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our module with the same router and experts; None if they are of an unknown kind."""
    kind = _mixture_kind(part)
    if kind is None:
        return None
    router, name = getattr(part, kind.name), kind.name
    bias = None if getattr(router, "bias", None) is None else read.tensor(f"{name}.bias", router.bias)
    product = NativeLinear(read.tensor(f"{name}.weight", router.weight), bias)
    experts = replace_experts(part.experts, read.under("experts"))
    assert isinstance(experts, NativeExperts), "_mixture_kind() has checked"
    normed = bool(router.norm_topk_prob) if kind.normed is None else kind.normed
    return NativeMixture(product, experts, router.top_k, normed=normed, rounded=kind.rounded, pair=kind.pair)


def gate_function(part: Any) -> tuple[int, float, float] | None:
    """Return the function between the products, its alpha and its limit; None if these are no known experts."""
    if not hasattr(part, "is_transposed") or part.has_post_expert_norm or getattr(part, "down_proj", None) is None:
        return None
    if part.has_gate and same_function(type(part)._apply_gate, GptOssExperts._apply_gate):
        return FUNCTIONS["clamped", ""], float(part.alpha), float(part.limit)
    if part.has_gate and not same_function(type(part)._apply_gate, moe._default_apply_gate):
        return None
    function = find_activation(getattr(part, "act_fn", nn.Identity()))
    if function is None:
        return None
    return FUNCTIONS[function] + (0 if part.has_gate else UNGATED), 0.0, 0.0


def replace_experts(part: Any, read: WeightReader) -> NativeModule | None:
    """Return our module with the same experts; None if they are of an unknown kind.

    The two tensors are read and packed one after the other, so that only one of them exists twice at any time.
    """
    gate = gate_function(part)
    if gate is None:
        return None
    if not part.has_gate:
        inner = _pack_plain(part, "up_proj", read)
    else:
        inner = _pack_gated(part, read, interleaved=gate[0] == FUNCTIONS["clamped", ""])
    return NativeExperts(inner, _pack_plain(part, "down_proj", read), *gate)


def _read_matrices(part: Any, name: str, read: WeightReader) -> torch.Tensor:
    """Return the experts' weight matrices as one tensor ``[expert, output, input]``."""
    whole = read.tensor(name, getattr(part, name))
    return whole.transpose(1, 2) if part.is_transposed else whole


def _read_bias(part: Any, name: str, read: WeightReader) -> torch.Tensor | None:
    return read.tensor(f"{name}_bias", getattr(part, f"{name}_bias")) if part.has_bias else None


def _allocate_packed(whole: torch.Tensor) -> torch.Tensor:
    count, outputs, inputs = whole.shape
    return allocate_packed(count, outputs, inputs, whole.dtype)


def _read_quantized(part: Any, name: str, read: WeightReader) -> QuantizedWeight | None:
    """Return the experts' quantized matrices ``[expert, output, input]``; None if they are plain."""
    like = getattr(part, name)
    return read.quantized(name, like.transpose(1, 2) if part.is_transposed else like)


def _pack_plain(part: Any, name: str, read: WeightReader) -> AnyExperts:
    quantized = _read_quantized(part, name, read)
    if quantized is not None:
        return _pack_quantized([quantized], _read_bias(part, name, read), read)
    whole = _read_matrices(part, name, read)
    packed = _allocate_packed(whole)
    for room, weight in zip(packed, whole, strict=True):
        pack_rows(room, weight)
    return ExpertMatrices(packed, _read_bias(part, name, read), *whole.shape[1:])


def _pack_quantized(weights: Sequence[QuantizedWeight], bias: torch.Tensor | None, read: WeightReader) -> AnyExperts:
    return QuantizedExperts(weights, bias, read.rows.dtype, int8_rows=read.rows.int8)


def _pack_gated(part: Any, read: WeightReader, interleaved: bool) -> AnyExperts:
    """Read and pack gate and up, which are in one tensor: one after the other, or interleaved."""
    quantized = _read_quantized(part, "gate_up_proj", read)
    if quantized is not None:
        outputs = quantized.shape[-2]
        parts = ((0, outputs, 2), (1, outputs, 2)) if interleaved else ((0, outputs // 2), (outputs // 2, outputs))
        halves = [quantized.rows(*each) for each in parts]
        return _pack_quantized(halves, _read_gated_bias(part, read, interleaved), read)
    whole = _read_matrices(part, "gate_up_proj", read)
    packed = _allocate_packed(whole)
    for room, weight in zip(packed, whole, strict=True):
        pack_gated(room, *_split_gate_up(weight, interleaved))
    return ExpertMatrices(packed, _read_gated_bias(part, read, interleaved), *whole.shape[1:])


def _read_gated_bias(part: Any, read: WeightReader, interleaved: bool) -> torch.Tensor | None:
    """Return the biases of gate and up in the order of a gated matrix's outputs."""
    bias = _read_bias(part, "gate_up_proj", read)
    return None if bias is None else gated_bias(*(half.T for half in _split_gate_up(bias.T, interleaved)))


def _split_gate_up(tensor: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Split gate and up along the first dimension, which has both."""
    first, second = (tensor[::2], tensor[1::2]) if interleaved else tensor.chunk(2)
    return first, second

"""Which kernel multiplies. One small interface: a ``torch.nn.Linear``'s weight and bias in, a module out.

A row's result must not depend on how many other rows there are. Kernels take other paths for few rows, so each names
the fewest rows from which on its bits are stable (measured; the tests hold every kernel to it), and a stage pads its
batch to that many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch.nn import functional

from swarm.stage import cores, native

# torch publishes no name for oneDNN's packed layout; these operators are what its own compiler emits.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise
_with_other = torch.ops.mkldnn._linear_pointwise.binary
_ROWS_HINT = 16  # the layout is made for about this many rows; it serves all


_BLOCK = 64  # outputs that lie together in a matrix packed for our own kernels
_FUNCTIONS = {("none", ""): 0, ("swish", ""): 1, ("gelu", "tanh"): 2}  # as products.h numbers them


class NativeLinear(torch.nn.Module):
    """Our own product: reads the matrix as fast as memory gives it, and needs no rows beside the wanted ones."""

    name = "native bfloat16"
    exact = True
    min_rows = 1

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        fits = all(number % 2 == 0 for number in inputs)
        return device.type == "cpu" and dtype == torch.bfloat16 and fits and native.library() is not None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._take(_packed(weight), bias, len(weight), ("none", ""))

    def _take(self, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, function: tuple[str, str]) -> None:
        self._packed, self._bias = packed, None if bias is None else bias.float().contiguous()
        address = None if self._bias is None else self._bias.data_ptr()
        self._matrix = native.Matrix(packed.data_ptr(), address, outputs, self.in_features, _FUNCTIONS[function])
        library = native.library()
        assert library is not None, "serves() said so"
        self._multiply = library.swarm_linear
        self._reference = ctypes.byref(self._matrix)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype is not torch.bfloat16 or rows.shape[-1] != self.in_features:
            raise ValueError(
                f"rows of {rows.shape[-1]} {rows.dtype} for a matrix of {self.in_features} bfloat16 inputs"
            )
        flat = rows if rows.is_contiguous() else rows.contiguous()
        out = torch.empty((*rows.shape[:-1], self.out_features), dtype=torch.bfloat16)
        status = self._multiply(
            self._reference,
            flat.data_ptr(),
            self.in_features,
            rows.numel() // self.in_features,
            out.data_ptr(),
            self.out_features,
            cores.threads(),
        )
        native.checked(status)
        return out


class NativeGated(NativeLinear):
    """``function(gate × rows) * (up × rows)``, both matrices in one reading."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, function: tuple[str, str]) -> None:
        torch.nn.Module.__init__(self)
        assert function != ("none", ""), "without a function, it is another product"
        self.out_features, self.in_features = gate.shape
        half = _BLOCK // 2
        packed = _room_for(2 * len(gate), self.in_features)
        for part, weight in enumerate((gate, up)):
            _place(packed[:, :, part * half : (part + 1) * half], weight)
        self._take(packed, None, 2 * len(gate), function)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed = _room_for(*weight.shape)
    _place(packed, weight)
    return packed


def _room_for(outputs: int, inputs: int) -> torch.Tensor:
    """For a matrix in blocks of 64 outputs; within a block, by pairs of inputs: ``[block, pair, 64, 2]``."""
    blocks = -(-outputs // _BLOCK)
    packed = native.huge(blocks * _BLOCK * inputs, torch.bfloat16).view(blocks, inputs // 2, _BLOCK, 2)
    packed[-1:] = 0  # outputs that there are not
    return packed


def _place(blocks: torch.Tensor, weight: torch.Tensor) -> None:
    """Put the matrix's rows into ``[block, pair, width, 2]``, without another copy of it."""
    _, pairs, width, _ = blocks.shape
    whole = len(weight) // width
    blocks[:whole].copy_(weight[: whole * width].view(whole, width, pairs, 2).permute(0, 2, 1, 3))
    rest = weight[whole * width :]
    if len(rest):
        blocks[whole, :, : len(rest)].copy_(rest.view(len(rest), pairs, 2).permute(1, 0, 2))


class PackedLinear(torch.nn.Module):
    """oneDNN's own weight layout on a CPU: two to three times faster than the plain one for few rows."""

    name = "oneDNN packed"
    exact = True
    min_rows = 4

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        """Can it multiply on this device, in this dtype, rows of these lengths?"""
        if device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _reorder(weight, _ROWS_HINT)
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activated(rows, "none", "")

    def activated(self, rows: torch.Tensor, function: str, algorithm: str) -> torch.Tensor:
        """The product through one of oneDNN's elementwise functions, applied before it is rounded."""
        helped = cores.gather(self._work(rows))
        result: torch.Tensor = _pointwise(rows, self._packed, self._bias, function, [], algorithm)
        if helped:
            cores.dismiss()
        return result

    def times(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product, multiplied by ``other`` element by element."""
        helped = cores.gather(self._work(rows))
        result: torch.Tensor = _with_other(rows, other, self._packed, self._bias, "mul")
        if helped:
            cores.dismiss()
        return result

    def _work(self, rows: torch.Tensor) -> int:
        return rows.numel() * self.out_features


class PlainLinear(torch.nn.Module):
    """What torch does by itself, on any device."""

    name = "torch"
    exact = True
    min_rows = 12  # float32 takes other kernels for 1–3, 5–7 and 9–11 rows

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        return True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        helped = cores.gather(rows.numel() * self.out_features)
        result = functional.linear(rows, self._weight, self._bias)
        if helped:
            cores.dismiss()
        return result


Linear = type[NativeLinear] | type[PackedLinear] | type[PlainLinear]

# The quickest first.
KERNELS: tuple[Linear, ...] = (NativeLinear, PackedLinear, PlainLinear)


def choose(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> Linear:
    """The kernel for this device and dtype, and matrices with these numbers of inputs."""
    lengths = tuple(inputs)
    return next(kernel for kernel in KERNELS if kernel.serves(device, dtype, lengths))


def good_at(device: torch.device, dtype: torch.dtype) -> bool:
    """Does this device compute fast in this dtype?"""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16

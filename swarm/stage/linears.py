"""Which kernel multiplies. One small interface: a ``torch.nn.Linear``'s weight and bias in, a module out.

A row's result must not depend on how many other rows there are. Kernels take other paths for few rows, so each names
the fewest rows from which on its bits are stable (measured; the tests hold every kernel to it), and a stage pads its
batch to that many.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from swarm.stage import cores

# torch publishes no name for oneDNN's packed layout; these operators are what its own compiler emits.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise
_with_other = torch.ops.mkldnn._linear_pointwise.binary
_ROWS_HINT = 16  # the layout is made for about this many rows; it serves all


class PackedLinear(torch.nn.Module):
    """oneDNN's own weight layout on a CPU: two to three times faster than the plain one for few rows."""

    min_rows = 4

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

    min_rows = 12  # float32 takes other kernels for 1–3, 5–7 and 9–11 rows

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


Linear = type[PackedLinear] | type[PlainLinear]


def choose(device: torch.device, dtype: torch.dtype) -> Linear:
    """The kernel for this device and dtype."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return PlainLinear
    if dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return PackedLinear
    return PlainLinear


def good_at(device: torch.device, dtype: torch.dtype) -> bool:
    """Does this device compute fast in this dtype?"""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16

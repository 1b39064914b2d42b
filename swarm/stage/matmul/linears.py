"""Choice of the kernel for linear layers: a ``torch.nn.Linear``'s weight and bias in, a module out.

A row's result must not depend on the number of other rows. Our own kernels guarantee this by themselves. torch's and
oneDNN's kernels are called in tiles of fixed numbers of rows that a probe has shown to be safe (``tiled``). Each module
reports whether it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from swarm.stage.matmul.probe import Product
from swarm.stage.matmul.tiled import TiledMatmul, is_discriminating, sample_matrix, torch_matmul
from swarm.stage.matmul.triton_products import TritonLinear
from swarm.stage.native.linears import NativeLinear

# torch publishes no name for oneDNN's packed layout; these operators are what its own compiler emits.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise
_with_other = torch.ops.mkldnn._linear_pointwise.binary
_ROWS_HINT = 16  # oneDNN makes the layout for about this many rows; it serves all
FUSED_TIMES = ("times", "")  # the fused operation of ``PackedLinear.apply_times``


class PackedLinear(torch.nn.Module):
    """Linear layer in oneDNN's own weight layout on a CPU: two to three times faster than the plain layout for few
    rows."""

    name = "oneDNN packed"

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        """Whether this kernel can multiply on this device, in this dtype, rows of these lengths."""
        if device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._dtype, self._is_discriminating = weight.dtype, is_discriminating(weight)
        self._packed = _reorder(weight, _ROWS_HINT)
        self._bias = bias
        # by fused function and its algorithm; filled at first use
        self._products: dict[tuple[str, str], TiledMatmul] = {}

    @property
    def exact(self) -> bool:
        """Whether every product in use was shown to be exact."""
        return all(each.proof.exact for each in self._used_products())

    @property
    def tiling(self) -> set[str]:
        """The tiles that the products in use are called with, in words."""
        return {each.tiling for each in self._used_products()}

    def _used_products(self) -> tuple[TiledMatmul, ...]:
        return tuple(self._products.values()) or (self._product(),)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product()(rows)

    def apply_activated(self, rows: torch.Tensor, function: str, algorithm: str) -> torch.Tensor:
        """Return the product after one of oneDNN's elementwise functions, applied before the result is rounded."""
        return self._product(function, algorithm)(rows)

    def apply_times(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product multiplied by ``other`` element by element."""
        return self._product(*FUSED_TIMES)(rows, other)

    def can_fuse(self, function: str, algorithm: str) -> bool:
        """Whether the product is as exact with this function fused into it as without. Drops the fused product if it is
        not."""
        plain, fused = self._product().proof.exact, self._product(function, algorithm).proof.exact
        if plain and not fused:
            del self._products[function, algorithm]
        return fused or not plain

    def _product(self, function: str = "none", algorithm: str = "") -> TiledMatmul:
        how = function, algorithm
        if how not in self._products:
            shape, bias = (self.out_features, self.in_features), "" if self._bias is None else " with bias"
            self._products[how] = TiledMatmul(
                f"{self.name} {function} {algorithm}{bias}",
                self._raw(how),
                shape,
                self._dtype,
                extra_widths=(self.out_features,) if how == FUSED_TIMES else (),
                trial=None if self._is_discriminating else partial(self._sample_product, how),
            )
        return self._products[how]

    def _raw(self, how: tuple[str, str]) -> Product:
        packed, bias = self._packed, self._bias
        if how == FUSED_TIMES:
            return lambda rows, other: _with_other(rows, other, packed, bias, "mul")
        return lambda rows: _pointwise(rows, packed, bias, how[0], [], how[1])

    def _sample_product(self, how: tuple[str, str]) -> Product:
        bias = None if self._bias is None else sample_matrix((1, self.out_features), self._dtype)[0]
        return PackedLinear(sample_matrix((self.out_features, self.in_features), self._dtype), bias)._raw(how)


class PlainLinear(torch.nn.Module):
    """Linear layer that multiplies with torch's default kernel, on any device."""

    name = "torch"

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        return True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._product = torch_matmul(weight, bias)

    @property
    def exact(self) -> bool:
        """Whether the product was shown to be exact."""
        return self._product.proof.exact

    @property
    def tiling(self) -> set[str]:
        """The tiles that the product is called with, in words."""
        return {self._product.tiling}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows)


LinearKernel = type[NativeLinear] | type[TritonLinear] | type[PackedLinear] | type[PlainLinear]

# The fastest kernel first.
KERNELS: tuple[LinearKernel, ...] = (NativeLinear, TritonLinear, PackedLinear, PlainLinear)
QUANTIZED_KERNELS = (NativeLinear, TritonLinear)  # those that read quantized matrices as they are


def choose_kernel(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> LinearKernel:
    """Return the fastest kernel for this device, this dtype and matrices with these numbers of inputs."""
    lengths = tuple(inputs)
    return next(kernel for kernel in KERNELS if kernel.supports(device, dtype, lengths))


def build_linear(kernel: LinearKernel, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """Build the linear layer with this kernel; with torch's plain one where only that can be shown to be exact on this
    machine."""
    module = kernel(weight, bias)
    if isinstance(module, PackedLinear) and not module.exact:
        plain = PlainLinear(weight, bias)
        return plain if plain.exact else module
    return module


def can_compute(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device can compute in this dtype. False for float16 on CPUs, where no kernel for it is proven."""
    if device.type == "cpu":
        return dtype != torch.float16
    try:
        one = torch.ones((1, 1), dtype=dtype, device=device)
        return float(one @ one) == 1.0
    except (RuntimeError, TypeError):  # torch's errors for a dtype that the device does not have
        return False


def is_efficient(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device computes fast in this dtype."""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        if dtype != torch.bfloat16:
            return False
        return NativeLinear.supports(device, dtype) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16

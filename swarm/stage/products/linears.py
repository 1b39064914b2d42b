"""Which kernel multiplies. One small interface: a ``torch.nn.Linear``'s weight and bias in, a module out.

A row's result must not depend on how many other rows there are. Our own kernels see to that themselves; torch's and
oneDNN's are called in tiles of fixed numbers of rows, as a probe says (``fixed``). A module says of itself whether it
is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from swarm.stage.native.linears import NativeLinear
from swarm.stage.products.fixed import Fixed, by_torch, telling, tells
from swarm.stage.products.probe import Product

# torch publishes no name for oneDNN's packed layout; these operators are what its own compiler emits.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise
_with_other = torch.ops.mkldnn._linear_pointwise.binary
_ROWS_HINT = 16  # the layout is made for about this many rows; it serves all
TIMES = ("times", "")


class PackedLinear(torch.nn.Module):
    """oneDNN's own weight layout on a CPU: two to three times faster than the plain one for few rows."""

    name = "oneDNN packed"

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        """Can it multiply on this device, in this dtype, rows of these lengths?"""
        if device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._dtype, self._tells = weight.dtype, tells(weight)
        self._packed = _reorder(weight, _ROWS_HINT)
        self._bias = bias
        self._products: dict[tuple[str, str], Fixed] = {}

    @property
    def exact(self) -> bool:
        """Was what it is asked to compute shown to be exact?"""
        return all(each.proof.exact for each in self._asked())

    @property
    def how(self) -> set[str]:
        """The tiles that it is called with."""
        return {each.how for each in self._asked()}

    def _asked(self) -> tuple[Fixed, ...]:
        return tuple(self._products.values()) or (self._product(),)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product()(rows)

    def activated(self, rows: torch.Tensor, function: str, algorithm: str) -> torch.Tensor:
        """The product through one of oneDNN's elementwise functions, applied before it is rounded."""
        return self._product(function, algorithm)(rows)

    def times(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product, multiplied by ``other`` element by element."""
        return self._product(*TIMES)(rows, other)

    def fuses(self, function: str, algorithm: str) -> bool:
        """Is the product as exact with this function behind it as without?"""
        plain, fused = self._product().proof.exact, self._product(function, algorithm).proof.exact
        if plain and not fused:
            del self._products[function, algorithm]
        return fused or not plain

    def _product(self, function: str = "none", algorithm: str = "") -> Fixed:
        how = function, algorithm
        if how not in self._products:
            shape, bias = (self.out_features, self.in_features), "" if self._bias is None else " with bias"
            self._products[how] = Fixed(
                f"{self.name} {function} {algorithm}{bias}",
                self._raw(how),
                shape,
                self._dtype,
                beside=(self.out_features,) if how == TIMES else (),
                trial=None if self._tells else partial(self._telling, how),
            )
        return self._products[how]

    def _raw(self, how: tuple[str, str]) -> Product:
        packed, bias = self._packed, self._bias
        if how == TIMES:
            return lambda rows, other: _with_other(rows, other, packed, bias, "mul")
        return lambda rows: _pointwise(rows, packed, bias, how[0], [], how[1])

    def _telling(self, how: tuple[str, str]) -> Product:
        bias = None if self._bias is None else telling((1, self.out_features), self._dtype)[0]
        return PackedLinear(telling((self.out_features, self.in_features), self._dtype), bias)._raw(how)


class PlainLinear(torch.nn.Module):
    """Multiplies as torch does by itself, on any device."""

    name = "torch"

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        return True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._product = by_torch(weight, bias)

    @property
    def exact(self) -> bool:
        """Was it shown to be?"""
        return self._product.proof.exact

    @property
    def how(self) -> set[str]:
        """The tiles that it is called with."""
        return {self._product.how}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows)


Linear = type[NativeLinear] | type[PackedLinear] | type[PlainLinear]

# The quickest first.
KERNELS: tuple[Linear, ...] = (NativeLinear, PackedLinear, PlainLinear)


def choose(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> Linear:
    """The kernel for this device and dtype, and matrices with these numbers of inputs."""
    lengths = tuple(inputs)
    return next(kernel for kernel in KERNELS if kernel.serves(device, dtype, lengths))


def made(kernel: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """The product by this kernel; by torch's plain one where only that can be shown to be exact on this machine."""
    module = kernel(weight, bias)
    if isinstance(module, PackedLinear) and not module.exact:
        plain = PlainLinear(weight, bias)
        return plain if plain.exact else module
    return module


def can_compute(device: torch.device, dtype: torch.dtype) -> bool:
    """Can this device compute in this dtype at all? CPUs are not asked for float16: no kernel of theirs is proven."""
    if device.type == "cpu":
        return dtype != torch.float16
    try:
        one = torch.ones((1, 1), dtype=dtype, device=device)
        return float(one @ one) == 1.0
    except (RuntimeError, TypeError):  # as torch says that the device has no such numbers
        return False


def good_at(device: torch.device, dtype: torch.dtype) -> bool:
    """Does this device compute fast in this dtype?"""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        if dtype != torch.bfloat16:
            return False
        return NativeLinear.serves(device, dtype) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16

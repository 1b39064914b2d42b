"""Products with matrices that are plain or quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from swarm.stage.matmul.triton_products import TritonLinear
from swarm.stage.modules.reading import Matrix, RowKind
from swarm.stage.modules.recognition import Function
from swarm.stage.native.adapters import Site
from swarm.stage.native.linears import NativeGated, NativeLinear, NativeModule
from swarm.stage.native.quantized import QuantizedGated, QuantizedLinear
from swarm.stage.quantization.tensors import QuantizedWeight, can_join, join_rows


class JoinedProducts(NativeModule):
    """Several matrices with the same input, whose outputs lie side by side in the result."""

    def __init__(self, parts: Sequence[NativeLinear]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.in_features, self.dtype = parts[0].in_features, parts[0].dtype
        self._stops = tuple(accumulate(part.out_features for part in parts))
        self.out_features = self._stops[-1]

    def columns(self) -> Iterator[tuple[NativeLinear, int]]:
        """Yield each matrix with the first column of its outputs."""
        yield from zip(self._parts, (0, *self._stops), strict=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*rows.shape[:-1], self.out_features), dtype=self.dtype)
        for part, first in self.columns():
            part.multiply_into(out, first, rows)
        return out


def name_outputs(product: NativeLinear | TritonLinear | JoinedProducts, modules: Iterable[tuple[str, int]]) -> None:
    """Set which modules of the model a product stands for: their names and numbers of outputs, side by side."""
    sites = [Site(name, 0, count) for name, count in modules]
    if isinstance(product, TritonLinear):
        product.sites = (tuple(sites),)
        return
    for linear, first in product.columns():
        linear.sites = (tuple(_cut_sites(sites, first, first + linear.out_features)),)


def _cut_sites(sites: Iterable[Site], first: int, stop: int) -> Iterator[Site]:
    begin = 0
    for site in sites:
        end = begin + site.count
        if max(begin, first) < min(end, stop):
            yield Site(site.module, max(begin, first) - begin, min(end, stop) - max(begin, first))
        begin = end


def make_linear(
    matrix: Matrix,
    bias: torch.Tensor | None,
    rows: RowKind,
    function: Function = ("none", ""),
    limit: float = 0.0,
) -> NativeLinear:
    """Return the product with this matrix."""
    if isinstance(matrix, QuantizedWeight):
        return QuantizedLinear(matrix, bias, rows.dtype, function, limit, int8_rows=rows.int8)
    return NativeLinear(matrix, bias, function, limit)


def make_gated(gate: Matrix, up: Matrix, rows: RowKind, function: Function) -> NativeLinear:
    """Return the gated product. Matrices that are quantized differently are dequantized."""
    if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight) and can_join((gate, up)):
        return QuantizedGated(gate, up, function, rows.dtype, int8_rows=rows.int8)
    return NativeGated(to_tensor(gate, rows.dtype), to_tensor(up, rows.dtype), function)


def to_tensor(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix as a tensor of ``dtype``."""
    return matrix.read().dequantize(dtype) if isinstance(matrix, QuantizedWeight) else matrix


def split_halves(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return the two halves of a matrix's outputs."""
    outputs = matrix.shape[-2]
    if isinstance(matrix, QuantizedWeight):
        return matrix.rows(0, outputs // 2), matrix.rows(outputs // 2, outputs)
    first, second = matrix.chunk(2, dim=-2)
    return first, second


def make_joined(
    matrices: Sequence[Matrix], biases: Sequence[torch.Tensor | None], rows: RowKind
) -> NativeLinear | JoinedProducts:
    """Return the product with all of these matrices: with as few joint ones as their formats allow."""
    ranges = [slice(first, stop) for first, stop in _joint_ranges(matrices)]
    products = [
        make_linear(join_matrices(matrices[some]), join_biases(matrices[some], biases[some]), rows) for some in ranges
    ]
    return products[0] if len(products) == 1 else JoinedProducts(products)


def _joint_ranges(matrices: Sequence[Matrix]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of matrices that can be joined."""
    first = 0
    for stop in range(1, len(matrices) + 1):
        if stop == len(matrices) or not are_alike((matrices[first], matrices[stop])):
            yield first, stop
            first = stop


def are_alike(matrices: Sequence[Matrix]) -> bool:
    """Whether these matrices can be joined: all are tensors, or all are quantized in one way."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    return not quantized or (len(quantized) == len(matrices) and can_join(quantized))


def join_matrices(matrices: Sequence[Matrix]) -> Matrix:
    """Return one matrix with the outputs of all of these, which :func:`are_alike`."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    tensors = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
    return join_rows(quantized) if quantized else torch.cat(tensors)


def join_biases(matrices: Sequence[Matrix], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the biases of all outputs, with 0 for matrices without any; None if all are without."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(matrix.shape[0]) if bias is None else bias
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
    )

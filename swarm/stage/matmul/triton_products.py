"""Products by our own kernels for CUDA devices, in tiles of the heights that a probe on the device has shown to agree.

The kernels add up in one order whatever rows they get, but only the device's own bits can show that its instructions do
the same for tiles of different heights. Modules with kernels are imported when a product is made: they need Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from swarm.stage.matmul import proofs
from swarm.stage.matmul.probe import FEW_HEIGHTS, HEIGHTS, Proof, prove
from swarm.stage.matmul.tiled import is_discriminating, sample_matrix
from swarm.stage.native.adapters import LowRank, RowAdapters, Site, current_adapters
from swarm.stage.quantization.tensors import QuantizedWeight

if TYPE_CHECKING:
    from swarm.stage.cuda.matmul import Matrix, Tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_VERSION = 1  # of the kernels: increase it when their tiles or their order of summation change
_LOW_RANK_HEIGHT = 16


@cache
def _has_triton(device: torch.device) -> bool:
    is_found = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    return is_found and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def plain_matrix(weight: torch.Tensor) -> Matrix:
    """Return a matrix ``[outputs, inputs]``, or one for each expert, as the kernels take it."""
    from swarm.stage.cuda.matmul import PlainMatrix  # noqa: PLC0415 - needs Triton

    return PlainMatrix(weight)


def packed_matrix(weight: QuantizedWeight, device: torch.device) -> Matrix:
    """Read a quantized matrix, or one for each expert, and pack it on the device."""
    from swarm.stage.cuda.quantized import pack  # noqa: PLC0415 - needs Triton

    return pack(weight, device)


class TritonProduct:
    """Product with one matrix and a bias. With a matrix for each expert, rows come sorted, in tiles."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        from swarm.stage.cuda import matmul  # noqa: PLC0415 - needs Triton

        self._multiply, self._is_plain = matmul.multiply, isinstance(matrix, matmul.PlainMatrix)
        self._compiler = matmul.compiler_version()
        self.matrix, self._bias, self._dtype = matrix, bias, dtype
        self._proof: Proof | None = None  # made at first use

    @property
    def proof(self) -> Proof:
        """The proof, computed at first use if it is not cached."""
        if self._proof is None:
            outputs, inputs = self.matrix.outputs, self.matrix.inputs
            device = self._numbers.device
            what = (f"Triton {_VERSION}", self._compiler, self.matrix.description, "" if self._bias is None else "bias")
            key = (*what, str(self._dtype), outputs, inputs, *proofs.device_key(device))
            self._proof = proofs.get_proof(key, self._prove)
        return self._proof

    @property
    def _numbers(self) -> torch.Tensor:
        """The plain weights, or the codes."""
        return self.matrix.numbers

    def _prove(self) -> Proof:
        trial, outputs, inputs = self._trial(), self.matrix.outputs, self.matrix.inputs
        bias = None if self._bias is None else self._bias.reshape(-1)[:outputs]

        def product(rows: torch.Tensor) -> torch.Tensor:
            ways = [self._multiply(rows, trial, bias, height=len(rows), by_split=each) for each in (False, True)]
            # NaN equals nothing, so a difference fails the probe
            return torch.where(ways[0] == ways[1], ways[0], torch.nan)

        return prove(
            product,
            (inputs,),
            outputs,
            dtype=self._dtype,
            work=outputs * inputs,
            numbers=(1,),
            device=self._numbers.device,
            sizes=HEIGHTS,
            few_rows=FEW_HEIGHTS,
        )

    def _trial(self) -> Matrix:
        """Return one matrix to try: the first expert's, or random numbers if these are too much alike."""
        first = self.matrix.expert(0)
        if is_discriminating(first.numbers):
            return first
        if self._is_plain:
            numbers = sample_matrix((first.outputs, first.inputs), self._dtype)
        else:
            numbers = (sample_matrix((first.outputs, first.numbers.shape[1]), torch.float32) * 40).to(torch.uint8)
        return first.with_numbers(numbers.to(first.numbers.device))

    @property
    def heights(self) -> tuple[int, ...]:
        """The heights of tiles that agree; all, if none do."""
        return self.proof.sizes or HEIGHTS

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the kernels of results of this type now: otherwise, the first step that needs one waits for it."""
        rows = self._numbers.new_zeros(self.heights[-1], self.matrix.inputs, dtype=self._dtype)
        for height in self.heights:
            for by_split in (False, True):
                some = rows[:height]
                self._multiply(some, self.matrix, self._bias, height=height, by_split=by_split, dtype=dtype)

    def __call__(
        self,
        rows: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        height: int = 0,
        tiles: Tiles | None = None,
        sources: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product of ``[…, inputs]``, as ``cuda.matmul.multiply`` does."""
        flat = rows.reshape(-1, rows.shape[-1])
        height = height or choose_height(self.heights, len(flat))
        result = self._multiply(flat, self.matrix, self._bias, height=height, dtype=dtype, tiles=tiles, sources=sources)
        return result if sources is not None else result.view(*rows.shape[:-1], -1)

    def multiply_groups(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the products of rows of which each matrix multiplies ``num_rows``, one group after the other."""
        from swarm.stage.cuda.experts import equal_tiles  # noqa: PLC0415 - needs Triton

        height = choose_height(self.heights, num_rows)
        return self(rows, height=height, tiles=equal_tiles(self.matrix.num_experts, num_rows, height, rows.device))


def choose_height(heights: Sequence[int], num_rows: int) -> int:
    """Return the height of the tiles for this number of rows of one matrix."""
    return next((height for height in heights if height >= num_rows), heights[-1])


@dataclass(frozen=True, slots=True)
class _AdaptedColumns:
    """What an adapter adds to the columns of a product from ``first`` on."""

    first: int
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], which the kernel widens to float32
    scale: float

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return in float32 what the adapter adds to these rows."""
        return _multiply_low_rank(_multiply_low_rank(rows, self.down) * self.scale, self.up)


def _multiply_low_rank(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the product in float32. Its tiles always have one height, so it needs no proof."""
    from swarm.stage.cuda.matmul import multiply  # noqa: PLC0415 - needs Triton

    return multiply(rows, plain_matrix(matrix), dtype=torch.float32, height=_LOW_RANK_HEIGHT, by_split=False)


class TritonLinear(torch.nn.Module):
    """Linear layer on a CUDA device, plain or quantized, with the adapters of its rows.

    Adapters are added to the sums before these are rounded. Rows without one have the bits that they have alone.
    """

    name = "Triton"

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        return device.type == "cuda" and dtype in DTYPES and _has_triton(device)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._set_product(plain_matrix(weight), bias, weight.dtype)

    @classmethod
    def from_quantized(
        cls, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> TritonLinear:
        """Return the product with a quantized matrix, which is packed on the device."""
        linear = cls.__new__(cls)
        torch.nn.Module.__init__(linear)
        linear._set_product(packed_matrix(weight, device), bias, dtype)
        return linear

    def _set_product(self, matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features, self.dtype = matrix.outputs, matrix.inputs, dtype
        self._product = TritonProduct(matrix, bias, dtype)
        self.sites: tuple[tuple[Site, ...], ...] = ()  # the modules of the model whose outputs these are
        # by name; replaced as a whole, because threads share layers
        self.adapters: Mapping[str, tuple[_AdaptedColumns, ...]] = {}

    @property
    def exact(self) -> bool:
        """Whether the product was shown to be exact."""
        return self._product.proof.exact

    @property
    def tiling(self) -> set[str]:
        """The heights of the tiles that the product is called with, in words."""
        return {"/".join(map(str, self._product.proof.sizes))}

    def add_adapter(self, name: str, weights: Mapping[str, LowRank]) -> set[str]:
        """Add an adapter to this product. Return its modules that are computed here."""
        (sites,) = self.sites or ((),)
        device, columns, first = self._product.matrix.numbers.device, list[_AdaptedColumns](), 0
        for site in sites:
            part = weights.get(site.module)
            if part is not None:
                up = part.up[site.first : site.first + site.count]
                down, up = (matrix.to(device, self.dtype).contiguous() for matrix in (part.down, up))
                columns.append(_AdaptedColumns(first, down, up, part.scale))
            first += site.count
        if columns:
            self._product.compile(torch.float32)
            for added in columns:  # compiles their kernels
                added.multiply(added.down.new_zeros(1, self.in_features))
            self.adapters = {**self.adapters, name: tuple(columns)}
        return {site.module for site in sites} & weights.keys()

    def keep_adapters(self, keys: AbstractSet[str]) -> None:
        """Drop all adapters but these."""
        if not self.adapters.keys() <= keys:
            self.adapters = {key: part for key, part in self.adapters.items() if key in keys}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        adapters = current_adapters()
        if adapters is None or not self.adapters.keys() & set(adapters.names):
            return self._product(rows)
        flat = rows.reshape(-1, self.in_features)
        if len(adapters.which) != len(flat):
            raise ValueError(f"a product of {len(flat)} rows in a step of {len(adapters.which)}, which have adapters")
        sums = self._product(flat, dtype=torch.float32)
        self._add_adapters(sums, flat, adapters)
        return sums.to(self.dtype).view(*rows.shape[:-1], -1)

    def _add_adapters(self, sums: torch.Tensor, rows: torch.Tensor, adapters: RowAdapters) -> None:
        for index, name in enumerate(adapters.names):
            which = adapters.rows(index, rows.device)
            for part in self.adapters.get(name, ()):
                sums[which, part.first : part.first + len(part.up)] += part.multiply(rows[which])

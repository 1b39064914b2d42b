"""Products by our own kernels: a matrix is packed once, and read as fast as memory delivers it."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from swarm.stage import native
from swarm.stage.native import cores
from swarm.stage.native.adapters import (
    AdaptedRows,
    AdapterPart,
    LowRank,
    RowAdapters,
    Site,
    current_adapters,
    make_table,
)

_BLOCK = 64  # outputs that are adjacent in a packed matrix
# Function numbers, as in kernels.h.
FUNCTIONS = {
    ("none", ""): 0,
    ("swish", ""): 1,
    ("gelu", "tanh"): 2,
    ("gelu", "none"): 3,
    ("relu", ""): 4,
    ("relu2", ""): 5,
    ("sigmoid", ""): 6,
    ("tanh", ""): 7,
    ("quick_gelu", ""): 8,
    ("softcap", ""): 9,
    ("clamped", ""): 10,
    ("exp", ""): 11,
    ("softplus", ""): 12,
}
UNGATED = 64  # added to a function's number if it is applied to the product itself


class NativeModule(torch.nn.Module):
    """A module of ours that replaces one of the model's, complete with its weights."""


class NativeLinear(NativeModule):
    """Linear layer computed by our own kernel. Each row gets the same bits as if it were computed alone, without
    padding rows.

    ``function`` is applied to the result before it is rounded and written; ``limit`` is the limit of a soft cap.
    """

    name = "native"
    exact = True

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, inputs: Iterable[int] = ()) -> bool:
        return device.type == "cpu" and dtype in native.KINDS and native.library() is not None

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        function: tuple[str, str] = ("none", ""),
        limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        number = FUNCTIONS[function] + (UNGATED if function != ("none", "") else 0)
        self._set_matrix(_pack(weight), bias, len(weight), number, limit=limit)

    def _set_matrix(
        self,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: int,
        function: int,
        *,
        limit: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Set the matrix that rows are multiplied by. ``dtype`` is that of the rows, if it is not the matrix's."""
        self._packed, self._bias = packed, None if bias is None else bias.float().contiguous()
        self.dtype = dtype or packed.dtype
        address = None if self._bias is None else self._bias.data_ptr()
        kind = native.KINDS[self.dtype]
        self.matrix = native.NativeMatrix(
            packed.data_ptr(), address, outputs, self.in_features, function, kind, 0.0, limit
        )
        library = native.library()
        assert library is not None, "the caller has checked supports()"
        self._multiply = library.swarm_linear
        self._reference = ctypes.byref(self.matrix)
        # The modules of the model whose outputs these are; of a gated matrix, those of the gate and of what it gates.
        self.sites: tuple[tuple[Site, ...], ...] = ()
        self.adapters: Mapping[str, AdapterPart] = {}  # by name; replaced as a whole, because threads share layers

    def add_adapter(self, name: str, weights: Mapping[str, LowRank]) -> set[str]:
        """Add an adapter to this product. Return its modules that are computed here."""
        modules = {site.module for run in self.sites for site in run} & weights.keys()
        if modules:
            part = AdapterPart(self.sites, weights, self.in_features, self.dtype)
            self.adapters = {**self.adapters, name: part}
        return modules

    def drop_adapters(self, keys: Collection[str]) -> None:
        if not self.adapters.keys().isdisjoint(keys):
            self.adapters = {key: part for key, part in self.adapters.items() if key not in keys}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*rows.shape[:-1], self.out_features), dtype=self.dtype)
        self.multiply_into(out, 0, rows)
        return out

    def columns(self) -> Iterator[tuple[NativeLinear, int]]:
        """Yield each matrix of the product, here only one, with the first column of its outputs."""
        yield self, 0

    def multiply_into(self, out: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Write the products into the columns of ``out`` from ``first`` on."""
        if rows.dtype is not self.dtype or rows.shape[-1] != self.in_features:
            raise ValueError(
                f"rows of {rows.shape[-1]} {rows.dtype} for a matrix of {self.in_features} {str(self.dtype)[6:]} inputs"
            )
        flat, num_rows = rows if rows.is_contiguous() else rows.contiguous(), rows.numel() // self.in_features
        adapters = current_adapters()
        adapted = None if adapters is None or not self.adapters else self._adapted(adapters, num_rows)
        status = self._multiply(
            self._reference,
            flat.data_ptr(),
            self.in_features,
            num_rows,
            out.data_ptr() + first * out.element_size(),
            out.shape[-1],
            None if adapted is None else ctypes.byref(adapted.native),
            cores.num_threads(),
        )
        native.check_status(status)

    def _adapted(self, adapters: RowAdapters, num_rows: int) -> AdaptedRows:
        if len(adapters.which) != num_rows:
            raise ValueError(f"a product of {num_rows} rows in a step of {len(adapters.which)}, which have adapters")
        return adapters.table(make_table([self.adapters.get(name)]) for name in adapters.names)


class NativeGated(NativeLinear):
    """``function(gate × rows) * (up × rows)``, reading both matrices in one pass."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, function: tuple[str, str]) -> None:
        torch.nn.Module.__init__(self)
        assert function != ("none", ""), "without a function, it is another product"
        self.out_features, self.in_features = gate.shape
        packed = allocate_packed(1, 2 * len(gate), self.in_features, gate.dtype)[0]
        pack_gated(packed, gate, up)
        self._set_matrix(packed, None, 2 * len(gate), FUNCTIONS[function])


def pack_gated(packed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Put both matrices into the memory of one: in each block, half of the outputs are the gate's."""
    half = _BLOCK // 2
    for part, weight in enumerate((gate, up)):
        pack_rows(packed[..., part * half : (part + 1) * half], weight)


def gated_bias(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the biases ``[matrices, outputs]`` of the gate and up projections, in the order of a gated matrix's
    outputs."""
    half = _BLOCK // 2
    count, outputs = gate.shape
    blocks = -(-outputs // half)
    bias = torch.zeros(count, blocks, 2, half)
    for part, values in enumerate((gate, up)):
        padded = torch.nn.functional.pad(values.float(), (0, blocks * half - outputs))
        bias[:, :, part] = padded.view(count, blocks, half)
    return bias.view(count, -1)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed = allocate_packed(1, len(weight), weight.shape[1], weight.dtype)[0]
    pack_rows(packed, weight)
    return packed


def allocate_packed(count: int, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory for matrices in blocks of 64 outputs: ``[matrix, block, pair of inputs, which of the two,
    output]``.

    In bfloat16, the two weights of an output in a pair are adjacent in memory (processors multiply them together). In
    float32, all first weights come before all second ones.
    """
    blocks, pairs = -(-outputs // _BLOCK), -(-inputs // 2)
    flat = native.allocate_weights(count * blocks * pairs * 2 * _BLOCK, dtype)
    if dtype == torch.bfloat16:
        packed = flat.view(count, blocks, pairs, _BLOCK, 2).transpose(3, 4)
    else:
        packed = flat.view(count, blocks, pairs, 2, _BLOCK)
    if outputs % _BLOCK:
        packed[:, -1:] = 0  # padding outputs
    if inputs % 2:
        packed[:, :, -1:] = 0
    return packed


def pack_rows(blocks: torch.Tensor, weight: torch.Tensor) -> None:
    """Copy the matrix's rows into ``[block, pair, which, width]``, without an intermediate copy."""
    outputs, inputs = weight.shape
    width, pairs = blocks.shape[3], inputs // 2
    whole, rest = outputs // width, outputs % width
    even = weight[:, : 2 * pairs]
    split = even[: whole * width].view(whole, width, pairs, 2).permute(0, 2, 3, 1)
    blocks[:whole, :pairs].copy_(split)
    if rest:
        blocks[whole, :pairs, :, :rest].copy_(even[whole * width :].view(rest, pairs, 2).permute(1, 2, 0))
    if inputs % 2:  # the last input, whose pair is incomplete
        last = weight[:, -1]
        blocks[:whole, pairs, 0].copy_(last[: whole * width].view(whole, width))
        if rest:
            blocks[whole, pairs, 0, :rest].copy_(last[whole * width :])

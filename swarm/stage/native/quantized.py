"""Products by our own kernels with quantized weights, packed as ``kernels.h`` describes.

The packed matrix comes from the cache of packed matrices or is packed from the weight's numbers, which are read only
then. If the weight's inputs have an order of their own, the order lies behind the packed numbers in the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from swarm.stage import native
from swarm.stage.native import cores, packed_cache
from swarm.stage.native.linears import FUNCTIONS, UNGATED, NativeLinear, NativeModule
from swarm.stage.quantization.formats import (
    GROUPS,
    SUPER_GROUP,
    Codes,
    Minima,
    Scales,
    WeightFormat,
    packed_bytes,
    supports_int8,
)
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight, code_values, join_keys

# Encodings, as in kernels.h.
_CODES = {Codes.INT4: 0, Codes.INT5: 1, Codes.INT6: 2, Codes.INT8: 3, Codes.FP8: 4}
_SCALES = {Scales.FLOAT16: 0, Scales.BFLOAT16: 1, Scales.FLOAT32: 2, Scales.NESTED: 3}
_MINIMA = {Minima.NONE: 0, Minima.FLOAT16: 1, Minima.ZERO_POINTS: 2, Minima.NESTED: 3}
_SCALE_DTYPES = {
    Scales.FLOAT16: torch.float16,
    Scales.BFLOAT16: torch.bfloat16,
    Scales.FLOAT32: torch.float32,
    Scales.NESTED: torch.float16,
}
_MINIMUM_DTYPES = {Minima.FLOAT16: torch.float16, Minima.ZERO_POINTS: torch.uint8, Minima.NESTED: torch.float16}
_BLOCK = 64  # outputs of a block


class _Numbers(ctypes.Structure):
    """A quantized matrix that is not packed: ``SwarmNumbers`` of packing.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "minima", "group_scales", "group_minima")),
        ("outputs", ctypes.c_int64),
    ]


class QuantizedMatrices:
    """Packed quantized matrices of one shape, in one piece of memory: one matrix, or one for each expert.

    ``addresses`` are those of the packed matrices. ``outputs`` counts a gated matrix's two outputs for each one that it
    gives.
    """

    def __init__(self, weights: Sequence[QuantizedWeight], *, int8_rows: bool = False) -> None:
        """Pack one weight, or a gate and an up projection that become one gated matrix.

        ``int8_rows``: whether rows are rounded to int8, if the format allows it.
        """
        first = weights[0]
        shape = first.shape
        if any(
            (weight.shape, weight.format, weight.order_key) != (shape, first.format, first.order_key)
            for weight in weights
        ):
            raise ValueError("a gated matrix needs two weights of the same shape, format and order of inputs")
        self.form, self.inputs = first.format, shape[-1]
        self.outputs = shape[-2] * len(weights)
        self.num_experts = shape[0] if len(shape) == 3 else 1
        rows = -(-shape[-2] // (_BLOCK // len(weights))) * _BLOCK  # whole blocks
        self._size = packed_bytes(self.form, rows, self.inputs)
        order_bytes = 4 * self.inputs if first.order_key else 0
        key = first.key if len(weights) == 1 else join_keys("gate and up", weights)
        self.packed = packed_cache.load_or_pack(
            key, self.num_experts * self._size + order_bytes, lambda packed: self._pack(weights, packed)
        )
        order = self.packed[-order_bytes:].data_ptr() if order_bytes else None
        self.format = native_format(self.form, order, int8_rows=int8_rows and supports_int8(self.form))

    @property
    def addresses(self) -> list[int]:
        return [self.packed.data_ptr() + index * self._size for index in range(self.num_experts)]

    def _pack(self, weights: Sequence[QuantizedWeight], packed: torch.Tensor) -> None:
        form, order = native_format(self.form, None), None
        for index, parts in enumerate(zip(*(weight.read_experts() for weight in weights), strict=True)):
            for part, weight in zip(parts, weights, strict=True):
                if part.shape != weight.shape[-2:] or part.format != weight.format:
                    raise ValueError(
                        f"codes of shape {tuple(part.shape)} were read where {tuple(weight.shape)} was described"
                    )
                _check_arrays(part, is_ordered=bool(weight.order_key))
            _pack_matrix(form, parts, packed[index * self._size : (index + 1) * self._size])
            order = parts[0].order
        if order is not None:
            packed[self.num_experts * self._size :].view(torch.int32).copy_(order)

    def table(
        self,
        dtype: torch.dtype,
        function: int = 0,
        alpha: float = 0.0,
        limit: float = 0.0,
        bias: torch.Tensor | None = None,
    ) -> ctypes.Array[native.NativeMatrix]:
        """Return the table of addresses by which the kernel reads the matrices. ``bias`` is float32 [experts,
        outputs]."""
        kind, form = native.KINDS[dtype], ctypes.addressof(self.format)
        biases = [None] * self.num_experts if bias is None else [row.data_ptr() for row in bias]
        return (native.NativeMatrix * self.num_experts)(
            *(
                native.NativeMatrix(packed, bias, self.outputs, self.inputs, function, kind, alpha, limit, form)
                for packed, bias in zip(self.addresses, biases, strict=True)
            )
        )


def native_format(form: WeightFormat, order: int | None, *, int8_rows: bool = False) -> native.NativeFormat:
    """Return the format as the kernels read it. ``order`` is the address of the inputs' order."""
    table = (ctypes.c_uint16 * 16)()
    if form.codes is Codes.INT4:
        table[:] = code_values(form)[:16].bfloat16().view(torch.int16).to(torch.int32).bitwise_and(0xFFFF).tolist()
    return native.NativeFormat(
        _CODES[form.codes],
        _SCALES[form.scales],
        _MINIMA[form.minima],
        form.group,
        form.offset,
        int8_rows,
        order,
        table,
    )


def _pack_matrix(form: native.NativeFormat, parts: Sequence[QuantizedTensor], packed: torch.Tensor) -> None:
    library = native.library()
    assert library is not None, "the caller has checked supports()"
    arrays = [_arrays(part) for part in parts]
    numbers = (_Numbers * len(parts))(
        *(
            _Numbers(*(None if array is None else array.data_ptr() for array in some), part.shape[-2])
            for some, part in zip(arrays, parts, strict=True)
        )
    )
    library.swarm_pack(
        ctypes.byref(form), numbers, len(parts), parts[0].shape[-1], packed.data_ptr(), torch.get_num_threads()
    )


def _check_arrays(tensor: QuantizedTensor, *, is_ordered: bool) -> None:
    """Raise ``ValueError`` unless the matrix has every array that its format requires, with the shape and dtype that C
    reads: C gets addresses only."""
    form, (outputs, inputs) = tensor.format, tensor.shape
    groups, super_groups = (outputs, -(-inputs // form.group)), (outputs, -(-inputs // SUPER_GROUP))
    has_nested_scales, has_nested_minima = form.scales is Scales.NESTED, form.minima is Minima.NESTED
    scales, minima = (super_groups if is_nested else groups for is_nested in (has_nested_scales, has_nested_minima))
    required: list[tuple[str, tuple[int, ...] | None, torch.dtype | None]] = [  # a shape of None: no such array
        ("codes", (outputs, inputs), torch.uint8),
        ("scales", scales, None),
        ("minima", None if form.minima is Minima.NONE else minima, None),
        ("group_scales", groups if has_nested_scales else None, torch.int8),
        ("group_minima", groups if has_nested_minima else None, torch.uint8),
        ("order", (inputs,) if is_ordered else None, torch.int32),
    ]
    if form.group not in GROUPS:
        raise ValueError(f"the kernels have no groups of {form.group} inputs")
    for name, shape, dtype in required:
        array: torch.Tensor | None = getattr(tensor, name)
        actual = None if array is None else tuple(array.shape)
        if actual != shape or (array is not None and dtype not in (None, array.dtype)):
            kind = "" if array is None else f" ({array.dtype})"
            raise ValueError(f"{form.name} has {name} of shape {actual}{kind}, and the kernels read {shape}")


def _arrays(tensor: QuantizedTensor) -> list[torch.Tensor | None]:
    """Return the numbers in the order of ``SwarmNumbers``, in memory as the packer reads them."""
    form = tensor.format
    minima = None if tensor.minima is None else tensor.minima.to(_MINIMUM_DTYPES[form.minima])
    arrays = (
        tensor.codes,
        tensor.scales.to(_SCALE_DTYPES[form.scales]),
        minima,
        tensor.group_scales,
        tensor.group_minima,
    )
    return [None if array is None else array.contiguous() for array in arrays]


class QuantizedLinear(NativeLinear):
    """Linear layer with a quantized weight. Each row gets the same bits as if it were computed alone."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        function: tuple[str, str] = ("none", ""),
        limit: float = 0.0,
        *,
        int8_rows: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        number = FUNCTIONS[function] + (UNGATED if function != ("none", "") else 0)
        self._set_quantized(QuantizedMatrices([weight], int8_rows=int8_rows), bias, dtype, number, limit)

    def _set_quantized(
        self, matrices: QuantizedMatrices, bias: torch.Tensor | None, dtype: torch.dtype, function: int, limit: float
    ) -> None:
        self.matrices = matrices
        self._set_matrix(matrices.packed, bias, matrices.outputs, function, limit=limit, dtype=dtype)
        self.matrix.format = ctypes.addressof(matrices.format)


class QuantizedGated(QuantizedLinear):
    """``function(gate × rows) * (up × rows)`` with quantized weights, reading both in one pass."""

    def __init__(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight,
        function: tuple[str, str],
        dtype: torch.dtype,
        *,
        int8_rows: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        assert function != ("none", ""), "without a function, it is another product"
        self.out_features, self.in_features = gate.shape
        self._set_quantized(QuantizedMatrices([gate, up], int8_rows=int8_rows), None, dtype, FUNCTIONS[function], 0.0)


class QuantizedEmbedding(NativeModule):
    """Embedding whose rows are unpacked from a packed matrix, each weight rounded once to ``dtype``.

    ``weight`` is a weight of its own, or the linear layer to share the packed matrix with.
    """

    def __init__(self, weight: QuantizedWeight | QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrices = weight.matrices if isinstance(weight, QuantizedLinear) else QuantizedMatrices([weight])
        self.num_embeddings, self.embedding_dim = self.matrices.outputs, self.matrices.inputs
        self.dtype = dtype
        self._table = self.matrices.table(dtype)
        library = native.library()
        assert library is not None, "the caller has checked supports()"
        self._lookup = library.swarm_lookup

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=self.dtype)
        if ids.numel() == 0:
            return out
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_embeddings:
            raise IndexError(f"token numbers must be between 0 and {self.num_embeddings - 1}")
        self._lookup(
            self._table, ids.data_ptr(), ids.numel(), native.KINDS[self.dtype], out.data_ptr(), cores.num_threads()
        )
        return out


class QuantizedExperts:
    """One quantized matrix for each expert, all in one piece of memory. The interface is that of plain experts'
    matrices."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        int8_rows: bool = False,
    ) -> None:
        """Pack one weight ``[experts, outputs, inputs]``, or gate and up that become gated matrices. ``bias`` is
        [experts, outputs] in the order of the packed outputs (``gated_bias``)."""
        self.matrices = QuantizedMatrices(weights, int8_rows=int8_rows)
        self.bias, self.dtype = None if bias is None else bias.float().contiguous(), dtype
        self.inputs, self.num_experts = self.matrices.inputs, self.matrices.num_experts

    def table(self, function: int = 0, alpha: float = 0.0, limit: float = 0.0) -> ctypes.Array[native.NativeMatrix]:
        """Return the table of addresses by which the kernel reads the matrices."""
        return self.matrices.table(self.dtype, function, alpha, limit, self.bias)


def quantized_experts(
    inner: Sequence[QuantizedWeight],
    down: QuantizedWeight,
    dtype: torch.dtype,
    inner_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    int8_rows: bool = False,
) -> tuple[QuantizedExperts, QuantizedExperts]:
    """Pack a layer's experts. ``inner`` is one weight, or gate and up."""
    return (
        QuantizedExperts(inner, inner_bias, dtype, int8_rows=int8_rows),
        QuantizedExperts([down], down_bias, dtype, int8_rows=int8_rows),
    )

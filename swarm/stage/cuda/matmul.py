"""Product of rows with a matrix whose sums run in one fixed order, whatever other rows are in the batch.

Inputs are multiplied in blocks of 64, one after the other. Long sums are split every ``split_length`` inputs, which
depends on the matrix alone; each split is summed by itself, and the splits are added in their order. A program computes
one split, or all splits one after the other, whichever fills the device better. The matrix is the first operand of the
tensor cores' instruction: its shape along the outputs and inputs is then the same for all heights of a tile of rows,
and only its third size changes. Whether all heights have the same bits on a device is shown by a probe
(``matmul.triton_products``), which also compares both ways to compute the splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from swarm.stage.cuda.quantized import PLAIN, PackedMatrix, decode, load_codes
from swarm.stage.quantization.formats import BLOCK_INPUTS, SUPER_GROUP

BLOCK: Final = BLOCK_INPUTS // 2  # inputs that are multiplied at a time
_MIN_SPLIT: Final = 512  # inputs
_PROGRAMS: Final = 256  # that fill a large device; a part of the splits' lengths, and so of the bits
_JOINED: Final = 1024  # outputs that a program joins


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix ``[outputs, inputs]``, or one for each expert ``[experts, outputs, inputs]``, with any strides."""

    numbers: torch.Tensor

    @property
    def outputs(self) -> int:
        return self.numbers.shape[-2]

    @property
    def inputs(self) -> int:
        return self.numbers.shape[-1]

    @property
    def num_experts(self) -> int:
        return len(self.numbers) if self.numbers.ndim == 3 else 1

    @property
    def description(self) -> str:
        """What decides the bits of a product, beside shape and dtype."""
        return "plain" if self.numbers.stride(-1) == 1 else "inputs first"

    def expert(self, index: int) -> PlainMatrix:
        """Return the matrix of one expert."""
        return PlainMatrix(self.numbers[index]) if self.numbers.ndim == 3 else self

    def with_numbers(self, numbers: torch.Tensor) -> PlainMatrix:
        """Return a matrix of this kind with other weights."""
        return PlainMatrix(numbers if self.numbers.stride(-1) == 1 else numbers.T.contiguous().T)


Matrix = PlainMatrix | PackedMatrix


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of rows that are sorted by expert. All tensors are on the device; no number of them is known to the
    host, so there are as many tiles as there can be, and those that are left over are empty."""

    experts: torch.Tensor  # int32, of each tile
    starts: torch.Tensor  # int32: its first row
    stops: torch.Tensor  # int32: the row after its last one
    row_experts: torch.Tensor  # int32, of each row


@dataclass(frozen=True, slots=True)
class _Tuning:
    """How a tile is computed: outputs of a tile, warps, and loads in flight."""

    outputs: int
    warps: int
    stages: int


_ROOM_BYTES: Final = 160 << 10  # shared memory that the loads below take at most
# By height. To be measured on a GPU; none of these numbers changes a bit.
_TUNINGS: Final = {16: _Tuning(64, 4, 6), 64: _Tuning(128, 4, 4), 128: _Tuning(128, 8, 3)}


def split_length(outputs: int, inputs: int) -> int:
    """Return the number of inputs after which a new sum begins. Matrices with few outputs have more splits."""
    num_splits = -(-_PROGRAMS // -(-outputs // BLOCK))
    length = -(-inputs // num_splits)
    return max(_MIN_SPLIT, -(-length // BLOCK_INPUTS) * BLOCK_INPUTS)


# One kernel for all numbers of rows: a kernel of its own for one row might have other bits, and is compiled in a step.
@triton.jit(do_not_specialize=["num_rows", "num_row_tiles", "num_splits"])
def _multiply(
    rows,
    out,
    parts,
    bias,
    weight,
    scales,
    minima,
    group_scales,
    group_minima,
    sources,
    tile_experts,
    tile_starts,
    tile_stops,
    num_rows,
    num_row_tiles,
    outputs,
    inputs,
    row_stride,
    expert_stride,
    output_stride,
    input_stride,
    num_bytes,
    num_groups,
    num_super,
    num_splits,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENCODING: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SUPER: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMA: tl.constexpr,
    NESTED: tl.constexpr,
    VALUES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):
    tile, out_tile = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    start, stop = tile * ROWS, num_rows
    if IS_GROUPED:
        start, stop = tl.load(tile_starts + tile), tl.load(tile_stops + tile)
        if start >= stop:
            return
    row = start + tl.arange(0, ROWS)
    is_row = row < stop
    source = row.to(tl.int64)
    if HAS_SOURCES:
        source = tl.load(sources + row, mask=is_row, other=0).to(tl.int64)
    x_rows = rows + source * row_stride
    column = out_tile * OUTS + tl.arange(0, OUTS)
    # outputs behind the last one are computed as the last one, and not stored
    output = tl.minimum(column, outputs - 1).to(tl.int64)
    line = output  # of the packed matrices and biases of all experts
    lines = weight + output * output_stride
    if IS_GROUPED:
        expert = tl.load(tile_experts + tile).to(tl.int64)
        line += expert * outputs
        lines += expert * expert_stride
    inner = tl.arange(0, BLOCK)
    first_split, last_split = 0, num_splits
    if BY_SPLIT:
        first_split, last_split = tl.program_id(1), tl.program_id(1) + 1
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for split in range(first_split, last_split):
        acc = tl.zeros([OUTS, ROWS], tl.float32)
        end = tl.minimum(inputs, (split + 1) * SPLIT)
        if ENCODING == 0:
            for at in range(split * SPLIT, end, BLOCK):
                k = at + inner
                w = tl.load(lines[:, None] + (k * input_stride)[None, :], mask=(k < inputs)[None, :], other=0.0)
                x = tl.load(x_rows[None, :] + k[:, None], mask=is_row[None, :] & (k < inputs)[:, None], other=0.0)
                acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
        if ENCODING == 1:
            for at in range(split * SPLIT, end, BLOCK):
                k = at + inner
                some = load_codes(weight, line, num_bytes, at, BLOCK, GROUPS)
                w = decode(
                    some, line, at, scales, minima, group_scales, group_minima, num_groups, num_super,
                    GROUP, SUPER, OFFSET, MINIMA, NESTED, VALUES, LOW, HIGH, OUTS, BLOCK, GROUPS,
                )  # fmt: skip
                x = tl.load(x_rows[None, :] + k[:, None], mask=is_row[None, :] & (k < inputs)[:, None], other=0.0)
                acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
        if ENCODING == 2:
            for at in range(split * SPLIT, end, 2 * BLOCK):
                both = load_codes(weight, line, num_bytes, at // 2, BLOCK, GROUPS)
                for half in tl.static_range(2):
                    begin = at + half * BLOCK
                    k = begin + inner
                    w = decode(
                        both >> 4 if half else both & 15, line, begin, scales, minima, group_scales, group_minima,
                        num_groups, num_super,
                        GROUP, SUPER, OFFSET, MINIMA, NESTED, VALUES, LOW, HIGH, OUTS, BLOCK, GROUPS,
                    )  # fmt: skip
                    x = tl.load(x_rows[None, :] + k[:, None], mask=is_row[None, :] & (k < inputs)[:, None], other=0.0)
                    acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
        total += acc
    place = row.to(tl.int64)[None, :] * outputs + column[:, None]
    mask = is_row[None, :] & (column < outputs)[:, None]
    if BY_SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * num_rows * outputs + place, total, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + line).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _join(
    parts,
    out,
    bias,
    row_experts,
    num_rows,
    num_experts,
    outputs,
    num_splits,
    JOINED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
):
    """Add the splits of one row in their order, then the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * JOINED + tl.arange(0, JOINED)
    mask = column < outputs
    expert = 0
    if IS_GROUPED:
        expert = tl.load(row_experts + row)
        if expert >= num_experts:
            return
    total = tl.zeros([JOINED], tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + (split * num_rows + row) * outputs + column, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + expert * outputs + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, total.to(out.dtype.element_ty), mask=mask)


def compiler_version() -> str:
    """Return the version of the compiler that chooses the kernels' instructions."""
    return str(triton.__version__)


def multiply(
    rows: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None = None,
    *,
    height: int,
    by_split: bool | None = None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product ``[rows, outputs]`` of ``[rows, inputs]`` with a matrix, in tiles of ``height`` rows.

    ``by_split``: whether splits are computed by programs of their own; None: as it is faster. ``dtype``: of the result;
    None: that of the rows. With ``tiles``, each tile is multiplied by its expert's matrix, and the results of rows
    without an expert are undefined. ``sources``: which of ``rows`` each row of the tiles is; None: rows are sorted.
    """
    if rows.shape[-1] != matrix.inputs:
        raise ValueError(f"rows of {rows.shape[-1]} for a matrix of {matrix.inputs} inputs")
    if isinstance(matrix, PackedMatrix) and matrix.order is not None:
        rows = rows.index_select(-1, matrix.order)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, outputs = len(rows) if sources is None else len(sources), matrix.outputs
    out = rows.new_empty(num_rows, outputs, dtype=dtype or rows.dtype)
    if not num_rows:
        return out
    length, tuning = split_length(outputs, matrix.inputs), _tuning(height, rows.dtype, rows.device)
    num_splits = -(-matrix.inputs // length)
    num_row_tiles = -(-num_rows // height) if tiles is None else len(tiles.experts)
    num_tiles = num_row_tiles * -(-outputs // tuning.outputs)
    if by_split is None:
        by_split = num_tiles < _PROGRAMS
    by_split = by_split and num_splits > 1
    parts = rows.new_empty(num_splits, num_rows, outputs, dtype=torch.float32) if by_split else out
    bias_or_none = rows if bias is None else bias
    experts, starts, stops = (rows, rows, rows) if tiles is None else (tiles.experts, tiles.starts, tiles.stops)
    _multiply[(num_tiles, num_splits if by_split else 1)](
        *(rows, out, parts, bias_or_none, *_arrays(matrix), rows if sources is None else sources),
        *(experts, starts, stops, num_rows, num_row_tiles, outputs, matrix.inputs, rows.stride(0), *_sizes(matrix)),
        num_splits,
        SPLIT=length,
        ROWS=height,
        OUTS=tuning.outputs,
        BLOCK=BLOCK,
        **_constants(matrix),
        HAS_BIAS=bias is not None,
        HAS_SOURCES=sources is not None,
        IS_GROUPED=tiles is not None,
        BY_SPLIT=by_split,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        # a product and a difference have their own roundings, as on a CPU
        enable_fp_fusion=False,
    )
    if by_split:
        _join[(num_rows, -(-outputs // _JOINED))](
            *(parts, out, bias_or_none, rows if tiles is None else tiles.row_experts),
            *(num_rows, matrix.num_experts, outputs, num_splits),
            JOINED=_JOINED,
            HAS_BIAS=bias is not None,
            IS_GROUPED=tiles is not None,
            enable_fp_fusion=False,
        )
    return out


def _tuning(height: int, dtype: torch.dtype, device: torch.device) -> _Tuning:
    # without tensor cores, larger tiles would not fit into the registers
    tuning = _Tuning(32 if height == 128 else 64, 4, 3) if dtype == torch.float32 else _TUNINGS[height]
    return replace(tuning, stages=2) if _has_little_memory(device) else tuning


@cache
def _has_little_memory(device: torch.device) -> bool:
    """Whether a program on this device has no room for more loads in flight."""
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    # the number by which Triton refuses a kernel
    return bool(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"] < _ROOM_BYTES)


def _arrays(matrix: Matrix) -> tuple[torch.Tensor, ...]:
    """Return weights or codes, scales, minima, nested scales and minima; anything for those that the
    kernel does not read."""
    if isinstance(matrix, PlainMatrix):
        return (matrix.numbers,) * 5
    optional = (matrix.minima, matrix.group_scales, matrix.group_minima)
    return (matrix.numbers, matrix.scales, *(matrix.numbers if each is None else each for each in optional))


def _sizes(matrix: Matrix) -> tuple[int, ...]:
    """Return the strides of a plain matrix, and the lengths of a packed one's lines."""
    if isinstance(matrix, PlainMatrix):
        return (0, *matrix.numbers.stride(), 0, 0, 0)[-6:]
    return 0, 0, 0, matrix.numbers.shape[1], -(-matrix.inputs // matrix.format.group), -(-matrix.inputs // SUPER_GROUP)


def _constants(matrix: Matrix) -> dict[str, Any]:
    if isinstance(matrix, PlainMatrix):
        names = ("GROUP", "GROUPS", "SUPER", "OFFSET", "MINIMA", "NESTED", "VALUES", "LOW", "HIGH")
        return {"ENCODING": PLAIN, **dict.fromkeys(names, 1)}
    form, (low, high) = matrix.format, matrix.table
    return {
        "ENCODING": matrix.encoding,
        "GROUP": form.group,
        "GROUPS": max(1, BLOCK // form.group),
        "SUPER": SUPER_GROUP,
        "OFFSET": form.offset,
        "MINIMA": matrix.minimum_kind,
        "NESTED": matrix.is_nested,
        "VALUES": matrix.value_kind,
        "LOW": low,
        "HIGH": high,
    }

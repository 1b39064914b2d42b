"""Conversion between arrays and the bytes of a frame, without copies where possible.

    spec, data = pack(hidden)                    # TensorSpec for the header, memoryview for the frame
    hidden = unpack(spec, frame)                 # float32, read-only

Elements travel little-endian in C order. Swarm runs on little-endian machines only (importing this module elsewhere
fails), so bytes are never swapped. float32 needs no copy at either end; float16 and bfloat16 halve the bytes and cost
one conversion each way. numpy has no bfloat16: its bit patterns live in uint16 arrays.
"""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from swarm.errors import WireError
from swarm.wire.messages import MAX_TENSOR_BYTES, PayloadSpec, SequencePosition, Step, TensorSpec

if sys.byteorder != "little":
    raise ImportError("Swarm needs a little-endian machine: tensors travel as they lie in memory")

WireDtype = Literal["float32", "bfloat16", "float16"]
Bytes = bytes | bytearray | memoryview

# The numpy type that stores each wire dtype.
_STORED: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
_LOW_63_BITS = 2**63 - 1


def checksum(data: Bytes) -> int:
    """Return the low 63 bits of xxh3-64. (0 means "not checked". One in 2**63 frames has the
    checksum 0 by chance, and is not checked.)"""
    return xxhash.xxh3_64_intdigest(data) & _LOW_63_BITS


def num_bytes(spec: TensorSpec) -> int:
    """Return the byte count that follows from shape and dtype of ``spec``, regardless of its ``num_bytes``."""
    return prod(spec.shape) * _STORED[spec.dtype].itemsize


def pack(
    array: NDArray[np.generic], dtype: WireDtype = "float32", *, checked: bool = True
) -> tuple[TensorSpec, memoryview]:
    """Return the description of ``array`` and its bytes as ``dtype``.

    A contiguous array that is stored as ``dtype`` already (uint16 for bfloat16) is not copied: do not write to it until
    the frame has been sent. float32 is converted to the other types; any other combination raises WireError.
    """
    as_stored = _STORED[dtype]
    size = array.size * as_stored.itemsize
    if size > MAX_TENSOR_BYTES:
        raise WireError(f"a tensor of {size} bytes is too large to send: the limit is {MAX_TENSOR_BYTES}")
    stored = np.ascontiguousarray(array if array.dtype == as_stored else _narrow(array, dtype))
    data = stored.data.cast("B") if size else memoryview(b"")  # An empty buffer can't be cast.
    return TensorSpec(dtype, array.shape, size, checksum(data) if checked else 0), data


def pack_bytes(data: Bytes, *, checked: bool = True) -> PayloadSpec:
    """Return the description of raw bytes that are sent as a frame."""
    return PayloadSpec(len(data), checksum(data) if checked else 0)


def view(spec: TensorSpec, data: Bytes) -> NDArray[np.generic]:
    """Return the elements as received (bfloat16 as uint16), read-only and without a copy: the array keeps ``data``
    alive.

    ``data`` must have been checked against ``spec``, as decoding does.
    """
    return np.ndarray(spec.shape, _STORED[spec.dtype], memoryview(data).toreadonly())


def unpack(spec: TensorSpec, data: Bytes) -> NDArray[np.float32]:
    """Return the elements as float32, read-only; a view of ``data`` if they are float32 already. Widening is exact."""
    stored = view(spec, data)
    if spec.dtype == "float32":
        return cast("NDArray[np.float32]", stored)
    widened = from_bfloat16(stored.view(np.uint16)) if spec.dtype == "bfloat16" else stored.astype(np.float32)
    widened.flags.writeable = False
    return widened


def to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bit patterns of the nearest bfloat16, ties to even. NaN stays NaN; too large values become
    infinite."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    # The carry reaches the exponent exactly when rounding up must.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet_nan = (bits >> 16) | 0x0040  # Rounding a NaN could turn it into infinity or minus zero.
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 bit patterns to float32, exactly."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _narrow(array: NDArray[np.generic], dtype: WireDtype) -> NDArray[np.generic]:
    if array.dtype == np.float32 and dtype == "bfloat16":
        return to_bfloat16(array.view(np.float32))
    if array.dtype == np.float32 and dtype == "float16":
        with np.errstate(over="ignore"):  # Values beyond 65504 become infinite, as with any rounding.
            return array.astype(np.float16)
    raise WireError(f"a {array.dtype} array can't be sent as {dtype}: convert it to float32 first")


if TYPE_CHECKING:
    from numpy.typing import NDArray


def find_not_finite(step: Step, hidden: NDArray[np.float32] | None) -> tuple[SequencePosition, ...]:
    """Return the sequences whose hidden states are not all finite, each with its first such position; almost always
    none."""
    if hidden is None:
        return ()
    finite: NDArray[np.bool_] = np.isfinite(hidden)
    if finite.all():
        return ()
    positions: list[SequencePosition] = []
    whole: NDArray[np.bool_] = np.asarray(finite.all(axis=-1))
    taken = 0
    for row in step.rows:
        rows = whole[taken : taken + row.count]
        taken += row.count
        if not rows.all():
            positions.append(SequencePosition(row.sequence, row.start + int(np.argmin(rows))))
    return tuple(positions)


def describe_positions(rows: tuple[SequencePosition, ...]) -> str:
    """Describe the sequences for people; lists the first few of many."""
    named = ", ".join(f"sequence {row.sequence} from position {row.position} on" for row in rows[:4])
    return named if len(rows) <= 4 else f"{named} and {len(rows) - 4} more"

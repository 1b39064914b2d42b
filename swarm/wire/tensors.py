"""Arrays <-> the bytes of a frame, without copying them where that is possible.

    spec, data = pack(hidden)                    # TensorSpec for the header, memoryview for the frame
    hidden = unpack(spec, frame)                 # float32, read-only

Elements travel little-endian in C order. Swarm runs on little-endian machines only (importing this on another one
fails), so nothing is ever swapped. float32 passes without a copy at either end; float16 and bfloat16 halve the bytes
and cost one conversion each way. numpy has no bfloat16: its bit patterns live in uint16 arrays.
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

# How each wire dtype lies in a numpy array.
_STORED: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
_LOW_63_BITS = 2**63 - 1


def checksum(data: Bytes) -> int:
    """The low 63 bits of xxh3-64. (0, which stands for "not checked", comes up once in 2**63 times; that frame goes
    unchecked.)"""
    return xxhash.xxh3_64_intdigest(data) & _LOW_63_BITS


def num_bytes(spec: TensorSpec) -> int:
    """Count the bytes that shape and dtype of ``spec`` ask for, whatever its ``num_bytes`` says."""
    return prod(spec.shape) * _STORED[spec.dtype].itemsize


def pack(
    array: NDArray[np.generic], dtype: WireDtype = "float32", *, checked: bool = True
) -> tuple[TensorSpec, memoryview]:
    """Describe ``array`` and hand out its bytes as ``dtype``.

    A contiguous array that is stored as ``dtype`` already (uint16 for bfloat16) is not copied: it must not be written
    to until the frame has left. float32 is converted to what else is asked for; any other mix raises WireError.
    """
    as_stored = _STORED[dtype]
    size = array.size * as_stored.itemsize
    if size > MAX_TENSOR_BYTES:
        raise WireError(f"a tensor of {size} bytes is too large to send: the limit is {MAX_TENSOR_BYTES}")
    stored = np.ascontiguousarray(array if array.dtype == as_stored else _narrowed(array, dtype))
    data = stored.data.cast("B") if size else memoryview(b"")  # nothing can't be cast
    return TensorSpec(dtype, array.shape, size, checksum(data) if checked else 0), data


def pack_bytes(data: Bytes, *, checked: bool = True) -> PayloadSpec:
    """Describe raw bytes that will travel as a frame."""
    return PayloadSpec(len(data), checksum(data) if checked else 0)


def view(spec: TensorSpec, data: Bytes) -> NDArray[np.generic]:
    """The elements as they came (bfloat16 as uint16), read-only, without a copy; ``data`` lives as long as the array.

    ``data`` must have been checked against ``spec``, as decoding does.
    """
    return np.ndarray(spec.shape, _STORED[spec.dtype], memoryview(data).toreadonly())


def unpack(spec: TensorSpec, data: Bytes) -> NDArray[np.float32]:
    """The elements as float32, read-only; a view of ``data`` if they came as float32. Widening is exact."""
    stored = view(spec, data)
    if spec.dtype == "float32":
        return cast("NDArray[np.float32]", stored)
    widened = from_bfloat16(stored.view(np.uint16)) if spec.dtype == "bfloat16" else stored.astype(np.float32)
    widened.flags.writeable = False
    return widened


def to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even. NaN stays NaN; what is too large becomes infinite."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # carries into the exponent exactly when rounding up must
    quiet_nan = (bits >> 16) | 0x0040  # rounding a NaN could carry it over to infinity or to minus zero
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert to float32, the same numbers."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _narrowed(array: NDArray[np.generic], dtype: WireDtype) -> NDArray[np.generic]:
    if array.dtype == np.float32 and dtype == "bfloat16":
        return to_bfloat16(array.view(np.float32))
    if array.dtype == np.float32 and dtype == "float16":
        with np.errstate(over="ignore"):  # beyond 65504 lies infinity, as with every rounding
            return array.astype(np.float16)
    raise WireError(f"a {array.dtype} array can't be sent as {dtype}: convert it to float32 first")


if TYPE_CHECKING:
    from numpy.typing import NDArray


def not_finite(step: Step, hidden: NDArray[np.float32] | None) -> tuple[SequencePosition, ...]:
    """The sequences whose hidden states are not all finite, each with the first such position; almost always none."""
    if hidden is None:
        return ()
    finite: NDArray[np.bool_] = np.isfinite(hidden)
    if finite.all():
        return ()
    found: list[SequencePosition] = []
    whole: NDArray[np.bool_] = np.asarray(finite.all(axis=-1))
    taken = 0
    for row in step.rows:
        rows = whole[taken : taken + row.count]
        taken += row.count
        if not rows.all():
            found.append(SequencePosition(row.sequence, row.start + int(np.argmin(rows))))
    return tuple(found)


def in_words(rows: tuple[SequencePosition, ...]) -> str:
    """Which sequences, for people; the first few of many."""
    named = ", ".join(f"sequence {row.sequence} from position {row.position} on" for row in rows[:4])
    return named if len(rows) <= 4 else f"{named} and {len(rows) - 4} more"

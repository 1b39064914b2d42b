"""Arrays to bytes and back, bit for bit where the dtype allows it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import WireError
from swarm.wire import tensors
from swarm.wire.messages import TensorSpec

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
float32_bits = st.integers(0, 2**32 - 1)


@settings(deadline=None)  # machines that are shared stall
@given(hnp.arrays(np.float32, shapes))
def test_float32_comes_back_bit_for_bit(array: np.ndarray) -> None:
    """Every bit pattern, NaNs with their payloads included, in every shape."""
    spec, data = tensors.pack(array)
    back = tensors.unpack(spec, data)
    assert back.dtype == np.float32
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert spec == TensorSpec("float32", array.shape, array.nbytes, tensors.checksum(array.tobytes()))


def test_nothing_is_copied() -> None:
    """The bytes that leave are the array's own; the array that arrives is a view, and read-only."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    spec, data = tensors.pack(array)
    assert np.shares_memory(np.frombuffer(data, np.uint8), array)
    received = bytearray(data)
    back = tensors.unpack(spec, received)
    assert np.shares_memory(back, np.frombuffer(received, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        back[0, 0] = 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_does_not_lie_in_order_is_put_in_order(dtype: tensors.WireDtype) -> None:
    """Transposed and strided arrays arrive as they look, not as they lie."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    spec, data = tensors.pack(array, dtype)
    assert np.array_equal(tensors.unpack(spec, data), array)


def test_elements_are_little_endian() -> None:
    """What the wire says does not depend on the machine."""
    assert bytes(tensors.pack(np.array([1.0], np.float32))[1]) == b"\x00\x00\x80\x3f"


def test_checksum_is_the_low_63_bits_of_xxh3() -> None:
    """A checksum fits a signed 64-bit integer; it can be left out."""
    array = np.ones(5, np.float32)
    assert tensors.pack(array)[0].checksum == xxhash.xxh3_64_intdigest(array.tobytes()) & (2**63 - 1)
    assert tensors.pack(array, checked=False)[0].checksum == 0
    assert tensors.pack_bytes(b"abc").checksum == tensors.checksum(b"abc")
    assert tensors.pack_bytes(b"abc", checked=False).checksum == 0


def nearest_bfloat16(bits: int) -> int:
    """The definition: of the two neighbours the nearer, of two equally near the even one."""
    below, rest = bits >> 16, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and below & 1)
    return below + up


@settings(deadline=None)
@given(float32_bits)
def test_bfloat16_rounds_to_the_nearest_even(bits: int) -> None:
    """Also at ties, at subnormals, and where rounding up reaches infinity. NaN stays NaN."""
    value = np.array([bits], np.uint32).view(np.float32)
    pattern = tensors.to_bfloat16(value)
    if np.isnan(value[0]):
        assert np.isnan(tensors.from_bfloat16(pattern)[0])
    else:
        assert int(pattern[0]) == nearest_bfloat16(bits)


def test_every_bfloat16_widens_and_comes_back() -> None:
    """All 65536 patterns: widening is exact, so narrowing again gives the pattern (NaNs: a NaN)."""
    patterns = np.arange(2**16, dtype=np.uint16)
    widened = tensors.from_bfloat16(patterns)
    assert np.array_equal(widened.view(np.uint32) >> 16, patterns)
    again = tensors.to_bfloat16(widened)
    nan = np.isnan(widened)
    assert np.array_equal(again[~nan], patterns[~nan])
    assert np.isnan(tensors.from_bfloat16(again[nan])).all()


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", np.uint16), ("float16", np.float16)])
def test_half_width_takes_half_the_bytes(dtype: tensors.WireDtype, stored: type) -> None:
    """float32 is narrowed on the way out and widened on arrival; what is stored so already passes as it is."""
    array = np.array([[1.0, -2.5], [0.15625, 1e30]], np.float32)
    spec, data = tensors.pack(array, dtype)
    assert spec.num_bytes == array.nbytes // 2
    back = tensors.unpack(spec, data)
    assert back.dtype == np.float32
    assert np.array_equal(back[0], array[0])
    kept = tensors.view(spec, data)
    assert kept.dtype == stored
    assert np.shares_memory(np.frombuffer(tensors.pack(kept, dtype)[1], np.uint8), kept)


def test_beyond_float16_lies_infinity() -> None:
    """Overflow is what IEEE says, without a warning."""
    spec, data = tensors.pack(np.array([1e6, -1e6], np.float32), "float16")
    assert tensors.unpack(spec, data).tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize(("dtype", "wire"), [(np.float64, "float32"), (np.int32, "bfloat16"), (np.float16, "float32")])
def test_other_arrays_are_refused(dtype: type, wire: tensors.WireDtype) -> None:
    """No silent conversion: the caller says what it means."""
    with pytest.raises(WireError, match=f"a {np.dtype(dtype).name} array can't be sent as {wire}"):
        tensors.pack(np.zeros(3, dtype), wire)


def test_a_tensor_over_the_limit_is_refused() -> None:
    """Before any byte of it is looked at (the array below is one element, seen many times)."""
    huge = np.broadcast_to(np.zeros(1, np.float16), (2**30,))
    with pytest.raises(WireError, match="too large to send"):
        tensors.pack(huge, "float16")

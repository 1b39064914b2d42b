"""Bytes that no sender of ours made: a valid message or a WireError comes out, nothing else ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import WireError
from swarm.wire.codec import MessageCodec
from tests.unit.wire.any_message import DOORS, any_message

doors = st.sampled_from(DOORS)
MANY = settings(max_examples=300, deadline=None)


def understood(door: MessageCodec[Any], frames: list[bytes]) -> bool:
    """Decode; what passes must be a message that the same door sends in the same way again."""
    try:
        message, payload = door.decode(frames)
    except WireError:
        return False
    again, _ = door.decode(door.encode(message, payload))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(message)  # NaN differs from itself, its bytes don't
    return True


@MANY
@given(doors, st.lists(st.binary(max_size=64), max_size=4))
def test_random_bytes(door: MessageCodec[Any], frames: list[bytes]) -> None:
    """Noise is refused."""
    assert not understood(door, frames)


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@MANY
@given(any_message, st.data())
def test_fields_of_any_type(sent: tuple[MessageCodec[Any], tuple[Any, bytes | None]], data: st.DataObject) -> None:
    """A valid header with one field replaced by anything that msgpack can say."""
    door, (message, payload) = sent
    fields = msgspec.msgpack.decode(door.verify_checksum(door.encode(message, payload)[0]))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(msgpack_values)
    understood(door, [door.add_checksum(msgspec.msgpack.encode(fields)), *([] if payload is None else [payload])])


@pytest.mark.slow
@MANY
@given(any_message, doors, st.data())
def test_mutated_frames(
    sent: tuple[MessageCodec[Any], tuple[Any, bytes | None]], other: MessageCodec[Any], data: st.DataObject
) -> None:
    """Valid frames with flipped bits, cut or stretched, dropped, doubled or knocking at another door."""
    door, (message, payload) = sent
    frames = [bytearray(frame) for frame in door.encode(message, payload)]
    for _ in range(data.draw(st.integers(1, 3))):
        data.draw(st.sampled_from(MUTATIONS))(frames, data)
    raw = [bytes(frame) for frame in frames]
    understood(door, raw)
    understood(other, raw)


def flip(frames: list[bytearray], data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(frames)) if frames else bytearray()
    if frame:
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))


def cut(frames: list[bytearray], data: st.DataObject) -> None:
    if frames:
        frame = data.draw(st.sampled_from(frames))
        start = data.draw(st.integers(0, len(frame)))
        del frame[start : start + data.draw(st.integers(1, 8))]


def insert(frames: list[bytearray], data: st.DataObject) -> None:
    if frames:
        frame = data.draw(st.sampled_from(frames))
        place = data.draw(st.integers(0, len(frame)))
        frame[place:place] = data.draw(st.binary(min_size=1, max_size=6))


def drop(frames: list[bytearray], data: st.DataObject) -> None:
    if frames:
        del frames[data.draw(st.integers(0, len(frames) - 1))]


def double(frames: list[bytearray], data: st.DataObject) -> None:
    if frames:
        frames.insert(0, bytearray(data.draw(st.sampled_from(frames))))


MUTATIONS = [flip, cut, insert, drop, double]

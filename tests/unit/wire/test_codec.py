"""Messages to frames and back: what fits comes back equal, what doesn't is refused by name."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import WireError
from swarm.wire import tensors
from swarm.wire.codec import CLIENT, DATA, HEARTBEAT, ORDER, SERVER, MessageCodec
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    MAX_HEADER_BYTES,
    AssetPart,
    Describe,
    Fence,
    Hop,
    LayerRange,
    PayloadSpec,
    Report,
    Row,
    Step,
    Submit,
    TensorSpec,
)
from tests.unit.wire.any_message import KINDS, messages_of

STEP = {"kind": "step", "v": 1, "epoch": 3, "step": 7, "rows": [], "tokens": []}


def header(**changes: object) -> bytes:
    """A valid step header with some fields changed; None leaves a field out."""
    return sealed({key: value for key, value in (STEP | changes).items() if value is not None})


def sealed(fields: dict[str, object]) -> bytes:
    """Anything that msgpack can say, as a frame of the data door."""
    return DATA.add_checksum(msgspec.msgpack.encode(fields))


def step_with_tensor() -> tuple[Step, memoryview]:
    spec, data = tensors.pack(np.ones((3, 4), np.float32))
    rows = (Row(1, 5, 1, True), Row(2, 0, 2, False))
    return Step(epoch=3, step=7, rows=rows, tokens=(9, 8, 7), tensor=spec), data


@pytest.mark.slow
@pytest.mark.parametrize(("door", "struct"), KINDS, ids=[f"{door.name}-{struct.__name__}" for door, struct in KINDS])
def test_every_kind_comes_back_equal(door: MessageCodec[Any], struct: type[Any]) -> None:
    """What is encoded is decoded to an equal message and the same payload, for every kind of every door."""

    @settings(max_examples=15, deadline=None)
    @given(messages_of(struct))
    def comes_back(pair: tuple[Any, bytes | None]) -> None:
        message, payload = pair
        decoded, received = door.decode(door.encode(message, payload))
        assert decoded == message
        assert received == payload

    comes_back()


def test_the_payload_is_not_copied() -> None:
    """The frame that is sent is the caller's buffer, and the array that arrives lies in the frame."""
    step, data = step_with_tensor()
    frames = DATA.encode(step, data)
    assert frames[1] is data
    arrived = bytearray(data)
    decoded, payload = DATA.decode([frames[0], arrived])
    assert decoded.tensor is not None
    assert payload is not None
    assert np.shares_memory(tensors.unpack(decoded.tensor, payload), np.frombuffer(arrived, np.float32))


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "one or two frames, not 0"),
        ([b"", b"", b""], "one or two frames, not 3"),
        ([b""], "the header's checksum does not fit the 0 bytes that came"),
        ([b"\xc1"], "the header's checksum does not fit the 0 bytes that came"),
        ([DATA.add_checksum(b"")], "no message: Input data was truncated"),
        ([DATA.add_checksum(b"\xc1")], "no message: MessagePack data is malformed"),
        ([DATA.add_checksum(b"\x93\x01\x02\x03")], "no message: Expected `object`, got `array`"),
        (
            [DATA.add_checksum(bytes(DATA.verify_checksum(header())) + b"\x00")],
            "no message: MessagePack data is malformed: trailing",
        ),
        ([DATA.add_checksum(bytes(DATA.verify_checksum(header()))[:-1])], "truncated"),
        ([header()[:-1]], "the header's checksum does not fit"),
        ([header(v=70)], "protocol version 70 is not supported here, only 1 and 2"),
        ([header(v=None)], "step: Object missing required field `v`"),
        ([header(v="1")], "step.v: Expected `int`, got `str`"),
        ([header(kind="leap")], "kind: 'leap' is not allowed on the data channel"),
        ([header(kind="beat")], "kind: 'beat' is not allowed on the data channel"),
        ([header(kind=None)], "Object missing required field `kind`"),
        ([header(tokens=None)], "step: Object missing required field `tokens`"),
        ([header(extra=1)], "step: Object contains unknown field `extra`"),
        ([header(epoch=-1)], "step.epoch: Expected `int` >= 0"),
        ([header(epoch=2**63)], "step.epoch: Expected `int` <= 9223372036854775807"),
        ([header(epoch=1.5)], "step.epoch: Expected `int`, got `float`"),
        ([header(tokens=[1, "2"])], "step.tokens[1]: Expected `int`, got `str`"),
        ([header(rows=[[1, 0, 1]])], "step.rows[0]: Expected `array` of at least length 4, got 3"),
        ([header(rows=[[1, 0, 1, True, 5]])], "step.rows[0]: Expected `array` of at most length 4, got 5"),
        ([header(rows=[[1, 0, 1, True], [1, 0, 0, True]])], "step.rows[1].count: Expected `int` >= 1"),
        ([header(hops=[["w", [0, -1], 0.0, 0.0, 0.0, 0.0, 0]])], "step.hops[0].layers.stop: Expected `int` >= 0"),
        ([header(hops=[["w", [0, 1], float("nan"), 0.0, 0.0, 0.0, 0]])], "step.hops[0].wait_s: Expected `float` >= 0"),
        ([header(open=[[1, {"top_z": 1}, 0, 1, 9, []]])], "step.open[0].params: Object contains unknown field `top_z`"),
        ([header(open=[[1, {"stop": ["a", 3]}, 0, 1, 9, []]])], "step.open[0].params.stop[1]: Expected `str`"),
        ([header(open=[[1, {"logit_bias": {-1: 0.0}}, 0, 1, 9, []]])], "a key of step.open[0].params.logit_bias: Exp"),
        ([header(tensor=["float64", [0, 4], 0, 0])], "step.tensor.dtype: Invalid enum value 'float64'"),
        ([header(tensor=["float32", [0, 4], 2**31, 0])], "step.tensor.num_bytes: Expected `int` <= 1073741824"),
        ([header(tensor=["float32", [0] * 5, 0, 0])], "step.tensor.shape: Expected `array` of length <= 4"),
        ([header(tokens=[4])], "step.tokens: the rows count 0 positions, but 1 token ids came"),
        ([header(), b""], "step: a second frame came, but no field describes it"),
        ([header(tensor=["float32", [0, 4], 0, 0])], "step.tensor: the frame that it describes is missing"),
        ([header(tensor=["float32", [1, 4], 16, 0]), bytes(16)], "step.tensor.shape: [1, 4] is not [0, hidden size]"),
        ([header(tensor=["float32", [0], 0, 0]), b""], "step.tensor.shape: [0] is not [0, hidden size]"),
        (
            [header(tensor=["float32", [0, 4], 16, 0]), bytes(16)],
            "step.tensor.num_bytes: its shape has 0 bytes, not 16",
        ),
        ([header(tensor=["float32", [0, 4], 0, 0]), b"x"], "step.tensor: a frame of 0 bytes was announced, 1 came"),
    ],
)
def test_refusals_name_the_field(frames: list[bytes], says: str) -> None:
    """Whatever is wrong with a message is said in one sentence that names the field."""
    with pytest.raises(WireError) as refusal:
        DATA.decode(frames)
    assert says in str(refusal.value)


@pytest.mark.slow
def test_any_changed_bit_of_a_header_is_found() -> None:
    """A header with one bit changed would often be understood, as another step: it is refused, whichever bit it is."""
    frame = bytearray(DATA.encode(step_with_tensor()[0], step_with_tensor()[1])[0])
    understood = 0
    for place in range(len(frame) * 8):
        frame[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError, match="the header's checksum does not fit"):
            DATA.decode([bytes(frame), step_with_tensor()[1]])
        try:
            DATA._decode_header(memoryview(frame)[:-8])  # without the seal
            understood += 1
        except WireError:
            pass
        frame[place // 8] ^= 1 << place % 8
    assert understood > 50, "the seal is what finds them"


def test_another_version_is_named_even_when_nothing_else_fits() -> None:
    """A peer of another version must learn that it is the version, not the fields that this version lacks."""
    frame = sealed({"kind": ["anything"], "v": 7, "rows": "none"})
    with pytest.raises(WireError, match="protocol version 7"):
        DATA.decode([frame])


def test_a_changed_bit_in_the_tensor_is_found() -> None:
    """With a checksum, any changed bit is refused; without one it passes."""
    step, data = step_with_tensor()
    spoiled = bytearray(data)
    spoiled[5] ^= 0x10
    with pytest.raises(WireError, match="checksum"):
        DATA.decode([DATA.encode(step, data)[0], spoiled])
    unchecked = msgspec.structs.replace(step, tensor=msgspec.structs.replace(step.tensor, checksum=0))
    assert DATA.decode([DATA.encode(unchecked, data)[0], spoiled])[1] == spoiled


def test_a_changed_bit_in_an_asset_is_found() -> None:
    """Raw payloads are checked like tensors."""
    part = AssetPart(name="tokenizer.json", offset=0, total=3, payload=tensors.pack_bytes(b"abc"))
    with pytest.raises(WireError, match="checksum"):
        SERVER.decode([SERVER.encode(part, b"abc")[0], b"abd"])


@pytest.mark.parametrize("field", ["tensor", "payload"])
def test_a_frame_of_another_length_is_refused_before_it_is_read(field: str) -> None:
    """Lengths are compared before the checksum, so a huge frame costs nothing."""
    if field == "tensor":
        step, data = step_with_tensor()
        door: MessageCodec[Any] = DATA
        frames = DATA.encode(step, data)
    else:
        part = AssetPart(name="a", offset=0, total=3, payload=tensors.pack_bytes(b"abc"))
        door = SERVER
        frames = SERVER.encode(part, b"abc")
    with pytest.raises(WireError, match=f"{field}: a frame of .* bytes was announced"):
        door.decode([frames[0], bytes(frames[1]) + b"x"])


def test_headers_over_the_limit_are_not_even_looked_at() -> None:
    """The size comes first: what is too long is refused whatever it says."""
    with pytest.raises(WireError, match=f"the header has {MAX_HEADER_BYTES + 1} bytes"):
        DATA.decode([bytes(MAX_HEADER_BYTES + 1)])
    with pytest.raises(WireError, match="the limit of the beat channel is 4096"):
        HEARTBEAT.decode([bytes(4097)])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Fence(epoch=2**64), "Fence can't be encoded"),
        (Fence(epoch=2**63), "fence.epoch: Expected `int` <= "),
        (Fence(epoch=-1), "fence.epoch: Expected `int` >= 0"),
        (Fence(epoch="a"), "fence.epoch: Expected `int`, got `str`"),  # type: ignore[arg-type]
        (Describe(), "kind: 'describe' is not allowed on the order channel"),
    ],
)
def test_what_no_peer_would_accept_is_not_sent(message: Any, says: str) -> None:
    """Bounds, types and doors hold for the sender too, with the same words."""
    with pytest.raises(WireError) as refusal:
        ORDER.encode(message)
    assert says in str(refusal.value)


def test_what_can_not_be_written_is_refused_on_the_data_door_too() -> None:
    """There the receiver checks the fields; what msgpack can't take stops at the sender all the same."""
    with pytest.raises(WireError, match="Step can't be encoded"):
        DATA.encode(Step(epoch=2**64, step=1, rows=(), tokens=()))
    many = (Hop("w" * 100, LayerRange(0, 1), 0.0, 0.0, 0.0, 0.0, 0),) * 200_000
    with pytest.raises(WireError, match="the limit of the data channel is"):
        DATA.encode(Step(step=1, rows=(), tokens=(), hops=many))


def test_refusals_stay_short() -> None:
    """A refusal quotes what came, but never more than fits an answer."""
    for frame in (header(kind="k" * 10**6), header(**{"f" * 10**6: 1}), header(rows=[[1, 0, 1, "x" * 10**6]])):
        with pytest.raises(WireError) as refusal:
            DATA.decode([frame])
        assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    "body", [{"a": object()}, {"a": 2**64}, {"a": "\ud800"}, {1: 2}], ids=["object", "long", "surrogate", "key"]
)
def test_reports_of_things_that_are_not_json_are_refused(body: Any) -> None:
    """A free-form body is checked like everything else."""
    with pytest.raises(WireError):
        SERVER.encode(Report(what="status", ok=True, body=body))


def test_a_report_that_contains_itself_is_refused() -> None:
    """Endless nesting ends with the codec's own error."""
    body: dict[str, object] = {}
    body["me"] = body
    with pytest.raises(WireError, match="recursion"):
        SERVER.encode(Report(what="status", ok=True, body=body))


def test_a_payload_that_the_message_does_not_describe_is_not_sent() -> None:
    """A sender can't mix up payload and header."""
    part = AssetPart(name="a", offset=0, total=3, payload=tensors.pack_bytes(b"abc"))
    with pytest.raises(WireError, match="announced"):
        SERVER.encode(part, b"abcd")
    with pytest.raises(WireError, match="missing"):
        SERVER.encode(part)
    with pytest.raises(WireError, match="no field describes it"):
        CLIENT.encode(Describe(), b"x")


def test_a_prompt_at_the_limit_fits() -> None:
    """The header's bound is no obstacle to the longest prompt that the messages allow."""
    submit = Submit(request_id="r", prompt=(2**31 - 1,) * 2**20, params=_params(), seed=1)
    assert CLIENT.decode(CLIENT.encode(submit))[0] == submit


def test_limits_for_the_sockets() -> None:
    """The largest legal frame of a door passes the bound that its socket gets."""
    assert SERVER.frame_limit_bytes >= max(MAX_HEADER_BYTES, ASSET_PART_BYTES)
    assert DATA.frame_limit_bytes >= msgspec.inspect.type_info(TensorSpec).fields[2].type.le  # type: ignore[attr-defined]
    assert PayloadSpec.__struct_fields__ == ("num_bytes", "checksum")


# A place where an array, map, string or binary may stand, and what declares an absurd number of elements there.
PLACES = {
    "map": b"",
    "tokens": b"\x83\xa1v\x01\xa4kind\xa4step\xa6tokens",
    "rows": b"\x83\xa1v\x01\xa4kind\xa4step\xa4rows",
    "unknown": b"\x83\xa1v\x01\xa4kind\xa4step\xa4what",
    "body": b"\x83\xa1v\x01\xa4kind\xa6report\xa4body\x81\xa1a",
    "standby": b"\x83\xa1v\x01\xa4kind\xa7prepare\xa7standby",
}
ABSURD = [head + length for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6") for length in (b"\xff" * 4, b"\x00\x10\0\0")]


def peak_of_refusal(door: MessageCodec[Any], frame: bytes) -> int:
    """Decode, which must fail, and return how much Python memory that took at the most."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            door.decode([frame])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("door", [DATA, SERVER, ORDER], ids=lambda door: door.name)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("absurd", ABSURD, ids=bytes.hex)
def test_a_declared_length_allocates_nothing(door: MessageCodec[Any], place: str, absurd: bytes) -> None:
    """A header that declares millions of elements that are not there is refused without room being made for them."""
    assert peak_of_refusal(door, PLACES[place] + absurd) < 64_000


def test_lengths_that_nest_allocate_nothing() -> None:
    """Nor do 900 arrays in each other that each declare almost as many elements as there are bytes."""
    nested = PLACES["body"] + (b"\xdd" + (7_000_000).to_bytes(4, "big")) * 900 + b"\xc0" * 7_900_000
    assert peak_of_refusal(SERVER, nested) < 1_000_000


@given(depth=st.integers(1000, 200_000), head=st.sampled_from([b"\x91", b"\x81\xa1a"]))
@settings(max_examples=10, deadline=None)
def test_depth_is_bounded(depth: int, head: bytes) -> None:
    """Deep nesting ends with the codec's own error, not with the stack."""
    with pytest.raises(WireError):
        SERVER.decode([PLACES["body"] + head * depth + b"\xc0"])


def _params() -> Any:
    from swarm.params import SamplingParams

    return SamplingParams()

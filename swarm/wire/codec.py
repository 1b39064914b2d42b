"""Messages <-> frames. What arrives is either a valid message or a :class:`WireError` that names what is wrong.

    frames = DATA.encode(step, data)             # [header] or [header, payload]
    step, data = DATA.decode(frames)             # checked: version, kind, fields, types, bounds, lengths, checksum

A *door* is one direction between two kinds of process; it lets through only its own messages. Both ends check the
same things, so that a mistake shows at the sender, with its story, and not at a peer that can only drop the message.
The data door is the exception: what stages hand on is checked by the receiver alone.

Between processes of the swarm a header is *sealed*: the last eight bytes of its frame are the xxh3 of the others. A bit
that changed on the way would else be another token, position or epoch, and nobody would notice.

Decoding walks a header twice. The first pass builds nothing; it finds the version and trips over every length that
is longer than what came, so that the second pass never reserves memory for elements that don't exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Generic, TypeVar, cast, get_args

import msgspec
from msgspec import inspect

from swarm.errors import ForeignMessage, WireError
from swarm.wire import tensors
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    PROTOCOL_VERSION,
    Beat,
    ClientMessage,
    DataMessage,
    Message,
    Order,
    PayloadSpec,
    ServerMessage,
    Step,
    TensorSpec,
    WorkerMessage,
)
from swarm.wire.tensors import Bytes
from swarm.wire.versions import VERSIONS, as_of

M = TypeVar("M", bound=Message)
SEAL_BYTES: Final = 8


def _structs(union: object) -> tuple[type[Message], ...]:
    return get_args(union) or (cast("type[Message]", union),)


class _Envelope(msgspec.Struct):
    """The one field that every version of the protocol has."""

    v: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(_Envelope)

# All that msgspec raises for some bytes or other; UnicodeDecodeError is a ValueError, like msgspec's own errors.
# MemoryError: a header within the limit may still unfold into more objects than this machine has room for.
_UNREADABLE = (ValueError, OverflowError, RecursionError, MemoryError)
_UNWRITABLE = (ValueError, TypeError, OverflowError, RecursionError)


def _refuse_extension(code: int, _data: memoryview) -> object:
    raise ValueError(f"msgpack extension {code} has no meaning here")


class Door(Generic[M]):
    """Encodes and decodes one union of messages. Raises WireError and nothing else, whatever the bytes are.

    ``limit_bytes`` bounds the header, ``frame_limit_bytes`` any frame: the socket behind the door refuses more.
    """

    def __init__(
        self,
        name: str,
        union: object,
        limit_bytes: int,
        payload_limit_bytes: int = 0,
        *,
        strict: bool = True,
        sealed: bool = False,
    ) -> None:
        self.name = name
        self.sealed = sealed
        self._strict = strict
        self.limit_bytes = limit_bytes
        self.frame_limit_bytes = max(limit_bytes, payload_limit_bytes)
        self.structs = _structs(union)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            cast("type[M]", union), ext_hook=_refuse_extension
        )

    def encode(self, message: M, payload: Bytes | None = None, *, version: int = PROTOCOL_VERSION) -> list[Bytes]:
        """The frames of a message. ``payload`` is what its ``tensor`` or ``payload`` field describes; it is not copied
        and its checksum is not computed again. ``version``: the newest that the peer understands."""
        try:
            header = _ENCODER.encode(message)
        except _UNWRITABLE as error:
            raise WireError(f"{type(message).__name__} can't be encoded: {error}") from None
        if self._strict:
            self._decode_header(header)
            _check_payload(message, payload)
        if version < PROTOCOL_VERSION:
            header = as_of(version, _kind(message), header)
        frame = self.seal(header)
        self._check_length(frame)
        return [frame] if payload is None else [frame, payload]

    def seal(self, header: bytes) -> bytes:
        """The header's frame: with its checksum where the door's headers are sealed."""
        return header + tensors.checksum(header).to_bytes(SEAL_BYTES, "little") if self.sealed else header

    def unseal(self, frame: Bytes) -> Bytes:
        """The header in its frame. Raises WireError if it is not what was sealed."""
        if not self.sealed:
            return frame
        view = memoryview(frame)
        header, seal = view[:-SEAL_BYTES], view[-SEAL_BYTES:]
        if tensors.checksum(header) != int.from_bytes(seal, "little"):
            raise WireError(f"the header's checksum does not fit the {len(header)} bytes that came")
        return header

    def decode(self, frames: Sequence[Bytes]) -> tuple[M, memoryview | None]:
        """The message and the bytes that its ``tensor`` or ``payload`` field describes (None if there is no such)."""
        if not 1 <= len(frames) <= 2:
            raise WireError(f"a message has one or two frames, not {len(frames)}")
        self._check_length(frames[0])
        message = self._decode_header(self.unseal(frames[0]))
        payload = memoryview(frames[1]) if len(frames) == 2 else None
        spec = _check_payload(message, payload)
        if payload is not None and spec is not None and spec.checksum and tensors.checksum(payload) != spec.checksum:
            raise WireError(f"{_kind(message)}: the checksum does not fit the {spec.num_bytes} bytes that came")
        return message, payload

    def _check_length(self, frame: Bytes) -> None:
        if len(frame) > self.limit_bytes:
            raise WireError(f"the header has {len(frame)} bytes, the {self.name} door takes {self.limit_bytes}")

    def _decode_header(self, header: Bytes) -> M:
        try:
            version = _ENVELOPE.decode(header).v
            if version not in VERSIONS:
                raise ForeignMessage(f"protocol version {version} is not spoken here, only {_spoken()}")
            return self._decoder.decode(header)
        except _UNREADABLE as error:
            raise ForeignMessage(self._explain(error, _peek_kind(header))) from None

    def _explain(self, error: Exception, kind: object) -> str:
        """msgspec's complaint with the message's kind and the field's name in front: ``step.rows[3].count: …``."""
        complaint, _, place = str(error)[:500].partition(" - at ")  # it may quote what came
        struct = next((struct for struct in self.structs if struct.__struct_config__.tag == kind), None)
        if struct is None:
            return (
                f"kind: {str(kind)[:64]!r} does not pass the {self.name} door" if kind else f"no message: {complaint}"
            )
        keyed = "a key of " if place.startswith("`key` in ") else ""
        return f"{keyed}{kind}{_named(place, inspect.type_info(struct))}: {complaint}"


# What clients may send, and what they get. A prompt at its limit makes a header of 5 MB, so there is no smaller bound.
CLIENT: Final[Door[ClientMessage]] = Door("client", ClientMessage, MAX_HEADER_BYTES)
SERVER: Final[Door[ServerMessage]] = Door("server", ServerMessage, MAX_HEADER_BYTES, ASSET_PART_BYTES)
# What workers report, and what they are told.
WORKER: Final[Door[WorkerMessage]] = Door("worker", WorkerMessage, MAX_HEADER_BYTES, ASSET_PART_BYTES, sealed=True)
ORDER: Final[Door[Order]] = Door("order", Order, MAX_HEADER_BYTES, sealed=True)
BEAT: Final[Door[Beat]] = Door("beat", Beat, 4096, sealed=True)  # one small struct of numbers and two names
# What stages hand on. The sender's check would be a tenth of an 8 KB hop, and only our own cores make these.
DATA: Final[Door[DataMessage]] = Door(
    "data", DataMessage, MAX_HEADER_BYTES, MAX_TENSOR_BYTES, strict=False, sealed=True
)


def _spoken() -> str:
    return " and ".join(map(str, VERSIONS))


def _check_payload(message: Message, payload: Bytes | None) -> TensorSpec | PayloadSpec | None:
    """Does the second frame have the length that the header says, and does the header agree with itself?"""
    if type(message) is Step:
        _check_step(message)
    field = _PAYLOAD_FIELDS.get(type(message))
    spec: TensorSpec | PayloadSpec | None = getattr(message, field) if field else None
    if spec is None and payload is None:
        return None
    if spec is None:
        raise WireError(f"{_kind(message)}: a second frame came, but no field describes it")
    if payload is None:
        raise WireError(f"{_kind(message)}.{field}: the frame that it describes is missing")
    described = tensors.num_bytes(spec) if type(spec) is TensorSpec else spec.num_bytes
    if described != spec.num_bytes:
        raise WireError(f"{_kind(message)}.{field}.num_bytes: its shape has {described} bytes, not {spec.num_bytes}")
    if len(payload) != described:
        raise WireError(f"{_kind(message)}.{field}: a frame of {described} bytes was announced, {len(payload)} came")
    return spec


def _check_step(step: Step) -> None:
    num_tokens = len(step.tokens)
    counted = 0
    for row in step.rows:
        counted += row.count
    if counted != num_tokens:
        raise WireError(f"step.tokens: the rows count {counted} positions, but {num_tokens} token ids came")
    shape = (num_tokens, 0) if step.tensor is None else step.tensor.shape
    if len(shape) != 2 or shape[0] != num_tokens:
        raise WireError(f"step.tensor.shape: {list(shape)} is not [{num_tokens}, hidden size]")


def _kind(message: Message) -> str:
    return str(message.__struct_config__.tag)


# Which field of a message describes its second frame.
_PAYLOAD_FIELDS: Final = {
    struct: field
    for door in (CLIENT, SERVER, WORKER, ORDER, BEAT, DATA)
    for struct in door.structs
    for field in ("tensor", "payload")
    if field in struct.__struct_fields__
}


class _Kind(msgspec.Struct):
    kind: str = ""


def _peek_kind(header: Bytes) -> str:
    try:
        return msgspec.msgpack.decode(header, type=_Kind).kind
    except _UNREADABLE:
        return ""


def _named(place: str, shape: inspect.Type) -> str:
    """msgspec's path with the numbers of array-like records replaced by their fields: ``$.rows[3][2]`` is
    ``.rows[3].count``."""
    path = ""
    for part in re.findall(r"\.\w+|\[[^]]*\]", place):
        shape = _present(shape)
        if isinstance(shape, inspect.StructType) and (field := _field(shape, part)):
            path, shape = f"{path}.{field.name}", field.type
        else:
            path, shape = path + part, getattr(shape, "item_type", getattr(shape, "value_type", inspect.AnyType()))
    return path


def _field(shape: inspect.StructType, part: str) -> inspect.Field | None:
    """Find the field that ``.name`` or ``[number]`` means."""
    if part[0] == ".":
        return next((field for field in shape.fields if field.encode_name == part[1:]), None)
    return next((field for index, field in enumerate(shape.fields) if part == f"[{index}]"), None)


def _present(shape: inspect.Type) -> inspect.Type:
    """Take X of ``X | None``. (No other unions stand inside messages.)"""
    if isinstance(shape, inspect.UnionType):
        return next(kind for kind in shape.types if not isinstance(kind, inspect.NoneType))
    return shape

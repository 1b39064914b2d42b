"""Encoding and decoding of messages. Input that is not a valid message raises a WireError that names the fault.

    frames = DATA.encode(step, data)             # [header] or [header, payload]
    step, data = DATA.decode(frames)             # checked: version, kind, fields, types, bounds, lengths, checksum

A *codec* serves one direction between two kinds of process and accepts only the messages of that direction. Both ends
run the same checks, so that a mistake shows at the sender, with its stack trace, and not at a peer that can only drop
the message. The data codec is the exception: only the receiver checks what stages send each other.

Between processes of the swarm a header carries a *checksum*: the last eight bytes of its frame are the xxh3 of the
others. Without it, a flipped bit would silently become another token, position or epoch.

Decoding walks a header twice. The first pass builds nothing: it finds the version and rejects every length that exceeds
the received bytes, so that the second pass never reserves memory for elements that don't exist.
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
    ClientMessage,
    DataMessage,
    Heartbeat,
    Message,
    Order,
    PayloadSpec,
    ServerMessage,
    Step,
    TensorSpec,
    WorkerMessage,
)
from swarm.wire.tensors import Bytes
from swarm.wire.versions import VERSIONS, downgrade_header

M = TypeVar("M", bound=Message)
CHECKSUM_BYTES: Final = 8  # Length of the checksum at the end of a header.


def _struct_types(union: object) -> tuple[type[Message], ...]:
    return get_args(union) or (cast("type[Message]", union),)


class _Envelope(msgspec.Struct):
    """The one field that every protocol version has."""

    v: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENVELOPE: Final = msgspec.msgpack.Decoder(_Envelope)

# Everything that msgspec raises for some input; UnicodeDecodeError is a ValueError, like msgspec's own errors.
# MemoryError: even a header within the size limit may unfold into more objects than this machine has memory for.
_DECODE_ERRORS = (ValueError, OverflowError, RecursionError, MemoryError)
_ENCODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)


def _reject_extension(code: int, _data: memoryview) -> object:
    raise ValueError(f"msgpack extension {code} has no meaning here")


class MessageCodec(Generic[M]):
    """Codec for one union of messages. Raises WireError and nothing else, for any input bytes.

    ``limit_bytes`` bounds the header, ``frame_limit_bytes`` any frame: the socket behind the codec rejects larger ones.
    """

    def __init__(
        self,
        name: str,
        union: object,
        limit_bytes: int,
        payload_limit_bytes: int = 0,
        *,
        strict: bool = True,
        has_checksum: bool = False,
    ) -> None:
        self.name = name
        self.has_checksum = has_checksum  # Whether headers carry a checksum.
        self._strict = strict  # Whether ``encode`` checks what it encodes.
        self.limit_bytes = limit_bytes
        self.frame_limit_bytes = max(limit_bytes, payload_limit_bytes)
        self.structs = _struct_types(union)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            cast("type[M]", union), ext_hook=_reject_extension
        )

    def encode(self, message: M, payload: Bytes | None = None, *, version: int = PROTOCOL_VERSION) -> list[Bytes]:
        """Return the frames of a message.

        ``payload`` holds the bytes that the message's ``tensor`` or ``payload`` field describes; it is not copied, and
        its checksum is not computed again. ``version``: the newest version that the peer understands.
        """
        try:
            header = _ENCODER.encode(message)
        except _ENCODE_ERRORS as error:
            raise WireError(f"{type(message).__name__} can't be encoded: {error}") from None
        if self._strict:
            self._decode_header(header)
            _check_payload(message, payload)
        if version < PROTOCOL_VERSION:
            header = downgrade_header(version, _kind(message), header)
        frame = self.add_checksum(header)
        self._check_length(frame)
        return [frame] if payload is None else [frame, payload]

    def add_checksum(self, header: bytes) -> bytes:
        """Return the header's frame: with a checksum appended if this codec uses one."""
        return header + tensors.checksum(header).to_bytes(CHECKSUM_BYTES, "little") if self.has_checksum else header

    def verify_checksum(self, frame: Bytes) -> Bytes:
        """Return the header without its checksum. Raises WireError if the checksum does not match."""
        if not self.has_checksum:
            return frame
        view = memoryview(frame)
        header, seal = view[:-CHECKSUM_BYTES], view[-CHECKSUM_BYTES:]
        if tensors.checksum(header) != int.from_bytes(seal, "little"):
            raise WireError(f"the header's checksum does not fit the {len(header)} bytes that came")
        return header

    def decode(self, frames: Sequence[Bytes]) -> tuple[M, memoryview | None]:
        """Return the message, and the bytes that its ``tensor`` or ``payload`` field describes (None without such a
        field)."""
        if not 1 <= len(frames) <= 2:
            raise WireError(f"a message has one or two frames, not {len(frames)}")
        self._check_length(frames[0])
        message = self._decode_header(self.verify_checksum(frames[0]))
        payload = memoryview(frames[1]) if len(frames) == 2 else None
        spec = _check_payload(message, payload)
        if payload is not None and spec is not None and spec.checksum and tensors.checksum(payload) != spec.checksum:
            raise WireError(f"{_kind(message)}: the checksum does not fit the {spec.num_bytes} bytes that came")
        return message, payload

    def _check_length(self, frame: Bytes) -> None:
        if len(frame) > self.limit_bytes:
            raise WireError(
                f"the header has {len(frame)} bytes, the limit of the {self.name} channel is {self.limit_bytes}"
            )

    def _decode_header(self, header: Bytes) -> M:
        try:
            version = _ENVELOPE.decode(header).v
            if version not in VERSIONS:
                raise ForeignMessage(f"protocol version {version} is not supported here, only {_supported_versions()}")
            return self._decoder.decode(header)
        except _DECODE_ERRORS as error:
            raise ForeignMessage(self._explain(error, _peek_kind(header))) from None

    def _explain(self, error: Exception, kind: object) -> str:
        """Return msgspec's error with the message's kind and field in front: ``step.rows[3].count: …``."""
        complaint, _, place = str(error)[:500].partition(" - at ")  # It may quote the input, so it is cut.
        struct = next((struct for struct in self.structs if struct.__struct_config__.tag == kind), None)
        if struct is None:
            return (
                f"kind: {str(kind)[:64]!r} is not allowed on the {self.name} channel"
                if kind
                else f"no message: {complaint}"
            )
        keyed = "a key of " if place.startswith("`key` in ") else ""
        return f"{keyed}{kind}{_field_path(place, inspect.type_info(struct))}: {complaint}"


# From clients to the broker, and back. A prompt of maximum length makes a header of 5 MB, so the bound can't be
# smaller.
CLIENT: Final[MessageCodec[ClientMessage]] = MessageCodec("client", ClientMessage, MAX_HEADER_BYTES)
SERVER: Final[MessageCodec[ServerMessage]] = MessageCodec("server", ServerMessage, MAX_HEADER_BYTES, ASSET_PART_BYTES)
# From workers to the broker, and back.
WORKER: Final[MessageCodec[WorkerMessage]] = MessageCodec(
    "worker", WorkerMessage, MAX_HEADER_BYTES, ASSET_PART_BYTES, has_checksum=True
)
ORDER: Final[MessageCodec[Order]] = MessageCodec("order", Order, MAX_HEADER_BYTES, has_checksum=True)
# One small struct of numbers and two names.
HEARTBEAT: Final[MessageCodec[Heartbeat]] = MessageCodec("beat", Heartbeat, 4096, has_checksum=True)
# Between stages. Checks at the sender would cost a tenth of an 8 KB hop, and only our own stages produce these
# messages.
DATA: Final[MessageCodec[DataMessage]] = MessageCodec(
    "data", DataMessage, MAX_HEADER_BYTES, MAX_TENSOR_BYTES, strict=False, has_checksum=True
)


def _supported_versions() -> str:
    return " and ".join(map(str, VERSIONS))


def _check_payload(message: Message, payload: Bytes | None) -> TensorSpec | PayloadSpec | None:
    """Check that the second frame has the length that the header announces, and that the header is consistent in
    itself."""
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


# The field of a message that describes its second frame.
_PAYLOAD_FIELDS: Final = {
    struct: field
    for door in (CLIENT, SERVER, WORKER, ORDER, HEARTBEAT, DATA)
    for struct in door.structs
    for field in ("tensor", "payload")
    if field in struct.__struct_fields__
}


class _Kind(msgspec.Struct):
    kind: str = ""


def _peek_kind(header: Bytes) -> str:
    try:
        return msgspec.msgpack.decode(header, type=_Kind).kind
    except _DECODE_ERRORS:
        return ""


def _field_path(place: str, shape: inspect.Type) -> str:
    """Return msgspec's path with the indices of array-like records replaced by field names: ``$.rows[3][2]`` becomes
    ``.rows[3].count``."""
    path = ""
    for part in re.findall(r"\.\w+|\[[^]]*\]", place):
        shape = _strip_none(shape)
        if isinstance(shape, inspect.StructType) and (field := _field(shape, part)):
            path, shape = f"{path}.{field.name}", field.type
        else:
            path, shape = path + part, getattr(shape, "item_type", getattr(shape, "value_type", inspect.AnyType()))
    return path


def _field(shape: inspect.StructType, part: str) -> inspect.Field | None:
    """Return the field that ``.name`` or ``[index]`` refers to."""
    if part[0] == ".":
        return next((field for field in shape.fields if field.encode_name == part[1:]), None)
    return next((field for index, field in enumerate(shape.fields) if part == f"[{index}]"), None)


def _strip_none(shape: inspect.Type) -> inspect.Type:
    """Return X for ``X | None``. (Messages contain no other unions.)"""
    if isinstance(shape, inspect.UnionType):
        return next(kind for kind in shape.types if not isinstance(kind, inspect.NoneType))
    return shape

"""ZMTP 3.0 decoder of one connection: bytes become whole messages, within limits.

It has no socket and no clock. ``ZmtpDecoder`` is fed with received bytes and returns messages one at a time, on demand:
a peer that sends a million of them gets no more turns than others. The number of frames of a message and their bytes
are limited, and a violation is rejected at the first byte that commits it, before anything is stored. (libzmq limits
only single frames and the message queue. It stores the frames of an endless message until memory is full, and delivers
a million frames as one message.)

The security mechanism (``server_handshake``) authenticates the peer before the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from swarm.errors import WireError
from swarm.wire.sockets import Frames
from swarm.wire.tensors import Bytes
from swarm.wire.transport.curve_session import OVERHEAD, CurveSession
from swarm.wire.transport.server_handshake import Mechanism

MAX_FRAMES: Final = 2  # Of a message: a header, and what it describes.
HANDSHAKE_BYTES: Final = 1024  # Of a handshake command; real ones are far shorter.
GREETING_BYTES: Final = 64
# Buffer for a large frame that an unauthenticated peer announces; it grows as bytes arrive.
_FIRST_BUFFER_BYTES: Final = 64 << 10
_MORE, _LONG, _COMMAND = 1, 2, 4  # Flags of a frame.
_LEAD: Final = -OVERHEAD % 64  # Aligns the content of encrypted frames to 64 bytes.
_EMPTY: Final = memoryview(b"")
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"


def encode_greeting(mechanism: bytes, *, is_server: bool = True) -> bytes:
    """Encode the greeting that both ends send first: version 3.0, the mechanism, and whether this end is the server."""
    asks = is_server and mechanism != b"NULL"
    return (_SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes([asks])).ljust(GREETING_BYTES, b"\0")


def command_frame(body: bytes) -> bytes:
    """Encode a command as a frame."""
    if len(body) > 255:
        return bytes([_COMMAND | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([_COMMAND, len(body)]) + body


def frame_header(size: int, *, more: bool) -> bytes:
    """Encode the header of a frame of this size."""
    if size > 255:
        return bytes([_LONG | more]) + size.to_bytes(8, "big")
    return bytes([more, size])


def encode_message(frames: Sequence[Bytes], session: CurveSession | None) -> list[Bytes]:
    """Encode a message, encrypted if there is a session: alternating frame headers and frames."""
    out: list[Bytes] = []
    for index, frame in enumerate(frames):
        more = index + 1 < len(frames)
        if session is None:
            out += (frame_header(len(frame), more=more), frame)
        else:
            sealed = session.encrypt(frame, more=more)
            out += (frame_header(len(sealed), more=False), sealed)
    return out


class ZmtpDecoder:
    """Decoder of one connection's input. Raises WireError when a peer violates a limit; stop reading from it then.

    ``identity`` is None until the handshake is complete, then the identity that the peer sent (possibly empty).
    ``answer``: bytes to send to the peer so that the handshake can continue.
    """

    __slots__ = (
        "_at",
        "_body",
        "_filled",
        "_flags",
        "_frames",
        "_greeted",
        "_length",
        "_limit_bytes",
        "_mechanism",
        "_rest",
        "_session",
        "answer",
        "identity",
    )

    def __init__(self, limit_bytes: int, mechanism: Mechanism) -> None:
        self.identity: bytes | None = None
        self.answer = b""
        self._limit_bytes = limit_bytes
        self._mechanism = mechanism
        self._session: CurveSession | None = None  # Decrypts frames after the handshake; None without CURVE.
        self._greeted = False
        self._rest, self._at = _EMPTY, 0  # Received bytes that are not decoded yet, and the offset in them.
        self._frames: Frames = []  # Of the message in progress.
        self._body: memoryview | None = None  # Buffer of the frame in progress; it may be shorter than the frame.
        self._filled = self._length = self._flags = 0  # Bytes of the frame received, its announced length, its flags.

    @property
    def num_held(self) -> int:
        """Return the bytes of the unfinished message."""
        body = 0 if self._body is None else len(self._body)
        return body + sum(map(len, self._frames)) + len(self._rest) - self._at

    @property
    def is_empty(self) -> bool:
        """Whether all received bytes have been delivered as messages."""
        return self._rest is _EMPTY and self._body is None and not self._frames

    @property
    def key(self) -> str:
        """Return the peer's authenticated public key; empty without CURVE."""
        return self._mechanism.key

    def encode(self, frames: Sequence[Bytes]) -> list[Bytes]:
        """Encode a message for the peer: alternating frame headers and frames."""
        return encode_message(frames, self._session)

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proven that it is authorized. Then buffers of the announced sizes are allocated right
        away."""
        return self._mechanism.authenticates and self.identity is not None

    # --- receiving ---------------------------------------------------------------------------------------------------

    def recv_buffer(self) -> memoryview | None:
        """Return the buffer for the next bytes if most of a large frame is missing; call ``commit`` after reading into
        it.

        None: read elsewhere and ``feed`` the bytes.
        """
        body = self._body
        if body is None or self._length - self._filled < _FIRST_BUFFER_BYTES:
            return None
        if self._filled == len(body):
            body = self._body = self._grow(body)
        return body[self._filled :]

    def commit(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def feed(self, data: Bytes) -> None:
        """Add received bytes, which must stay unchanged until ``copy_unread``. Call it only when ``next`` has returned
        None."""
        if self._at < len(self._rest):
            data = bytes(self._rest[self._at :]) + bytes(data)
        self._rest, self._at = memoryview(data), 0

    def copy_unread(self) -> None:
        """Copy the bytes that are not decoded yet, because the buffer they were fed from is about to be reused."""
        if self._rest is not _EMPTY:
            self._rest, self._at = memoryview(bytes(self._rest[self._at :])), 0

    # --- decoding ----------------------------------------------------------------------------------------------------

    def advance_handshake(self) -> bool:
        """Decode the handshake, but no message. Return whether it is complete."""
        while self.identity is None:
            if self._greeted:
                if not self._has_frame():
                    return False
                self._handle_command()
            elif not self._read_greeting():
                return False
        return True

    def next(self) -> Frames | None:
        """Return the next whole message; None until more has arrived."""
        if self.identity is None and not self.advance_handshake():
            return None
        while self._has_frame():
            assert self._body is not None
            frame, more, self._body = self._body, bool(self._flags & _MORE), None
            if self._session is not None:
                frame, more = self._session.decrypt(frame)
                if more and len(self._frames) + 1 >= MAX_FRAMES:
                    raise WireError(f"a message has at most {MAX_FRAMES} frames, more were announced")
            self._frames.append(frame)
            if not more:
                if self._at == len(self._rest):
                    self._rest, self._at = _EMPTY, 0
                message, self._frames = self._frames, []
                return message
        return None

    def _has_frame(self) -> bool:
        """Whether the frame in progress is complete."""
        return (self._body is not None or self._begin_frame()) and (self._filled == self._length or self._fill())

    def _handle_command(self) -> None:
        assert self._body is not None
        command, self._body = bytes(self._body), None
        reply = self._mechanism.handle(command)
        if reply.command:
            self.answer += command_frame(reply.command)
        if reply.refused:
            raise WireError(reply.refused)
        if self._mechanism.metadata is not None:
            self.identity = self._mechanism.metadata.get(b"identity", b"")
            self._session = self._mechanism.session

    def _read_greeting(self) -> bool:
        """Decode the peer's greeting of 64 bytes. Rejects it at the first wrong byte: the peer may not speak ZMTP at
        all."""
        rest = bytes(self._rest[:GREETING_BYTES])
        if rest[:1] not in (b"", b"\xff") or rest[9:10] not in (b"", b"\x7f"):
            raise WireError("the peer does not use ZMTP")
        if len(rest) > 10 and rest[10] < 3:
            raise WireError(f"the peer uses ZMTP {rest[10]}, at least 3 is needed")
        if len(rest) < GREETING_BYTES:
            return False
        if (spoken := rest[12:32].rstrip(b"\0")) != self._mechanism.name:
            raise WireError(f"the mechanism {spoken!r} is not accepted here, only {self._mechanism.name.decode()}")
        self._greeted = True
        self._at = GREETING_BYTES
        return True

    def _begin_frame(self) -> bool:
        """Decode a frame header and allocate a buffer for the frame. Return False if the header is incomplete."""
        rest, at = self._rest, self._at
        left = len(rest) - at
        if left < 2:
            return False
        flags = rest[at]
        if flags & _LONG:
            if left < 9:
                return False
            length, at = int.from_bytes(rest[at + 1 : at + 9], "big"), at + 9
        else:
            length, at = rest[at + 1], at + 2
        self._check(flags, length)
        self._flags, self._length = flags, length
        end = at + length
        if end <= len(rest):  # The usual case: the whole frame arrived together with its header.
            self._body = self._allocate(length)
            self._body[:] = rest[at:end]
            self._filled, self._at = length, end
        else:
            self._body = self._allocate(
                length if self.is_authenticated else min(length, max(_FIRST_BUFFER_BYTES, len(rest) - at))
            )
            self._filled, self._at = 0, at
        return True

    def _check(self, flags: int, length: int) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND) or (self._session is not None and flags & _MORE):
            raise WireError(f"{flags:#x} are no frame's flags")
        if (flags & _COMMAND != 0) != (self.identity is None):
            raise WireError("a message came before the handshake" if self.identity is None else "a command came")
        if self.identity is None and (length > HANDSHAKE_BYTES or flags & _MORE):
            raise WireError(f"the handshake has {length} bytes, at most {HANDSHAKE_BYTES} are taken")
        if length > self._limit_bytes + (0 if self._session is None else OVERHEAD):
            raise WireError(f"a frame of {length} bytes was announced, the limit is {self._limit_bytes}")
        if flags & _MORE and len(self._frames) + 1 >= MAX_FRAMES:
            raise WireError(f"a message has at most {MAX_FRAMES} frames, more were announced")

    def _fill(self) -> bool:
        """Copy received bytes into the frame in progress. Return whether it is complete."""
        assert self._body is not None
        while (count := min(len(self._rest) - self._at, self._length - self._filled)) > 0:
            if self._filled == len(self._body):
                self._body = self._grow(self._body)
            count = min(count, len(self._body) - self._filled)
            self._body[self._filled : self._filled + count] = self._rest[self._at : self._at + count]
            self._filled += count
            self._at += count
        if self._at == len(self._rest):
            self._rest, self._at = _EMPTY, 0
        return self._filled == self._length

    def _grow(self, body: memoryview) -> memoryview:
        larger = self._allocate(min(self._length, 2 * len(body)))
        larger[: len(body)] = body
        return larger

    def _allocate(self, size: int) -> memoryview:
        """Allocate a buffer. Large ones are not initialised, so that announced bytes that never arrive use no memory.

        In encrypted frames the content is aligned, because it is decrypted in place.
        """
        lead = 0 if self._session is None else _LEAD
        room = (
            np.empty(lead + size, np.uint8).data if size > _FIRST_BUFFER_BYTES else memoryview(bytearray(lead + size))
        )
        return room[lead:] if lead else room

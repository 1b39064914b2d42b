"""ZMTP 3.0 as a listening end speaks it: one connection's bytes become whole messages, within bounds.

No socket and no clock. ``Inlet`` is fed what came and hands out messages one at a time, only when it is asked: so a
peer that sends a million of them at once gets no more turns than others. A message has so many frames, of so many bytes
each, and what oversteps that is refused at the first byte that does: nothing of it is kept. (libzmq bounds single
frames and whole messages only. It keeps the frames of a message that has no end until memory is full, and hands over a
million frames as one message.)

Whom it hears is for its mechanism to find out (``mechanisms``), before the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from swarm.errors import WireError
from swarm.wire.door.mechanisms import Mechanism
from swarm.wire.door.sealing import OVERHEAD, Session
from swarm.wire.sockets import Frames
from swarm.wire.tensors import Bytes

MOST_FRAMES: Final = 2  # of a message: a header, and what it describes
HANDSHAKE_BYTES: Final = 1024  # of a command; what peers say of themselves is far shorter
GREETING_BYTES: Final = 64
_FIRST_ROOM: Final = 64 << 10  # for a frame that a stranger announces; it grows with what comes
_MORE, _LONG, _COMMAND = 1, 2, 4
_LEAD: Final = -OVERHEAD % 64
_NOTHING: Final = memoryview(b"")
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes, *, listens: bool = True) -> bytes:
    """Encode what both ends say first: version 3.0, the mechanism, and who asks the other one for proof."""
    asks = listens and mechanism != b"NULL"
    return (_SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes([asks])).ljust(GREETING_BYTES, b"\0")


def as_command(body: bytes) -> bytes:
    """A command as it travels."""
    if len(body) > 255:
        return bytes([_COMMAND | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([_COMMAND, len(body)]) + body


def framed(size: int, *, more: bool) -> bytes:
    """Encode what stands before a frame of so many bytes."""
    if size > 255:
        return bytes([_LONG | more]) + size.to_bytes(8, "big")
    return bytes([more, size])


def written(frames: Sequence[Bytes], session: Session | None) -> list[Bytes]:
    """Encode a message, sealed in a session: what stands before each frame, and the frame."""
    out: list[Bytes] = []
    for index, frame in enumerate(frames):
        more = index + 1 < len(frames)
        if session is None:
            out += (framed(len(frame), more=more), frame)
        else:
            sealed = session.sealed(frame, more=more)
            out += (framed(len(sealed), more=False), sealed)
    return out


class Inlet:
    """What came over one connection. Raises WireError where a peer oversteps; no more is to be read from it then.

    ``identity`` is None until the handshake is through, then what the peer calls itself, maybe nothing. ``answer`` is
    what the peer must be told for the handshake to go on.
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
        self._session: Session | None = None  # of sealed frames, once the handshake is through
        self._greeted = False
        self._rest, self._at = _NOTHING, 0  # what came and is not taken yet
        self._frames: Frames = []  # of the message under way
        self._body: memoryview | None = None  # of the frame under way, as far as there is room for it
        self._filled = self._length = self._flags = 0

    @property
    def num_held(self) -> int:
        """Bytes of a message that isn't whole yet."""
        body = 0 if self._body is None else len(self._body)
        return body + sum(map(len, self._frames)) + len(self._rest) - self._at

    @property
    def is_empty(self) -> bool:
        """Has all that came been handed out?"""
        return self._rest is _NOTHING and self._body is None and not self._frames

    @property
    def key(self) -> str:
        """The public key that the peer has shown; empty at doors without a lock."""
        return self._mechanism.key

    def written(self, frames: Sequence[Bytes]) -> list[Bytes]:
        """The message as it travels to the peer: what stands before each frame, and the frame."""
        return written(frames, self._session)

    @property
    def is_believed(self) -> bool:
        """Has the peer proved that it may speak here? Then it is believed in what it announces."""
        return self._mechanism.proves and self.identity is not None

    # --- what came ---------------------------------------------------------------------------------------------------

    def room(self) -> memoryview | None:
        """Where the next bytes belong if most of a large frame is still to come; ``filled`` says how many came. None:
        ``feed`` them."""
        body = self._body
        if body is None or self._length - self._filled < _FIRST_ROOM:
            return None
        if self._filled == len(body):
            body = self._body = self._grown(body)
        return body[self._filled :]

    def filled(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def feed(self, data: Bytes) -> None:
        """More bytes, which must stay as they are until ``keep``. To be called only when ``next`` has found no whole
        message in those before."""
        if self._at < len(self._rest):
            data = bytes(self._rest[self._at :]) + bytes(data)
        self._rest, self._at = memoryview(data), 0

    def keep(self) -> None:
        """Copy what is not taken yet, for what was fed will change."""
        if self._rest is not _NOTHING:
            self._rest, self._at = memoryview(bytes(self._rest[self._at :])), 0

    # --- what is in it -----------------------------------------------------------------------------------------------

    def shake(self) -> bool:
        """Take what came of the handshake, and no message. Is it through?"""
        while self.identity is None:
            if self._greeted:
                if not self._has_frame():
                    return False
                self._take_command()
            elif not self._greet():
                return False
        return True

    def next(self) -> Frames | None:
        """The next whole message; None until more has come."""
        if self.identity is None and not self.shake():
            return None
        while self._has_frame():
            assert self._body is not None
            frame, more, self._body = self._body, bool(self._flags & _MORE), None
            if self._session is not None:
                frame, more = self._session.opened(frame)
                if more and len(self._frames) + 1 >= MOST_FRAMES:
                    raise WireError(f"a message has at most {MOST_FRAMES} frames, more were announced")
            self._frames.append(frame)
            if not more:
                if self._at == len(self._rest):
                    self._rest, self._at = _NOTHING, 0
                message, self._frames = self._frames, []
                return message
        return None

    def _has_frame(self) -> bool:
        """Is the frame under way whole?"""
        return (self._body is not None or self._begin_frame()) and (self._filled == self._length or self._fill())

    def _take_command(self) -> None:
        assert self._body is not None
        command, self._body = bytes(self._body), None
        reply = self._mechanism.take(command)
        if reply.command:
            self.answer += as_command(reply.command)
        if reply.refused:
            raise WireError(reply.refused)
        if self._mechanism.told is not None:
            self.identity = self._mechanism.told.get(b"identity", b"")
            self._session = self._mechanism.session

    def _greet(self) -> bool:
        """The first 64 bytes. What differs is refused as soon as it does: it may be no ZMTP at all."""
        rest = bytes(self._rest[:GREETING_BYTES])
        if rest[:1] not in (b"", b"\xff") or rest[9:10] not in (b"", b"\x7f"):
            raise WireError("no ZMTP was spoken")
        if len(rest) > 10 and rest[10] < 3:
            raise WireError(f"ZMTP {rest[10]} was spoken, at least 3 is needed")
        if len(rest) < GREETING_BYTES:
            return False
        if (spoken := rest[12:32].rstrip(b"\0")) != self._mechanism.name:
            raise WireError(f"the mechanism {spoken!r} is not spoken here, only {self._mechanism.name.decode()}")
        self._greeted = True
        self._at = GREETING_BYTES
        return True

    def _begin_frame(self) -> bool:
        """Read what stands before a frame, and make room for the frame. False: it is not there yet."""
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
        if end <= len(rest):  # it has come with what stands before it, as a rule
            self._body = self._room(length)
            self._body[:] = rest[at:end]
            self._filled, self._at = length, end
        else:
            self._body = self._room(length if self.is_believed else min(length, max(_FIRST_ROOM, len(rest) - at)))
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
            raise WireError(f"a frame of {length} bytes was announced, this door takes {self._limit_bytes}")
        if flags & _MORE and len(self._frames) + 1 >= MOST_FRAMES:
            raise WireError(f"a message has at most {MOST_FRAMES} frames, more were announced")

    def _fill(self) -> bool:
        """Move what came into the frame under way. Is it whole?"""
        assert self._body is not None
        while (count := min(len(self._rest) - self._at, self._length - self._filled)) > 0:
            if self._filled == len(self._body):
                self._body = self._grown(self._body)
            count = min(count, len(self._body) - self._filled)
            self._body[self._filled : self._filled + count] = self._rest[self._at : self._at + count]
            self._filled += count
            self._at += count
        if self._at == len(self._rest):
            self._rest, self._at = _NOTHING, 0
        return self._filled == self._length

    def _grown(self, body: memoryview) -> memoryview:
        larger = self._room(min(self._length, 2 * len(body)))
        larger[: len(body)] = body
        return larger

    def _room(self, size: int) -> memoryview:
        """Reserve memory without writing to it, if it is much: what is announced and never comes takes none. What is in
        a sealed frame begins at a round address when it is opened where it lies."""
        lead = 0 if self._session is None else _LEAD
        room = np.empty(lead + size, np.uint8).data if size > _FIRST_ROOM else memoryview(bytearray(lead + size))
        return room[lead:] if lead else room

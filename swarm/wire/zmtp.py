"""ZMTP 3.0 (mechanism NULL) as a listening end speaks it: one connection's bytes become whole messages, within bounds.

No socket and no clock. ``Inlet`` is fed what came and hands out messages one at a time, only when it is asked: so a
peer that sends a million of them at once gets no more turns than others. A message has so many frames, of so many bytes
each, and what oversteps that is refused at the first byte that does: nothing of it is kept. (libzmq bounds single
frames and whole messages only. It keeps the frames of a message that has no end until memory is full, and hands over a
million frames as one message.)

Where a door has a key, whoever knocks must name it in the handshake, as the beginning of its identity. Who doesn't has
no word heard. The key is part of the address that those are told who shall speak there: ``tcp://KEY@HOST:PORT``.
"""

from __future__ import annotations

import hmac
from typing import Final

import numpy as np

from swarm.errors import WireError
from swarm.wire.sockets import Frames

MOST_FRAMES: Final = 2  # of a message: a header, and what it describes
HANDSHAKE_BYTES: Final = 1024  # of a command; what peers say of themselves is far shorter
_GREETING_BYTES: Final = 64
_FIRST_ROOM: Final = 64 << 10  # for a frame that a stranger announces; it grows with what comes
_MORE, _LONG, _COMMAND = 1, 2, 4
_PEERS: Final = (b"DEALER", b"REQ", b"ROUTER")  # the kinds of socket that a ROUTER speaks with

_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(name: bytes, body: bytes) -> bytes:
    return bytes([_COMMAND, 1 + len(name) + len(body), len(name)]) + name + body


# What a listening end says first: version 3.0, no mechanism, and that it is a ROUTER.
WELCOME: Final = (
    _SIGNATURE
    + b"\x03\x00"
    + _MECHANISM
    + bytes(32)
    + _command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))
)


def framed(size: int, *, more: bool) -> bytes:
    """What stands before a frame of so many bytes."""
    if size > 255:
        return bytes([_LONG | more]) + size.to_bytes(8, "big")
    return bytes([more, size])


class Inlet:
    """What came over one connection. Raises WireError where a peer oversteps; no more is to be read from it then.

    ``identity`` is None until the handshake is through, then what the peer calls itself, maybe nothing.
    """

    __slots__ = (
        "_at",
        "_body",
        "_filled",
        "_flags",
        "_frames",
        "_greeted",
        "_key",
        "_length",
        "_limit_bytes",
        "_rest",
        "identity",
    )

    def __init__(self, limit_bytes: int, key: bytes = b"") -> None:
        self.identity: bytes | None = None
        self._limit_bytes = limit_bytes
        self._key = key
        self._greeted = False
        self._rest, self._at = b"", 0  # what came and is not taken yet
        self._frames: Frames = []  # of the message under way
        self._body: memoryview | None = None  # of the frame under way, as far as there is room for it
        self._filled = self._length = self._flags = 0

    @property
    def num_held(self) -> int:
        """Bytes of a message that isn't whole yet."""
        body = 0 if self._body is None else len(self._body)
        return body + sum(map(len, self._frames)) + len(self._rest) - self._at

    # --- what came ---------------------------------------------------------------------------------------------------

    def room(self) -> memoryview | None:
        """Where the next bytes belong if most of a large frame is still to come; ``filled`` says how many came. None:
        ``feed`` them."""
        body = self._body
        if body is None or self._length - self._filled < _FIRST_ROOM:
            return None
        if self._filled == len(body):
            body = self._body = _grown(body, min(self._length, 2 * len(body)))
        return body[self._filled :]

    def filled(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def feed(self, data: bytes) -> None:
        """More bytes. To be called only when ``next`` has found no whole message in those before."""
        self._rest, self._at = self._rest[self._at :] + data, 0

    # --- what is in it -----------------------------------------------------------------------------------------------

    def next(self) -> Frames | None:
        """The next whole message; None until more has come."""
        while True:
            if self._body is None and not (self._begin_frame() if self._greeted else self._greet()):
                return None
            if self._body is None:  # that was the greeting, or a frame that had come as a whole
                continue
            if not self._fill():
                return None
            if (message := self._end_frame()) is not None:
                return message

    def _greet(self) -> bool:
        """The first 64 bytes. What differs is refused as soon as it does: it may be no ZMTP at all."""
        rest = self._rest[:_GREETING_BYTES]
        if rest[:1] not in (b"", b"\xff") or rest[9:10] not in (b"", b"\x7f"):
            raise WireError("no ZMTP was spoken")
        if len(rest) > 10 and rest[10] < 3:
            raise WireError(f"ZMTP {rest[10]} was spoken, at least 3 is needed")
        if len(rest) < _GREETING_BYTES:
            return False
        if rest[12:32] != _MECHANISM:
            raise WireError(f"the mechanism {rest[12:32].rstrip(bytes(1))!r} is not spoken here, only NULL")
        self._greeted = True
        self._at = _GREETING_BYTES
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
        self._at = at
        self._flags, self._length, self._filled = flags, length, 0
        # Whoever has named the key is believed in what it announces.
        self._body = _room(length if self._key else min(length, max(_FIRST_ROOM, len(rest) - at)))
        return True

    def _check(self, flags: int, length: int) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise WireError(f"{flags:#x} are no frame's flags")
        if (flags & _COMMAND != 0) != (self.identity is None):
            raise WireError("a message came before the handshake" if self.identity is None else "a command came")
        if self.identity is None and (length > HANDSHAKE_BYTES or flags & _MORE):
            raise WireError(f"the handshake has {length} bytes, at most {HANDSHAKE_BYTES} are taken")
        if length > self._limit_bytes:
            raise WireError(f"a frame of {length} bytes was announced, this door takes {self._limit_bytes}")
        if flags & _MORE and len(self._frames) + 1 >= MOST_FRAMES:
            raise WireError(f"a message has at most {MOST_FRAMES} frames, more were announced")

    def _fill(self) -> bool:
        """Move what came into the frame under way. Is it whole?"""
        assert self._body is not None
        while (count := min(len(self._rest) - self._at, self._length - self._filled)) > 0:
            if self._filled == len(self._body):
                self._body = _grown(self._body, min(self._length, 2 * len(self._body)))
            count = min(count, len(self._body) - self._filled)
            self._body[self._filled : self._filled + count] = self._rest[self._at : self._at + count]
            self._filled += count
            self._at += count
        if self._at == len(self._rest):
            self._rest, self._at = b"", 0
        return self._filled == self._length

    def _end_frame(self) -> Frames | None:
        """The message, if this frame was its last."""
        assert self._body is not None
        body, self._body = self._body, None
        if self._flags & _COMMAND:
            self._introduced(bytes(body))
            return None
        self._frames.append(body)
        if self._flags & _MORE:
            return None
        message, self._frames = self._frames, []
        return message

    def _introduced(self, command: bytes) -> None:
        """The peer has said who it is."""
        if command[:6] != b"\x05READY":
            raise WireError("the handshake is no READY")
        told = _properties(command[6:])
        if told.get(b"socket-type", b"") not in _PEERS:
            raise WireError(f"a {told.get(b'socket-type', b'')!r} socket has nothing to say here")
        identity = told.get(b"identity", b"")
        if self._key and not hmac.compare_digest(identity[: len(self._key)], self._key):
            raise WireError("whoever knocks here must know the key")
        if len(identity) > 255:
            raise WireError(f"an identity of {len(identity)} bytes is too long")
        self.identity = identity


def _room(size: int) -> memoryview:
    """Not written to, so that what is announced and never comes takes no memory."""
    return np.empty(size, np.uint8).data if size > _FIRST_ROOM else memoryview(bytearray(size))


def _grown(body: memoryview, size: int) -> memoryview:
    larger = _room(size)
    larger[: len(body)] = body
    return larger


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Names, whose case does not matter, and values."""
    found, at = {}, 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_at = name_end + 4
        size = int.from_bytes(data[name_end:value_at], "big")
        if value_at + size > len(data):
            raise WireError("the handshake is cut short")
        found[data[at + 1 : name_end].lower()] = data[value_at : value_at + size]
        at = value_at + size
    return found

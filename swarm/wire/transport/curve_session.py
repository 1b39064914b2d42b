"""CURVE encryption of messages after the handshake: each frame has an increasing number and an encrypted "more" flag.

A large frame is copied once when sent and not at all when received: libsodium works in place, in the memory of the
frame. (PyNaCl's own functions copy each frame four times.) Layout of an encrypted frame::

    07 "MESSAGE"  number      mac         flags    frame
    8 bytes       8 bytes     16 bytes    1 byte   …
"""

from __future__ import annotations

from typing import Final

import numpy as np
from nacl._sodium import ffi, lib

from swarm.errors import WireError
from swarm.wire.tensors import Bytes

OVERHEAD: Final = 33  # Bytes that a MESSAGE adds to its frame.
SERVER_NONCE: Final = b"CurveZMQMESSAGES"  # Nonce prefix of the listening end …
CLIENT_NONCE: Final = b"CurveZMQMESSAGEC"  # … and of the connecting end.
_NAME: Final = b"\x07MESSAGE"
_PLAIN_AT, _MAC_AT = 32, 16  # Offsets in a MESSAGE: of the flags, and of the mac.
_LARGE: Final = 64 << 10  # Smaller buffers are cheap to clear.
_MORE, _COMMAND = 1, 2


class CurveSession:
    """Encryption state of one connection. ``shared``: key derived by both ends; ``sent`` and ``received``: last message
    numbers of the handshake."""

    def __init__(self, shared: bytes, *, is_server: bool, sent: int, received: int) -> None:
        self._shared = shared
        self._ours, self._theirs = (SERVER_NONCE, CLIENT_NONCE) if is_server else (CLIENT_NONCE, SERVER_NONCE)
        self._sent = sent  # Number in our last nonce.
        self._received = received  # Number in the peer's last nonce.

    def encrypt(self, frame: Bytes, *, more: bool) -> memoryview:
        """Encrypt a frame."""
        size = OVERHEAD + len(frame)
        out = np.empty(size, np.uint8).data if size > _LARGE else memoryview(bytearray(size))
        self._sent += 1
        number = self._sent.to_bytes(8, "big")
        out[:_MAC_AT] = _NAME + number
        out[_PLAIN_AT] = more
        out[OVERHEAD:] = frame
        at = ffi.from_buffer(out)
        lib.crypto_box_easy_afternm(at + _MAC_AT, at + _PLAIN_AT, size - _PLAIN_AT, self._ours + number, self._shared)
        return out

    def decrypt(self, encrypted: Bytes) -> tuple[memoryview, bool]:
        """Decrypt a frame, in place if its buffer is writable. Return it, and whether more frames of the message
        follow."""
        inside = memoryview(encrypted)
        if inside.readonly:
            inside = memoryview(bytearray(inside))
        if len(inside) < OVERHEAD or bytes(inside[:8]) != _NAME:
            raise WireError("this is no MESSAGE of CURVE")
        number = bytes(inside[8:_MAC_AT])
        if (count := int.from_bytes(number, "big")) <= self._received:
            raise WireError("a message came again, or too late")
        # Both ends number without gaps, so an attacker on the path has removed a message.
        if count > self._received + 1:
            raise WireError("a message before this one is missing")
        at = ffi.from_buffer(inside)
        size = len(inside) - _MAC_AT
        if lib.crypto_box_open_easy_afternm(at + _PLAIN_AT, at + _MAC_AT, size, self._theirs + number, self._shared):
            raise WireError("a message was changed on its way, or is not for us")
        self._received = count
        flags = inside[_PLAIN_AT]
        if flags & ~_MORE:
            raise WireError("a command came" if flags & _COMMAND else f"{flags:#x} are no frame's flags")
        return inside[OVERHEAD:], bool(flags & _MORE)

"""CURVE's messages, once the handshake is through: each frame numbered upwards and sealed, with whether more follow.

A large frame is copied once on its way out and not at all on its way in: libsodium works in the memory in which the
frame travels. (PyNaCl's own functions copy each frame four times.) A frame as it travels::

    07 "MESSAGE"  number      mac         flags    frame
    8 bytes       8 bytes     16 bytes    1 byte   …
"""

from __future__ import annotations

from typing import Final

import numpy as np
from nacl._sodium import ffi, lib

from swarm.errors import WireError
from swarm.wire.tensors import Bytes

OVERHEAD: Final = 33  # bytes of a MESSAGE beside what is in it
LISTENS: Final = b"CurveZMQMESSAGES"  # begins the nonces of who listens
KNOCKS: Final = b"CurveZMQMESSAGEC"
_NAME: Final = b"\x07MESSAGE"
_PLAIN_AT, _SEALED_AT = 32, 16
_LARGE: Final = 64 << 10  # memory for less than that is cheap to clear
_MORE, _COMMAND = 1, 2


class Session:
    """One connection's: ``shared`` is what both ends have computed from their keys, ``sent`` and ``heard`` the last
    numbers of the handshake."""

    def __init__(self, shared: bytes, *, listens: bool, sent: int, heard: int) -> None:
        self._shared = shared
        self._ours, self._theirs = (LISTENS, KNOCKS) if listens else (KNOCKS, LISTENS)
        self._sent = sent  # the last number in a nonce of ours
        self._heard = heard  # and of theirs

    def sealed(self, frame: Bytes, *, more: bool) -> memoryview:
        """The frame as it travels."""
        size = OVERHEAD + len(frame)
        out = np.empty(size, np.uint8).data if size > _LARGE else memoryview(bytearray(size))
        self._sent += 1
        number = self._sent.to_bytes(8, "big")
        out[:_SEALED_AT] = _NAME + number
        out[_PLAIN_AT] = more
        out[OVERHEAD:] = frame
        at = ffi.from_buffer(out)
        lib.crypto_box_easy_afternm(
            at + _SEALED_AT, at + _PLAIN_AT, size - _PLAIN_AT, self._ours + number, self._shared
        )
        return out

    def opened(self, sealed: Bytes) -> tuple[memoryview, bool]:
        """Return what was sealed, and whether more frames follow. It is opened where it lies, if that can be written
        to."""
        inside = memoryview(sealed)
        if inside.readonly:
            inside = memoryview(bytearray(inside))
        if len(inside) < OVERHEAD or bytes(inside[:8]) != _NAME:
            raise WireError("this is no MESSAGE of CURVE")
        number = bytes(inside[8:_SEALED_AT])
        if (count := int.from_bytes(number, "big")) <= self._heard:
            raise WireError("a message came again, or too late")
        if count > self._heard + 1:  # both ends number without gaps, so somebody on the way took one out
            raise WireError("a message before this one is missing")
        at = ffi.from_buffer(inside)
        size = len(inside) - _SEALED_AT
        if lib.crypto_box_open_easy_afternm(at + _PLAIN_AT, at + _SEALED_AT, size, self._theirs + number, self._shared):
            raise WireError("a message was changed on its way, or is not for us")
        self._heard = count
        flags = inside[_PLAIN_AT]
        if flags & ~_MORE:
            raise WireError("a command came" if flags & _COMMAND else f"{flags:#x} are no frame's flags")
        return inside[OVERHEAD:], bool(flags & _MORE)

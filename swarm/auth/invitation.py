"""Invitations: one line of text with everything that a new machine needs to join. Pure.

An invitation *is* a secret key whose public half the broker has stored: a peer that authenticates with it may register
a key of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Annotated, Final, NamedTuple

import msgspec

from swarm.errors import ConfigError
from swarm.wire.messages import Role

PREFIX: Final = "swarm1:"
MAX_ADDRESSES: Final = 16
_MAX_CHARACTERS: Final = 8192  # 16 addresses with the longest possible names.
_CHECKSUM_BYTES: Final = 4  # Detects a line that was cut or mistyped.
_ADDRESS: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")
_REMEDY: Final = "copy the whole line again, or ask for another (swarmctl invite)"


class Invitation(NamedTuple):
    """Decoded invitation. ``addresses``: tcp://HOST:PORT of the client channel. ``broker``: its public key. ``secret``:
    the key to authenticate with."""

    addresses: tuple[str, ...]  # Tried in this order.
    broker: str
    secret: str
    role: Role


_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Address = Annotated[str, msgspec.Meta(max_length=280)]


class _PackedInvitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    broker: _Key
    secret: _Key
    role: Role


def encode(invitation: Invitation) -> str:
    """Encode an invitation as one line. Raises ConfigError for content that ``decode`` would reject."""
    if not 0 < len(invitation.addresses) <= MAX_ADDRESSES:
        raise ConfigError(f"an invitation names 1 to {MAX_ADDRESSES} addresses, not {len(invitation.addresses)}")
    for address in invitation.addresses:
        _check(address)
    broker, secret = bytes.fromhex(invitation.broker), bytes.fromhex(invitation.secret)
    packed = msgspec.msgpack.encode(_PackedInvitation(invitation.addresses, broker, secret, invitation.role))
    return PREFIX + base64.urlsafe_b64encode(packed + _checksum(packed)).decode().rstrip("=")


def decode(line: str) -> Invitation:
    """Decode an invitation. Raises ConfigError that explains the fault."""
    line = line.strip()
    if not line.startswith(PREFIX):
        raise ConfigError(f"this is no invitation: one begins with {PREFIX} (see swarmctl invite)")
    packed = _unpack(line.removeprefix(PREFIX))
    try:
        written = msgspec.msgpack.decode(packed, type=_PackedInvitation)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError("this invitation is of another build of swarm: use the same one here and there") from None
    for address in written.addresses:
        _check(address)
    return Invitation(written.addresses, written.broker.hex(), written.secret.hex(), written.role)


def find_line(text: str) -> str:
    """Return the line with the invitation in the output of ``swarmctl invite``. Raises ConfigError if there is none."""
    for line in map(str.strip, text.splitlines()):
        if line.startswith(PREFIX):
            return line
    raise ConfigError(f"there is no invitation in it: one begins with {PREFIX} (see swarmctl invite)")


def _unpack(characters: str) -> bytes:
    damaged = ConfigError(f"this invitation is damaged or cut off: {_REMEDY}")
    if len(characters) > _MAX_CHARACTERS:
        raise damaged
    try:
        content = base64.b64decode(characters + "=" * (-len(characters) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise damaged from None
    packed, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    # Several base64 texts decode to the same bytes; only the canonical one is accepted.
    if checksum != _checksum(packed) or base64.urlsafe_b64encode(content).decode().rstrip("=") != characters:
        raise damaged
    return packed


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(PREFIX.encode() + packed, digest_size=_CHECKSUM_BYTES).digest()


def is_address(address: str) -> bool:
    """Whether this may be an address of an invitation: ``tcp://HOST:PORT``, host names included."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and 0 < int(match[2]) < 1 << 16


def _check(address: str) -> None:
    if not is_address(address):
        raise ConfigError(f"{address[:80]!r} in the invitation is no address like tcp://192.0.2.1:5700: {_REMEDY}")

"""Server side of the ZMTP security handshakes, which authenticate connecting peers.

A mechanism handles one handshake with one peer. It receives the peer's commands in order and returns the replies; after
the handshake, ``metadata`` has the metadata that the peer sent. To add a mechanism, write a class like these and extend
``server_mechanism``.

* ``NullServer``: READY is answered with READY.
* ``PlainServer``, for a listener with a token: HELLO carries the token as a password, WELCOME confirms it, INITIATE and
  READY exchange the metadata. A wrong token is answered with ERROR, after which libzmq stops reconnecting.
* ``curve.CurveServer``, for a listener with an authentication policy.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, NamedTuple, Protocol

from swarm.errors import WireError
from swarm.wire.transport.curve_session import CurveSession

USERNAME: Final = b"swarm"  # PLAIN requires a user name; the token is the password.
WRONG_TOKEN: Final = "wrong token: connect with the current endpoint"
_MAX_IDENTITY_BYTES: Final = 255

PeerMetadata = dict[bytes, bytes]


class SocketType(NamedTuple):
    """Type of a listening socket, and the types that may connect to it."""

    name: bytes
    peers: tuple[bytes, ...]


ROUTER: Final = SocketType(b"ROUTER", (b"DEALER", b"REQ", b"ROUTER"))
PULL: Final = SocketType(b"PULL", (b"PUSH",))
PUSH: Final = SocketType(b"PUSH", (b"PULL",))  # The connecting end (``client_handshake``).


class Reply(NamedTuple):
    """Command to send to the peer, if any. ``refused``: reason for closing the connection after it."""

    command: bytes
    refused: str = ""


class Mechanism(Protocol):
    """State machine of one handshake with one peer."""

    name: ClassVar[bytes]  # In ZMTP greetings.
    authenticates: ClassVar[bool]  # Whether a completed handshake proves that the peer is authorized.
    metadata: PeerMetadata | None  # Metadata of the peer; None until the handshake is complete.
    key: str  # Public key of the authenticated peer; empty without CURVE.
    session: CurveSession | None  # Encrypts messages after a CURVE handshake.

    def handle(self, command: bytes) -> Reply:
        """Handle a command of the peer. Raises WireError if it is not valid now."""
        ...


class NullServer:
    """Server side of NULL: accepts every peer."""

    name: ClassVar = b"NULL"
    authenticates: ClassVar = False
    key: str = ""
    session: CurveSession | None = None

    def __init__(self, kind: SocketType) -> None:
        self._kind = kind
        self.metadata: PeerMetadata | None = None

    def handle(self, command: bytes) -> Reply:
        self.metadata = parse_metadata(command_body(command, b"READY"), self._kind)
        return Reply(encode_ready(self._kind))


class PlainServer:
    """Server side of PLAIN: accepts peers that present the token."""

    name: ClassVar = b"PLAIN"
    authenticates: ClassVar = True
    key: str = ""
    session: CurveSession | None = None

    def __init__(self, kind: SocketType, token: bytes) -> None:
        self._kind = kind
        self._token = token
        self._is_welcome = False
        self.metadata: PeerMetadata | None = None

    def handle(self, command: bytes) -> Reply:
        if self._is_welcome:
            self.metadata = parse_metadata(command_body(command, b"INITIATE"), self._kind)
            return Reply(encode_ready(self._kind))
        if not hmac.compare_digest(_parse_password(command_body(command, b"HELLO")), self._token):
            return Reply(encode_command(b"ERROR", bytes([len(WRONG_TOKEN)]) + WRONG_TOKEN.encode()), WRONG_TOKEN)
        self._is_welcome = True
        return Reply(encode_command(b"WELCOME"))


def server_mechanism(kind: SocketType, key: bytes) -> Callable[[], Mechanism]:
    """Return a factory of mechanisms for a listener with this token; an empty token accepts every peer."""
    return partial(PlainServer, kind, key) if key else partial(NullServer, kind)


# --- commands ---------------------------------------------------------------------------------------------------------


def encode_command(name: bytes, body: bytes = b"") -> bytes:
    """Encode a command."""
    return bytes([len(name)]) + name + body


def encode_metadata(**properties: bytes) -> bytes:
    """Encode metadata as commands carry it; underscores become hyphens: ``Socket_Type=b"PUSH"``."""
    out = b""
    for name, value in properties.items():
        out += bytes([len(name)]) + name.replace("_", "-").encode() + len(value).to_bytes(4, "big") + value
    return out


def encode_ready(kind: SocketType) -> bytes:
    return encode_command(b"READY", encode_metadata(Socket_Type=kind.name, Identity=b""))


def command_body(command: bytes, name: bytes) -> bytes:
    """Return the body of a command after checking its name. Raises WireError for another command."""
    if command[: 1 + len(name)] != encode_command(name):
        raise WireError(
            f"{command[1 : 1 + command[0]]!r} came in the handshake" if command else "an empty command came"
        )
    return command[1 + len(name) :]


def _parse_password(hello: bytes) -> bytes:
    """Return the password of a HELLO: user name and password, each with its length in front, and nothing after them."""
    name_end = 1 + hello[0] if hello else 0
    password = hello[name_end + 1 :]
    if len(hello) <= name_end or hello[name_end] != len(password):
        raise WireError("the handshake is cut short")
    return password


def parse_metadata(properties: bytes, kind: SocketType) -> PeerMetadata:
    """Decode the peer's metadata. Raises WireError if a socket of its type may not connect to this kind."""
    metadata = _parse_properties(properties)
    if (peer := metadata.get(b"socket-type", b"")) not in kind.peers:
        raise WireError(f"a {peer!r} socket can't connect here")
    if len(identity := metadata.get(b"identity", b"")) > _MAX_IDENTITY_BYTES:
        raise WireError(f"an identity of {len(identity)} bytes is too long")
    return metadata


def _parse_properties(data: bytes) -> PeerMetadata:
    """Decode metadata; names are case-insensitive and returned in lower case."""
    properties, at = {}, 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_at = name_end + 4
        size = int.from_bytes(data[name_end:value_at], "big")
        if value_at + size > len(data):
            raise WireError("the handshake is cut short")
        properties[data[at + 1 : name_end].lower()] = data[value_at : value_at + size]
        at = value_at + size
    return properties

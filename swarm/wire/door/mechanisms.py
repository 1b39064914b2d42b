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
from swarm.wire.door.sealing import Session

USERNAME: Final = b"swarm"  # PLAIN requires a user name; the token is the password.
WRONG_KEY: Final = "wrong token: connect with the current endpoint"
_LONGEST_NAME: Final = 255

Told = dict[bytes, bytes]


class Kind(NamedTuple):
    """Type of a listening socket, and the types that may connect to it."""

    name: bytes
    peers: tuple[bytes, ...]


ROUTER: Final = Kind(b"ROUTER", (b"DEALER", b"REQ", b"ROUTER"))
PULL: Final = Kind(b"PULL", (b"PUSH",))
PUSH: Final = Kind(b"PUSH", (b"PULL",))  # The connecting end (``client_handshake``).


class Reply(NamedTuple):
    """Command to send to the peer, if any. ``refused``: reason for closing the connection after it."""

    command: bytes
    refused: str = ""


class Mechanism(Protocol):
    """State machine of one handshake with one peer."""

    name: ClassVar[bytes]  # In ZMTP greetings.
    proves: ClassVar[bool]  # Whether a completed handshake proves that the peer is authorized.
    told: Told | None  # Metadata of the peer; None until the handshake is complete.
    key: str  # Public key of the authenticated peer; empty without CURVE.
    session: Session | None  # Encrypts messages after a CURVE handshake.

    def take(self, command: bytes) -> Reply:
        """Handle a command of the peer. Raises WireError if it is not valid now."""
        ...


class Null:
    """Server side of NULL: accepts every peer."""

    name: ClassVar = b"NULL"
    proves: ClassVar = False
    key: str = ""
    session: Session | None = None

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.told: Told | None = None

    def take(self, command: bytes) -> Reply:
        self.told = introduced(body_of(command, b"READY"), self._kind)
        return Reply(ready(self._kind))


class Plain:
    """Server side of PLAIN: accepts peers that present the token."""

    name: ClassVar = b"PLAIN"
    proves: ClassVar = True
    key: str = ""
    session: Session | None = None

    def __init__(self, kind: Kind, key: bytes) -> None:
        self._kind = kind
        self._key = key
        self._is_welcome = False
        self.told: Told | None = None

    def take(self, command: bytes) -> Reply:
        if self._is_welcome:
            self.told = introduced(body_of(command, b"INITIATE"), self._kind)
            return Reply(ready(self._kind))
        if not hmac.compare_digest(_password(body_of(command, b"HELLO")), self._key):
            return Reply(named(b"ERROR", bytes([len(WRONG_KEY)]) + WRONG_KEY.encode()), WRONG_KEY)
        self._is_welcome = True
        return Reply(named(b"WELCOME"))


def asks(kind: Kind, key: bytes) -> Callable[[], Mechanism]:
    """Return a factory of mechanisms for a listener with this token; an empty token accepts every peer."""
    return partial(Plain, kind, key) if key else partial(Null, kind)


# --- commands ---------------------------------------------------------------------------------------------------------


def named(name: bytes, body: bytes = b"") -> bytes:
    """Encode a command."""
    return bytes([len(name)]) + name + body


def told(**properties: bytes) -> bytes:
    """Encode metadata as commands carry it; underscores become hyphens: ``Socket_Type=b"PUSH"``."""
    out = b""
    for name, value in properties.items():
        out += bytes([len(name)]) + name.replace("_", "-").encode() + len(value).to_bytes(4, "big") + value
    return out


def ready(kind: Kind) -> bytes:
    return named(b"READY", told(Socket_Type=kind.name, Identity=b""))


def body_of(command: bytes, name: bytes) -> bytes:
    """Return the body of a command after checking its name. Raises WireError for another command."""
    if command[: 1 + len(name)] != named(name):
        raise WireError(
            f"{command[1 : 1 + command[0]]!r} came in the handshake" if command else "an empty command came"
        )
    return command[1 + len(name) :]


def _password(hello: bytes) -> bytes:
    """Return the password of a HELLO: user name and password, each with its length in front, and nothing after them."""
    name_end = 1 + hello[0] if hello else 0
    password = hello[name_end + 1 :]
    if len(hello) <= name_end or hello[name_end] != len(password):
        raise WireError("the handshake is cut short")
    return password


def introduced(properties: bytes, kind: Kind) -> Told:
    """Decode the peer's metadata. Raises WireError if a socket of its type may not connect to this kind."""
    found = _properties(properties)
    if (peer := found.get(b"socket-type", b"")) not in kind.peers:
        raise WireError(f"a {peer!r} socket can't connect here")
    if len(identity := found.get(b"identity", b"")) > _LONGEST_NAME:
        raise WireError(f"an identity of {len(identity)} bytes is too long")
    return found


def _properties(data: bytes) -> Told:
    """Decode metadata; names are case-insensitive and returned in lower case."""
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

"""How a listening end finds out whom it hears: the listening halves of ZMTP's security mechanisms.

A mechanism has one conversation with one peer. It is handed the peer's commands, one after the other, and says what is
to be answered; what the peer ``told`` of itself is known once it is through. Adding one: a class like these, and its
place in ``asks``.

* ``Null``: READY is answered with READY.
* ``Plain``, where a door has a key: HELLO names the key as a password, WELCOME says that it was right, and INITIATE and
  READY tell who both are. Whoever names another key hears ERROR: libzmq, told so, knocks no more.
* ``curve.Curve``, where a door has a lock.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, NamedTuple, Protocol

from swarm.errors import WireError
from swarm.wire.door.sealing import Session

USERNAME: Final = b"swarm"  # of those who name a key: PLAIN wants one
WRONG_KEY: Final = "whoever knocks here must know the key"
_LONGEST_NAME: Final = 255

Told = dict[bytes, bytes]


class Kind(NamedTuple):
    """A listening socket, as it calls itself, and those that it speaks with."""

    name: bytes
    peers: tuple[bytes, ...]


ROUTER: Final = Kind(b"ROUTER", (b"DEALER", b"REQ", b"ROUTER"))
PULL: Final = Kind(b"PULL", (b"PUSH",))
PUSH: Final = Kind(b"PUSH", (b"PULL",))  # which knocks (``knocking``)


class Reply(NamedTuple):
    """The command to answer with, if any; with ``refused``, why nothing more is heard after it."""

    command: bytes
    refused: str = ""


class Mechanism(Protocol):
    """See the module's text."""

    name: ClassVar[bytes]  # in greetings
    proves: ClassVar[bool]  # who gets through has shown that it was told to speak here
    told: Told | None
    key: str  # the public key that the peer has shown; empty without a lock
    session: Session | None  # seals what is said once the handshake is through, with a lock

    def take(self, command: bytes) -> Reply:
        """A command came. Raises WireError if it is none that may come now."""
        ...


class Null:
    """Anybody is heard."""

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
    """Hears those who know the key."""

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
    """Make the mechanism for each peer of a door with this key; without one, anybody is heard."""
    return partial(Plain, kind, key) if key else partial(Null, kind)


# --- commands ---------------------------------------------------------------------------------------------------------


def named(name: bytes, body: bytes = b"") -> bytes:
    """A command."""
    return bytes([len(name)]) + name + body


def told(**properties: bytes) -> bytes:
    """Encode what an end says of itself, as a command has it: ``Socket_Type=b"PUSH"``."""
    out = b""
    for name, value in properties.items():
        out += bytes([len(name)]) + name.replace("_", "-").encode() + len(value).to_bytes(4, "big") + value
    return out


def ready(kind: Kind) -> bytes:
    return named(b"READY", told(Socket_Type=kind.name, Identity=b""))


def body_of(command: bytes, name: bytes) -> bytes:
    """Return what the command says, which must be of this name."""
    if command[: 1 + len(name)] != named(name):
        raise WireError(
            f"{command[1 : 1 + command[0]]!r} came in the handshake" if command else "an empty command came"
        )
    return command[1 + len(name) :]


def _password(hello: bytes) -> bytes:
    """Behind the name of the user: each has its length before it, and nothing follows."""
    name_end = 1 + hello[0] if hello else 0
    password = hello[name_end + 1 :]
    if len(hello) <= name_end or hello[name_end] != len(password):
        raise WireError("the handshake is cut short")
    return password


def introduced(properties: bytes, kind: Kind) -> Told:
    """The peer says who it is. It must be one that speaks with this kind of socket."""
    found = _properties(properties)
    if (peer := found.get(b"socket-type", b"")) not in kind.peers:
        raise WireError(f"a {peer!r} socket has nothing to say here")
    if len(identity := found.get(b"identity", b"")) > _LONGEST_NAME:
        raise WireError(f"an identity of {len(identity)} bytes is too long")
    return found


def _properties(data: bytes) -> Told:
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

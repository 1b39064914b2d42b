"""Client side of the ZMTP security handshakes (NULL, PLAIN, CURVE), and probes of listeners.

Each mechanism sends its ``first`` command right after the greeting, without waiting for the other end's greeting, and
replies to commands from then on.

``check_reachable`` tests whether a listener can be reached from here, before a plan depends on it. The process that
answers must prove that it has the listener's key, because a private address may belong to another machine on another
network, and a forwarded port may lead anywhere. A listener that accepts but does not answer counts as reachable: its
process may be busy computing. If it disconnects or answers as something else, the probe is repeated for a while: an
overloaded listener disconnects, too.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Protocol

from nacl.bindings import (
    crypto_box,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open_easy_afternm,
)
from nacl.exceptions import CryptoError

from swarm.errors import ConfigError, WireError
from swarm.wire.addresses import host_of, is_loopback, port_of
from swarm.wire.door.curve import is_proven_refusal, opened
from swarm.wire.door.keys import MOST_KEY, KeyPair, address_and_key, public_key_in, without_ticket
from swarm.wire.door.mechanisms import (
    PUSH,
    USERNAME,
    Mechanism,
    Reply,
    Told,
    body_of,
    introduced,
    named,
    ready,
    told,
)
from swarm.wire.door.sealing import Session
from swarm.wire.door.zmtp import HANDSHAKE_BYTES, Inlet, as_command, greeting

PATIENCE_S: Final = 3.5  # A lost first packet is sent again after one second, and after three.
ANSWER_S: Final = 1.0  # Time that the listener has to answer, within the above.
_PAUSE_S: Final = 0.25
_REFUSAL_S: Final = 3.0  # Timeout for the proof of a refusal.
_ERROR: Final = named(b"ERROR")


class TurnedAway(WireError):
    """The other end rejects our key or token. With CURVE, the listener has proven that the rejection is its own."""


class Knocker(Mechanism, Protocol):
    """Client side of one handshake."""

    first: bytes  # Command that follows the greeting.


class OpenDoor:
    """Client side of NULL: no authentication."""

    name: ClassVar = b"NULL"
    proves: ClassVar = False
    key: str = ""
    session: Session | None = None

    def __init__(self) -> None:
        self.first = ready(PUSH)
        self.told: Told | None = None

    def take(self, command: bytes) -> Reply:
        self.told = introduced(_said(command, b"READY"), PUSH)
        return Reply(b"")


class Word:
    """Client side of PLAIN: presents a token."""

    name: ClassVar = b"PLAIN"
    proves: ClassVar = False
    key: str = ""
    session: Session | None = None

    def __init__(self, word: bytes) -> None:
        self.first = named(b"HELLO", bytes([len(USERNAME)]) + USERNAME + bytes([len(word)]) + word)
        self._is_welcome = False
        self.told: Told | None = None

    def take(self, command: bytes) -> Reply:
        if not self._is_welcome:
            _said(command, b"WELCOME")
            self._is_welcome = True
            return Reply(named(b"INITIATE", told(Socket_Type=PUSH.name, Identity=b"")))
        self.told = introduced(_said(command, b"READY"), PUSH)
        return Reply(b"")


class Locked:
    """Client side of CURVE: presents a public key; ``curve`` explains the handshake."""

    name: ClassVar = b"CURVE"
    proves: ClassVar = True

    def __init__(self, door: str, pair: KeyPair) -> None:
        self.key = door
        self._door, self._pair = bytes.fromhex(door), pair
        self._public, self._secret = crypto_box_keypair()  # Key pair of this connection.
        self._shared = b""
        number = (1).to_bytes(8, "big")
        box = crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self._door, self._secret)
        self.first = named(b"HELLO", b"\x01\x00" + bytes(72) + self._public + number + box)
        self.told: Told | None = None
        self.session: Session | None = None

    def take(self, command: bytes) -> Reply:
        if command.startswith(_ERROR):
            self._refused(command[len(_ERROR) :])
        if not self._shared:
            return Reply(self._initiate(body_of(command, b"WELCOME")))
        said = body_of(command, b"READY")
        try:
            plain = crypto_box_open_easy_afternm(said[8:], b"CurveZMQREADY---" + said[:8], self._shared)
        except (CryptoError, ValueError):
            raise WireError("the READY of CURVE is none") from None
        self.told = introduced(plain, PUSH)
        self.session = Session(self._shared, listens=False, sent=2, heard=int.from_bytes(said[:8], "big"))
        return Reply(b"")

    def _refused(self, error: bytes) -> None:
        """Handle an ERROR. Raises AuthRejected if the listener sent it, WireError if an attacker on the path may
        have."""
        if self._shared and is_proven_refusal(error, self._shared):
            raise TurnedAway("the listener rejects our key")
        raise WireError("an ERROR came without a proof that the listener sent it")

    def _welcomed(self, welcome: bytes) -> bytes:
        """Decrypt WELCOME, which proves that the other end has the listener's secret key."""
        if len(welcome) != 160:
            raise WireError("the WELCOME of CURVE is none")
        return opened(welcome[16:], b"WELCOME-" + welcome[:16], self._door, self._secret)

    def _initiate(self, welcome: bytes) -> bytes:
        plain = self._welcomed(welcome)
        theirs, cookie = plain[:32], plain[32:]
        nonce, number = secrets.token_bytes(16), (2).to_bytes(8, "big")
        vouch = crypto_box(self._public + self._door, b"VOUCH---" + nonce, theirs, bytes.fromhex(self._pair.secret))
        introduction = told(Socket_Type=PUSH.name, Identity=b"")
        said = bytes.fromhex(self._pair.public) + nonce + vouch + introduction
        self._shared = crypto_box_beforenm(theirs, self._secret)
        box = crypto_box(said, b"CurveZMQINITIATE" + number, theirs, self._secret)
        return named(b"INITIATE", cookie + number + box)


class Trying(Locked):
    """CURVE handshake that stops as soon as the other end has proven its identity. Our own key, which may not be
    authorized yet, is never sent."""

    def __init__(self, door: str) -> None:
        super().__init__(door, KeyPair("", ""))
        self.is_proven = False

    def take(self, command: bytes) -> Reply:
        self._welcomed(body_of(command, b"WELCOME"))
        self.is_proven = True
        return Reply(b"")


def knocks(address: str, key: bytes, pair: KeyPair | None) -> Callable[[], Knocker]:
    """Return a factory of client mechanisms for a listener with this token or key. Raises ConfigError if the listener
    requires keys and this machine has none, and for an invalid token."""
    if (door := public_key_in(key)) is not None:
        if pair is None:
            raise ConfigError(f"{address} requires a key, and this machine has none for it: join with --join")
        return partial(Locked, door, pair)
    if len(key) > MOST_KEY:
        raise ConfigError(f"the key in an endpoint at {address} is invalid: it has {len(key)} bytes")
    return partial(Word, key) if key else OpenDoor


def _said(command: bytes, name: bytes) -> bytes:
    if command.startswith(_ERROR):
        raise TurnedAway("the other end rejected our key")
    return body_of(command, name)


def why_unreachable(endpoint: str, patience_s: float = PATIENCE_S) -> str:
    """Connect, and return why that failed; empty if it succeeded, or if the listener is on this machine. Blocks.

    For an endpoint through a relay, only the relay is tested.
    """
    place, key = address_and_key(endpoint)
    address, ticket = without_ticket(place)
    host = host_of(address)
    if is_loopback(host):
        return ""
    door = None if ticket else public_key_in(key)
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection(
                (host, port_of(address)), max(_PAUSE_S, give_up_at - time.monotonic())
            ) as made:
                if door is None or _is_door(made, door):
                    return ""
        except TimeoutError:
            return f"nothing answers at {address} within {patience_s:g} s: is there a firewall?"
        except OSError as error:
            return f"{address}: {error.strerror or error}"
        if time.monotonic() + _PAUSE_S >= give_up_at:
            return f"something else listens at {address}: it does not have the expected key"
        time.sleep(_PAUSE_S)


def is_refused(endpoint: str, pair: KeyPair) -> bool:
    """Connect, and return whether the listener proves that it rejects this key. Blocks for a few seconds at most."""
    address, key = address_and_key(endpoint)
    if (door := public_key_in(key)) is None:
        return False
    locked = Locked(door, pair)
    try:
        with socket.create_connection((host_of(address), port_of(address)), _REFUSAL_S) as made:
            _shake(made, locked, lambda: locked.told is not None, _REFUSAL_S)
    except TurnedAway:
        return True
    except (OSError, WireError, ConfigError):
        return False
    return False


def _is_door(made: socket.socket, door: str) -> bool:
    """Whether the listening process has the secret half of this key, or may have it because it does not answer."""
    trying = Trying(door)
    try:
        _shake(made, trying, lambda: trying.is_proven, ANSWER_S)
    except TimeoutError:
        return True
    except (OSError, WireError):
        return False
    return trying.is_proven


def _shake(made: socket.socket, knocker: Knocker, is_over: Callable[[], bool], patience_s: float) -> None:
    """Run the handshake until ``is_over``, or until the other end disconnects. Raises OSError and WireError."""
    inlet = Inlet(HANDSHAKE_BYTES, knocker)
    give_up_at = time.monotonic() + patience_s
    answer = greeting(knocker.name, listens=False) + as_command(knocker.first)
    while not is_over():
        made.sendall(answer)
        made.settimeout(max(0.001, give_up_at - time.monotonic()))
        if not (came := made.recv(HANDSHAKE_BYTES)):
            return
        inlet.feed(came)
        inlet.shake()
        answer, inlet.answer = inlet.answer, b""

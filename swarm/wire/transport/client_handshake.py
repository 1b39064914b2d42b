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
from swarm.wire.transport.curve import decrypt_box, is_proven_refusal
from swarm.wire.transport.curve_session import CurveSession
from swarm.wire.transport.keys import MAX_KEY_CHARS, KeyPair, address_and_key, public_key_in, split_ticket
from swarm.wire.transport.server_handshake import (
    PUSH,
    USERNAME,
    Mechanism,
    PeerMetadata,
    Reply,
    command_body,
    encode_command,
    encode_metadata,
    encode_ready,
    parse_metadata,
)
from swarm.wire.transport.zmtp import HANDSHAKE_BYTES, ZmtpDecoder, command_frame, encode_greeting

PATIENCE_S: Final = 3.5  # A lost first packet is sent again after one second, and after three.
ANSWER_S: Final = 1.0  # Time that the listener has to answer, within the above.
_PAUSE_S: Final = 0.25
_REFUSAL_S: Final = 3.0  # Timeout for the proof of a refusal.
_ERROR: Final = encode_command(b"ERROR")


class AuthRejected(WireError):
    """The other end rejects our key or token. With CURVE, the listener has proven that the rejection is its own."""


class ClientMechanism(Mechanism, Protocol):
    """Client side of one handshake."""

    first: bytes  # Command that follows the greeting.


class NullClient:
    """Client side of NULL: no authentication."""

    name: ClassVar = b"NULL"
    authenticates: ClassVar = False
    key: str = ""
    session: CurveSession | None = None

    def __init__(self) -> None:
        self.first = encode_ready(PUSH)
        self.metadata: PeerMetadata | None = None

    def handle(self, command: bytes) -> Reply:
        self.metadata = parse_metadata(_body_or_rejection(command, b"READY"), PUSH)
        return Reply(b"")


class PlainClient:
    """Client side of PLAIN: presents a token."""

    name: ClassVar = b"PLAIN"
    authenticates: ClassVar = False
    key: str = ""
    session: CurveSession | None = None

    def __init__(self, token: bytes) -> None:
        self.first = encode_command(b"HELLO", bytes([len(USERNAME)]) + USERNAME + bytes([len(token)]) + token)
        self._is_welcome = False
        self.metadata: PeerMetadata | None = None

    def handle(self, command: bytes) -> Reply:
        if not self._is_welcome:
            _body_or_rejection(command, b"WELCOME")
            self._is_welcome = True
            return Reply(encode_command(b"INITIATE", encode_metadata(Socket_Type=PUSH.name, Identity=b"")))
        self.metadata = parse_metadata(_body_or_rejection(command, b"READY"), PUSH)
        return Reply(b"")


class CurveClient:
    """Client side of CURVE: presents a public key; ``curve`` explains the handshake."""

    name: ClassVar = b"CURVE"
    authenticates: ClassVar = True

    def __init__(self, server_key: str, pair: KeyPair) -> None:
        self.key = server_key
        self._server_key, self._pair = bytes.fromhex(server_key), pair
        self._public, self._secret = crypto_box_keypair()  # Key pair of this connection.
        self._shared = b""
        number = (1).to_bytes(8, "big")
        box = crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self._server_key, self._secret)
        self.first = encode_command(b"HELLO", b"\x01\x00" + bytes(72) + self._public + number + box)
        self.metadata: PeerMetadata | None = None
        self.session: CurveSession | None = None

    def handle(self, command: bytes) -> Reply:
        if command.startswith(_ERROR):
            self._handle_error(command[len(_ERROR) :])
        if not self._shared:
            return Reply(self._initiate(command_body(command, b"WELCOME")))
        body = command_body(command, b"READY")
        try:
            plain = crypto_box_open_easy_afternm(body[8:], b"CurveZMQREADY---" + body[:8], self._shared)
        except (CryptoError, ValueError):
            raise WireError("the READY of CURVE is none") from None
        self.metadata = parse_metadata(plain, PUSH)
        self.session = CurveSession(self._shared, is_server=False, sent=2, received=int.from_bytes(body[:8], "big"))
        return Reply(b"")

    def _handle_error(self, error: bytes) -> None:
        """Handle an ERROR. Raises AuthRejected if the listener sent it, WireError if an attacker on the path may
        have."""
        if self._shared and is_proven_refusal(error, self._shared):
            raise AuthRejected("the listener rejects our key")
        raise WireError("an ERROR came without a proof that the listener sent it")

    def _decrypt_welcome(self, welcome: bytes) -> bytes:
        """Decrypt WELCOME, which proves that the other end has the listener's secret key."""
        if len(welcome) != 160:
            raise WireError("the WELCOME of CURVE is none")
        return decrypt_box(welcome[16:], b"WELCOME-" + welcome[:16], self._server_key, self._secret)

    def _initiate(self, welcome: bytes) -> bytes:
        plain = self._decrypt_welcome(welcome)
        theirs, cookie = plain[:32], plain[32:]
        nonce, number = secrets.token_bytes(16), (2).to_bytes(8, "big")
        vouch = crypto_box(
            self._public + self._server_key, b"VOUCH---" + nonce, theirs, bytes.fromhex(self._pair.secret)
        )
        introduction = encode_metadata(Socket_Type=PUSH.name, Identity=b"")
        content = bytes.fromhex(self._pair.public) + nonce + vouch + introduction
        self._shared = crypto_box_beforenm(theirs, self._secret)
        box = crypto_box(content, b"CurveZMQINITIATE" + number, theirs, self._secret)
        return encode_command(b"INITIATE", cookie + number + box)


class CurveProbe(CurveClient):
    """CURVE handshake that stops as soon as the other end has proven its identity. Our own key, which may not be
    authorized yet, is never sent."""

    def __init__(self, server_key: str) -> None:
        super().__init__(server_key, KeyPair("", ""))
        self.is_proven = False

    def handle(self, command: bytes) -> Reply:
        self._decrypt_welcome(command_body(command, b"WELCOME"))
        self.is_proven = True
        return Reply(b"")


def client_mechanism(address: str, key: bytes, pair: KeyPair | None) -> Callable[[], ClientMechanism]:
    """Return a factory of client mechanisms for a listener with this token or key. Raises ConfigError if the listener
    requires keys and this machine has none, and for an invalid token."""
    if (server_key := public_key_in(key)) is not None:
        if pair is None:
            raise ConfigError(f"{address} requires a key, and this machine has none for it: join with --join")
        return partial(CurveClient, server_key, pair)
    if len(key) > MAX_KEY_CHARS:
        raise ConfigError(f"the key in an endpoint at {address} is invalid: it has {len(key)} bytes")
    return partial(PlainClient, key) if key else NullClient


def _body_or_rejection(command: bytes, name: bytes) -> bytes:
    if command.startswith(_ERROR):
        raise AuthRejected("the other end rejected our key")
    return command_body(command, name)


def check_reachable(endpoint: str, patience_s: float = PATIENCE_S) -> str:
    """Connect, and return why that failed; empty if it succeeded, or if the listener is on this machine. Blocks.

    For an endpoint through a relay, only the relay is tested.
    """
    place, key = address_and_key(endpoint)
    address, ticket = split_ticket(place)
    host = host_of(address)
    if is_loopback(host):
        return ""
    server_key = None if ticket else public_key_in(key)
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection(
                (host, port_of(address)), max(_PAUSE_S, give_up_at - time.monotonic())
            ) as sock:
                if server_key is None or _has_key(sock, server_key):
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
    if (server_key := public_key_in(key)) is None:
        return False
    client = CurveClient(server_key, pair)
    try:
        with socket.create_connection((host_of(address), port_of(address)), _REFUSAL_S) as sock:
            _handshake(sock, client, lambda: client.metadata is not None, _REFUSAL_S)
    except AuthRejected:
        return True
    except (OSError, WireError, ConfigError):
        return False
    return False


def _has_key(sock: socket.socket, server_key: str) -> bool:
    """Whether the listening process has the secret half of this key, or may have it because it does not answer."""
    curve_probe = CurveProbe(server_key)
    try:
        _handshake(sock, curve_probe, lambda: curve_probe.is_proven, ANSWER_S)
    except TimeoutError:
        return True
    except (OSError, WireError):
        return False
    return curve_probe.is_proven


def _handshake(sock: socket.socket, mechanism: ClientMechanism, is_over: Callable[[], bool], patience_s: float) -> None:
    """Run the handshake until ``is_over``, or until the other end disconnects. Raises OSError and WireError."""
    decoder = ZmtpDecoder(HANDSHAKE_BYTES, mechanism)
    give_up_at = time.monotonic() + patience_s
    answer = encode_greeting(mechanism.name, is_server=False) + command_frame(mechanism.first)
    while not is_over():
        sock.sendall(answer)
        sock.settimeout(max(0.001, give_up_at - time.monotonic()))
        if not (received := sock.recv(HANDSHAKE_BYTES)):
            return
        decoder.feed(received)
        decoder.advance_handshake()
        answer, decoder.answer = decoder.answer, b""

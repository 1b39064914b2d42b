"""Server side of the CURVE handshake (ZMTP's RFC 26, compatible with libzmq 4.3): mutual authentication by public keys,
encryption, and protection against replayed and dropped messages.

Handshake: HELLO (the client's key for this connection, encrypted to the server's key), WELCOME (the server's key for
this connection, and a *cookie* that carries all state the server would have to remember), INITIATE (the cookie, and the
client's long-term key with a proof that it is the client's), READY. Afterwards each frame is a MESSAGE: numbered and
encrypted, with the "more" flag inside.

The cryptography is libsodium's, through PyNaCl.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from nacl.bindings import (
    crypto_box,
    crypto_box_beforenm,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_easy_afternm,
    crypto_secretbox,
    crypto_secretbox_open,
)
from nacl.exceptions import CryptoError

from swarm.errors import WireError
from swarm.wire.transport.curve_session import CurveSession
from swarm.wire.transport.keys import AuthPolicy, KeyPair
from swarm.wire.transport.server_handshake import (
    Mechanism,
    PeerMetadata,
    Reply,
    SocketType,
    encode_command,
    encode_metadata,
    parse_metadata,
    server_mechanism,
)

NOT_AUTHORIZED: Final = "this key is not authorized here"
_REFUSED: Final = b"400"  # Error reason that libzmq recognises as an authentication failure.
_REFUSAL_NONCE: Final = b"CurveZMQERROR---"


class CurveServer:
    """CURVE handshake of one connection, server side."""

    name: ClassVar = b"CURVE"
    authenticates: ClassVar = True

    def __init__(self, kind: SocketType, policy: AuthPolicy) -> None:
        self._kind = kind
        self._policy = policy
        self._pair = policy.pair  # The key pair that the peer addressed; known after HELLO.
        self._handle_next = self._handle_hello  # Handler of the next command.
        # Encrypts the cookie. It is per connection, so that recorded messages of another connection are useless here.
        self._cookie_secret = secrets.token_bytes(32)
        self.session: CurveSession | None = None  # Set when the handshake is complete.
        self.metadata: PeerMetadata | None = None
        self.key = ""  # The peer's public key, once it has proven that it has the secret one.

    def handle(self, command: bytes) -> Reply:
        return self._handle_next(command)

    # --- handshake ---------------------------------------------------------------------------------------------------

    def _handle_hello(self, command: bytes) -> Reply:
        if len(command) != 200 or command[:8] != encode_command(b"HELLO") + b"\x01\x00":
            raise WireError("this is no HELLO of CURVE")
        peer, number = command[80:112], command[112:120]
        self._pair = self._addressed_pair(command[120:], b"CurveZMQHELLO---" + number, peer)
        self._handle_next = self._handle_initiate
        own_public, own_secret = crypto_box_keypair()
        cookie_nonce, nonce = secrets.token_bytes(16), secrets.token_bytes(16)
        cookie = crypto_secretbox(peer + own_secret, b"COOKIE--" + cookie_nonce, self._cookie_secret)
        sealed = crypto_box(
            own_public + cookie_nonce + cookie, b"WELCOME-" + nonce, peer, bytes.fromhex(self._pair.secret)
        )
        return Reply(encode_command(b"WELCOME", nonce + sealed))

    def _addressed_pair(self, box: bytes, nonce: bytes, peer: bytes) -> KeyPair:
        """Return which of the listener's key pairs the peer addressed: the box opens with that one only."""
        for pair in self._policy.pairs:
            with contextlib.suppress(WireError):
                if decrypt_box(box, nonce, peer, bytes.fromhex(pair.secret)) == bytes(64):
                    return pair
        raise WireError("the HELLO can't be decrypted: it is for another server key")

    def _handle_initiate(self, command: bytes) -> Reply:
        if len(command) < 257 or command[:9] != encode_command(b"INITIATE"):
            raise WireError("this is no INITIATE of CURVE")
        try:
            cookie = crypto_secretbox_open(command[25:105], b"COOKIE--" + command[9:25], self._cookie_secret)
        except CryptoError:
            raise WireError("the cookie is not ours") from None
        peer, own_secret = cookie[:32], cookie[32:]
        content = decrypt_box(command[113:], b"CurveZMQINITIATE" + command[105:113], peer, own_secret)
        key, vouch = content[:32], content[48:128]
        own_public = bytes.fromhex(self._pair.public)
        if decrypt_box(vouch, b"VOUCH---" + content[32:48], key, own_secret) != peer + own_public:
            raise WireError("the vouch is for another connection")
        shared, number = crypto_box_beforenm(peer, own_secret), (1).to_bytes(8, "big")
        if not self._policy.is_authorized(key.hex()):
            # With an ERROR libzmq stops reconnecting, without one it tries again.
            return Reply(encode_refusal(shared, number) if self._policy.reject_explicitly else b"", NOT_AUTHORIZED)
        self.metadata, self.key = parse_metadata(content[128:], self._kind), key.hex()
        if self._policy.on_authenticated is not None:
            self._policy.on_authenticated(self.key, self._pair.public)
        self.session = CurveSession(shared, is_server=True, sent=1, received=int.from_bytes(command[105:113], "big"))
        ready = encode_metadata(Socket_Type=self._kind.name, Identity=b"")
        box = crypto_box_easy_afternm(ready, b"CurveZMQREADY---" + number, shared)
        return Reply(encode_command(b"READY", number + box))


def encode_refusal(shared: bytes, number: bytes) -> bytes:
    """Encode an ERROR with a proof that this listener sent it.

    RFC 26 sends ERROR unencrypted, so any attacker on the path can forge it, and libzmq trusts it. The proof is a box
    after the reason: only the listener and this peer have ``shared``. libzmq ignores bytes after the reason.
    """
    box = crypto_box_easy_afternm(_REFUSED, _REFUSAL_NONCE + number, shared)
    return encode_command(b"ERROR", bytes([len(_REFUSED)]) + _REFUSED + number + box)


def is_proven_refusal(error: bytes, shared: bytes) -> bool:
    """Check the proof in an ERROR. ``error``: the bytes after the command's name."""
    reason = bytes([len(_REFUSED)]) + _REFUSED
    number, box = error[len(reason) : len(reason) + 8], error[len(reason) + 8 :]
    if not error.startswith(reason) or len(number) < 8:
        return False
    try:
        return crypto_box_open_easy_afternm(box, _REFUSAL_NONCE + number, shared) == _REFUSED
    except (CryptoError, ValueError):
        return False


def decrypt_box(box: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    """Decrypt a box of the handshake. Raises WireError if that fails."""
    try:
        return crypto_box_open(box, nonce, public, secret)
    except CryptoError:
        raise WireError("a box of the handshake does not open") from None


def server_mechanism_for(kind: SocketType, policy: AuthPolicy | None, token: bytes = b"") -> Callable[[], Mechanism]:
    """Return a factory of mechanisms for a listener: CURVE with an authentication policy, else by token
    (``server_handshake.server_mechanism``)."""
    return server_mechanism(kind, token) if policy is None else partial(CurveServer, kind, policy)

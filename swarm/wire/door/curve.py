"""CURVE as a listening end speaks it (ZMTP's RFC 26, as libzmq 4.3 does): who is heard has shown its key, and nobody
can read along, change, repeat or leave out what is said.

The conversation: HELLO (a key for this connection, sealed to ours), WELCOME (our key for it, and a *cookie* that holds
all that we would have to remember), INITIATE (the cookie back, and the peer's own key, vouched for), READY. From there
on each frame is a MESSAGE: numbered upwards, sealed, whether more follow is inside.

Cryptography is libsodium's, by PyNaCl.
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
from swarm.wire.door.keys import KeyPair, Lock
from swarm.wire.door.mechanisms import Kind, Mechanism, Reply, Told, asks, introduced, named, told
from swarm.wire.door.sealing import Session

NOT_HERE: Final = "this key does not open this door"
_REFUSED: Final = b"400"  # the reason by which libzmq knows that it was turned away
_REFUSAL_NONCE: Final = b"CurveZMQERROR---"


class Curve:
    """See the module's text. A new one for each connection."""

    name: ClassVar = b"CURVE"
    proves: ClassVar = True

    def __init__(self, kind: Kind, lock: Lock) -> None:
        self._kind = kind
        self._lock = lock
        self._pair = lock.pair  # that the peer knows this door by, once it has said HELLO
        self._take_next = self._hello
        # Seals the cookie. Of this connection: what was recorded of another one must open nothing here.
        self._cookie_secret = secrets.token_bytes(32)
        self.session: Session | None = None  # once the handshake is through
        self.told: Told | None = None
        self.key = ""  # the peer's public key, once it has proved that it has the secret one

    def take(self, command: bytes) -> Reply:
        return self._take_next(command)

    # --- handshake ---------------------------------------------------------------------------------------------------

    def _hello(self, command: bytes) -> Reply:
        if len(command) != 200 or command[:8] != named(b"HELLO") + b"\x01\x00":
            raise WireError("this is no HELLO of CURVE")
        peer, number = command[80:112], command[112:120]
        self._pair = self._called(command[120:], b"CurveZMQHELLO---" + number, peer)
        self._take_next = self._initiate
        own_public, own_secret = crypto_box_keypair()
        cookie_nonce, nonce = secrets.token_bytes(16), secrets.token_bytes(16)
        cookie = crypto_secretbox(peer + own_secret, b"COOKIE--" + cookie_nonce, self._cookie_secret)
        sealed = crypto_box(
            own_public + cookie_nonce + cookie, b"WELCOME-" + nonce, peer, bytes.fromhex(self._pair.secret)
        )
        return Reply(named(b"WELCOME", nonce + sealed))

    def _called(self, box: bytes, nonce: bytes, peer: bytes) -> KeyPair:
        """By which of the door's keys the peer knows it: the box opens with that one alone."""
        for pair in self._lock.pairs:
            with contextlib.suppress(WireError):
                if opened(box, nonce, peer, bytes.fromhex(pair.secret)) == bytes(64):
                    return pair
        raise WireError("the HELLO does not open: it is for another key than this door's")

    def _initiate(self, command: bytes) -> Reply:
        if len(command) < 257 or command[:9] != named(b"INITIATE"):
            raise WireError("this is no INITIATE of CURVE")
        try:
            cookie = crypto_secretbox_open(command[25:105], b"COOKIE--" + command[9:25], self._cookie_secret)
        except CryptoError:
            raise WireError("the cookie is not ours") from None
        peer, own_secret = cookie[:32], cookie[32:]
        said = opened(command[113:], b"CurveZMQINITIATE" + command[105:113], peer, own_secret)
        key, vouch = said[:32], said[48:128]
        own_public = bytes.fromhex(self._pair.public)
        if opened(vouch, b"VOUCH---" + said[32:48], key, own_secret) != peer + own_public:
            raise WireError("the vouch is for another connection")
        shared, number = crypto_box_beforenm(peer, own_secret), (1).to_bytes(8, "big")
        if not self._lock.opens(key.hex()):
            # libzmq, told so, knocks no more; told nothing, it knocks again.
            return Reply(refusal(shared, number) if self._lock.says_no else b"", NOT_HERE)
        self.told, self.key = introduced(said[128:], self._kind), key.hex()
        if self._lock.came is not None:
            self._lock.came(self.key, self._pair.public)
        self.session = Session(shared, listens=True, sent=1, heard=int.from_bytes(command[105:113], "big"))
        ready = told(Socket_Type=self._kind.name, Identity=b"")
        box = crypto_box_easy_afternm(ready, b"CurveZMQREADY---" + number, shared)
        return Reply(named(b"READY", number + box))


def refusal(shared: bytes, number: bytes) -> bytes:
    """Encode an ERROR with a proof that the door sent it.

    RFC 26 sends ERROR in the clear, so anybody on the way can forge it, and libzmq believes it. The proof is a box
    behind the reason: only the door and this peer have ``shared``. libzmq ignores what follows the reason.
    """
    box = crypto_box_easy_afternm(_REFUSED, _REFUSAL_NONCE + number, shared)
    return named(b"ERROR", bytes([len(_REFUSED)]) + _REFUSED + number + box)


def is_proven_refusal(error: bytes, shared: bytes) -> bool:
    """Check the proof in an ERROR. ``error``: what follows the command's name."""
    reason = bytes([len(_REFUSED)]) + _REFUSED
    number, box = error[len(reason) : len(reason) + 8], error[len(reason) + 8 :]
    if not error.startswith(reason) or len(number) < 8:
        return False
    try:
        return crypto_box_open_easy_afternm(box, _REFUSAL_NONCE + number, shared) == _REFUSED
    except (CryptoError, ValueError):
        return False


def opened(box: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    """Open a box of the handshake. Raises WireError if it does not open."""
    try:
        return crypto_box_open(box, nonce, public, secret)
    except CryptoError:
        raise WireError("a box of the handshake does not open") from None


def asking(kind: Kind, lock: Lock | None, word: bytes = b"") -> Callable[[], Mechanism]:
    """Make the mechanism for each peer of a door: the lock's, or the door's word (``mechanisms.asks``)."""
    return asks(kind, word) if lock is None else partial(Curve, kind, lock)

"""Proof that the sender of an enrolment holds the secret half of its key. Pure.

The proof is a NaCl box (Curve25519, XSalsa20, Poly1305) from the new key to the broker's key: only a holder of one of
the two secret keys can create it. Its content names the invitation, so that it is useless for any other enrolment. (The
connection itself is authenticated with the invitation's key, and proves nothing about the new one.)
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from nacl.bindings import crypto_box, crypto_box_open
from nacl.exceptions import CryptoError

from swarm.wire.transport.keys import KeyPair

NOT_PROVEN: Final = (
    "this machine has not proved that it holds the secret half of the key that it enrols: either the key is another's, "
    "or the swarm on this machine is older than the broker's (install the broker's version, and join again)"
)
_PURPOSE: Final = b"swarm enrols"  # Domain separation: the box is no valid message of any other protocol.
_NONCE_BYTES: Final = 24
_MODULUS: Final = (1 << 255) - 19  # Prime of Curve25519's field; encodings that are not smaller are not canonical.


def prove(pair: KeyPair, invitation: str, broker: str) -> str:
    """Return a proof for this broker's public key that we hold ``pair``; valid for the invitation with this public
    key."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    box = crypto_box(_message(invitation), nonce, bytes.fromhex(broker), bytes.fromhex(pair.secret))
    return (nonce + box).hex()


def is_proven(proof: str, key: str, invitation: str, brokers: Sequence[KeyPair]) -> bool:
    """Whether ``proof`` shows that its sender holds the secret half of ``key``.

    ``brokers``: key pairs that the broker currently accepts. A non-canonical encoding of a key is rejected, because
    several numbers stand for the same point.
    """
    if int.from_bytes(bytes.fromhex(key), "little") >= _MODULUS:
        return False
    return any(_open_box(proof, key, broker) == _message(invitation) for broker in brokers)


def _message(invitation: str) -> bytes:
    return _PURPOSE + bytes.fromhex(invitation)


def _open_box(proof: str, key: str, broker: KeyPair) -> bytes | None:
    content = bytes.fromhex(proof)
    try:
        return crypto_box_open(
            content[_NONCE_BYTES:], content[:_NONCE_BYTES], bytes.fromhex(key), bytes.fromhex(broker.secret)
        )
    except (CryptoError, ValueError):  # ValueError: too short to contain a nonce.
        return None

"""Proof that whoever enrols a key has its secret half. Pure.

A box of NaCl (Curve25519, XSalsa20, Poly1305) from the new key to the broker's own: only the holder of one of the two
secret halves can make it. Its text names the invitation, so that it is good for no other enrolment. (The enrolling
connection itself is made with the invitation's key, and proves nothing of the new one.)
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from nacl.bindings import crypto_box, crypto_box_open
from nacl.exceptions import CryptoError

from swarm.wire.door.keys import KeyPair

NOT_PROVEN: Final = (
    "this machine has not proved that it holds the secret half of the key that it enrols: either the key is another's, "
    "or the swarm on this machine is older than the broker's (install the broker's version, and join again)"
)
_PURPOSE: Final = b"swarm enrols"
_NONCE_BYTES: Final = 24
_MODULUS: Final = (1 << 255) - 19


def prove(pair: KeyPair, invitation: str, broker: str) -> str:
    """Prove to the broker with this public key that we hold ``pair``, for the invitation with that public key."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    box = crypto_box(_text(invitation), nonce, bytes.fromhex(broker), bytes.fromhex(pair.secret))
    return (nonce + box).hex()


def is_proven(proof: str, key: str, invitation: str, brokers: Sequence[KeyPair]) -> bool:
    """Whether ``proof`` shows that its sender holds the secret half of ``key``. ``brokers``: the pairs that the broker
    answers to. Another spelling of a key (several numbers stand for the same point) is none."""
    if int.from_bytes(bytes.fromhex(key), "little") >= _MODULUS:
        return False
    return any(_opened(proof, key, broker) == _text(invitation) for broker in brokers)


def _text(invitation: str) -> bytes:
    return _PURPOSE + bytes.fromhex(invitation)


def _opened(proof: str, key: str, broker: KeyPair) -> bytes | None:
    sealed = bytes.fromhex(proof)
    try:
        return crypto_box_open(
            sealed[_NONCE_BYTES:], sealed[:_NONCE_BYTES], bytes.fromhex(key), bytes.fromhex(broker.secret)
        )
    except (CryptoError, ValueError):  # ValueError: it is too short to have a nonce
        return None

"""Tokens and public keys in endpoints, and a listener's authentication policy.

An endpoint may contain a token, ``tcp://TOKEN@HOST:PORT``: a connecting peer sends it in the handshake
(``server_handshake``), and peers without it are rejected. A token keeps out everything that reaches the port by mistake
or by malice, but it does not protect from eavesdropping.

Or the endpoint contains the listener's public key: then the handshake is CURVE (``curve``), both ends authenticate with
their keys, and everything is encrypted.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

MAX_KEY_CHARS: Final = 64  # Characters.
_PUBLIC: Final = re.compile(b"[0-9a-f]{64}")
_TOKEN: Final = re.compile(rb"[0-9A-Za-z]{0,%d}" % MAX_KEY_CHARS)
_ADDRESS: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


class KeyPair(NamedTuple):
    """CURVE key pair, in hexadecimal digits."""

    public: str
    secret: str


def new_pair() -> KeyPair:
    """Generate a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def public_of(secret: str) -> str:
    """Return the public key that belongs to a secret key."""
    return bytes(z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret))))).hex()


class AuthPolicy(NamedTuple):
    """Authentication policy of a listener.

    ``is_authorized``: whether the owner of this public key may connect now. ``reject_explicitly``: whether a rejected
    peer receives an ERROR; with an ERROR it stops reconnecting, without one it keeps trying. ``key_pairs``: all key
    pairs that this listener accepts connections for at the moment, instead of ``pair`` alone. ``on_authenticated``:
    callback with the key of each authenticated peer and the public key of this listener that it used.
    ``may_use_identity``: whether the owner of this key may use this identity even if another key has it; without the
    callback, an identity belongs to the key that used it first.
    """

    pair: KeyPair
    is_authorized: Callable[[str], bool]
    reject_explicitly: bool = True
    key_pairs: Callable[[], tuple[KeyPair, ...]] | None = None
    on_authenticated: Callable[[str, str], None] | None = None
    may_use_identity: Callable[[str, bytes], bool] | None = None

    @property
    def pairs(self) -> tuple[KeyPair, ...]:
        return (self.pair,) if self.key_pairs is None else self.key_pairs()


def new_token() -> bytes:
    """Generate a token for a listener that accepts only peers with its token."""
    return secrets.token_hex(16).encode()


def with_key(endpoint: str, key: bytes) -> str:
    """Return the endpoint with a token or key in it, for peers that shall connect: ``tcp://KEY@HOST:PORT``."""
    return f"tcp://{key.decode()}@{endpoint.removeprefix('tcp://')}" if key else endpoint


def address_and_key(endpoint: str) -> tuple[str, bytes]:
    """Split an endpoint made by ``with_key`` into address and key."""
    key, at, address = endpoint.removeprefix("tcp://").rpartition("@")
    return (f"tcp://{address}", key.encode()) if at else (endpoint, b"")


def public_key_in(key: bytes) -> str | None:
    """Return the key of an endpoint if it is a public key (CURVE is required); None if it is a token or empty."""
    return key.decode() if _PUBLIC.fullmatch(key) else None


def via_relay(endpoint: str, relay: str, ticket: str) -> str:
    """Return the endpoint of a listener that is reached through a relay: ``tcp://KEY@RELAY/TICKET``.

    The key is the listener's, because the handshake is with the listener, not with the relay.
    """
    return with_key(f"{relay}/{ticket}", address_and_key(endpoint)[1])


def split_ticket(endpoint: str) -> tuple[str, str]:
    """Split an address made by ``via_relay`` into the address to connect to and the ticket (empty: none)."""
    place, _, ticket = endpoint.removeprefix("tcp://").partition("/")
    return f"tcp://{place}", ticket


def with_host(endpoint: str, host: str) -> str:
    """Return the endpoint with this host in place of ``*``; unchanged if it names a host."""
    address, key = address_and_key(endpoint)
    shown = f"[{host}]" if ":" in host else host
    return with_key(address.replace("tcp://*:", f"tcp://{shown}:", 1), key)


def is_address(endpoint: str) -> bool:
    """Whether a connection to this endpoint can be attempted. Validates endpoints that peers report about themselves.

    Host names are rejected: a lookup may block for as long as a foreign name server likes, and listeners report
    numbers.
    """
    address, key = address_and_key(endpoint)
    match = _ADDRESS.fullmatch(address)
    try:
        ipaddress.ip_address((match[1] or match[2]) if match else "")
    except ValueError:
        return False
    is_key = _TOKEN.fullmatch(key) is not None and endpoint.startswith("tcp://")
    return match is not None and 0 < int(match[3]) < 1 << 16 and is_key


def is_elsewhere(endpoint: str) -> bool:
    """Whether an endpoint made by ``with_key`` has an address that other machines use."""
    match = _ADDRESS.fullmatch(address_and_key(endpoint)[0])
    return match is not None and not ipaddress.ip_address(match[1] or match[2]).is_loopback

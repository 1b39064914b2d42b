"""Keys of doors, which are a part of their addresses.

A secret word, for those who are told where to speak: whoever knocks names it in the handshake (``mechanisms``), and
nobody else is heard. It keeps out whatever reaches a port by mistake or by malice, but not who can read along.

Or the door's public key: then it has a lock, and who knocks shows a key of its own (``curve``).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

MOST_KEY: Final = 64  # characters
_PUBLIC: Final = re.compile(b"[0-9a-f]{64}")
_WORD: Final = re.compile(rb"[0-9A-Za-z]{0,%d}" % MOST_KEY)
_ADDRESS: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


class KeyPair(NamedTuple):
    """A pair of CURVE's keys, in hexadecimal digits."""

    public: str
    secret: str


def new_pair() -> KeyPair:
    """Draw a pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def public_of(secret: str) -> str:
    """The public half that belongs to a secret one."""
    return bytes(z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret))))).hex()


class Lock(NamedTuple):
    """What a door asks of who knocks. ``opens``: may who has this public key speak here now? ``says_no``: is it told so
    if it may not? Told so, it knocks no more; told nothing, it knocks again. ``answers``: the pairs that this door
    answers to now, in the place of ``pair`` alone. ``came``: called with the key of who came in, and with the public
    key of the door that it knew. ``names``: may who shows this key be called so, whoever else is? Without it a name is
    whose key came with it first."""

    pair: KeyPair
    opens: Callable[[str], bool]
    says_no: bool = True
    answers: Callable[[], tuple[KeyPair, ...]] | None = None
    came: Callable[[str, str], None] | None = None
    names: Callable[[str, bytes], bool] | None = None

    @property
    def pairs(self) -> tuple[KeyPair, ...]:
        return (self.pair,) if self.answers is None else self.answers()


def new_key() -> bytes:
    """Draw a key for a door at which only those are heard who were told of it."""
    return secrets.token_hex(16).encode()


def keyed(endpoint: str, key: bytes) -> str:
    """The address that is told to those who shall speak there: ``tcp://KEY@HOST:PORT``."""
    return f"tcp://{key.decode()}@{endpoint.removeprefix('tcp://')}" if key else endpoint


def address_and_key(endpoint: str) -> tuple[str, bytes]:
    """Take apart what ``keyed`` put together."""
    key, at, address = endpoint.removeprefix("tcp://").rpartition("@")
    return (f"tcp://{address}", key.encode()) if at else (endpoint, b"")


def public_key_in(key: bytes) -> str | None:
    """The public key that is in an address, if it is one: the door has a lock, then. Else it is a word, or nothing."""
    return key.decode() if _PUBLIC.fullmatch(key) else None


def by_relay(endpoint: str, relay: str, ticket: str) -> str:
    """The address of a door that is reached through another machine: ``tcp://KEY@RELAY/TICKET``, with the door's own
    key, for it is the door that the handshake is with."""
    return keyed(f"{relay}/{ticket}", address_and_key(endpoint)[1])


def without_ticket(endpoint: str) -> tuple[str, str]:
    """Take apart what ``by_relay`` put together: where to connect, and the ticket to show there (empty: none)."""
    place, _, ticket = endpoint.removeprefix("tcp://").partition("/")
    return f"tcp://{place}", ticket


def reached(endpoint: str, host: str) -> str:
    """The address with this host, if it names none (``*``)."""
    address, key = address_and_key(endpoint)
    shown = f"[{host}]" if ":" in host else host
    return keyed(address.replace("tcp://*:", f"tcp://{shown}:", 1), key)


def is_address(endpoint: str) -> bool:
    """Can a connection be tried to it? To be asked of what others say of themselves. Names of hosts are none: looking
    one up takes as long as somebody else likes, and doors tell numbers."""
    address, key = address_and_key(endpoint)
    found = _ADDRESS.fullmatch(address)
    try:
        ipaddress.ip_address((found[1] or found[2]) if found else "")
    except ValueError:
        return False
    is_key = _WORD.fullmatch(key) is not None and endpoint.startswith("tcp://")
    return found is not None and 0 < int(found[3]) < 1 << 16 and is_key

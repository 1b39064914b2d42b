"""Keys of doors: a secret word in the address, for those who are told where to speak.

Whoever knocks there names it in the handshake (``mechanisms``), and nobody else is heard. It keeps out whatever reaches
a port by mistake or by malice, but not who can read along: that is for encryption.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from typing import Final

MOST_KEY: Final = 64  # characters
_ADDRESS: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


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


def is_address(endpoint: str) -> bool:
    """Can a connection be tried to it? To be asked of what others say of themselves. Names of hosts are none: looking
    one up takes as long as somebody else likes, and doors tell numbers."""
    address, key = address_and_key(endpoint)
    found = _ADDRESS.fullmatch(address)
    try:
        ipaddress.ip_address((found[1] or found[2]) if found else "")
    except ValueError:
        return False
    return found is not None and 0 < int(found[3]) < 1 << 16 and key.isascii() and len(key) <= MOST_KEY

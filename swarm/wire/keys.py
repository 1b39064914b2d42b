"""Keys of doors: a secret word in the address, for those who are told where to speak.

Whoever knocks there names it in the handshake (``zmtp``), and nobody else is heard. It keeps out whatever reaches a
port by mistake or by malice, but not who can read along: that is for encryption.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

_ADDRESS: Final = re.compile(r"tcp://(?:\w+@)?(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9._-]+):(\d{1,5})")


def new_key() -> bytes:
    """For a door that only those are heard at who were told of it."""
    return secrets.token_hex(16).encode()


def keyed(endpoint: str, key: bytes) -> str:
    """The address that is told to those who shall speak there: ``tcp://KEY@HOST:PORT``."""
    return f"tcp://{key.decode()}@{endpoint.removeprefix('tcp://')}" if key else endpoint


def address_and_key(endpoint: str) -> tuple[str, bytes]:
    """What ``keyed`` put together."""
    key, at, address = endpoint.removeprefix("tcp://").rpartition("@")
    return (f"tcp://{address}", key.encode()) if at else (endpoint, b"")


def is_address(endpoint: str) -> bool:
    """Can a connection be tried to it? To be asked of what others say of themselves."""
    found = _ADDRESS.fullmatch(endpoint)
    return found is not None and 0 < int(found[1]) < 1 << 16

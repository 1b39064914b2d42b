"""Log events in the native format of systemd's journal: each key becomes a field, to search and filter by.

``journalctl SWARM_EVENT=plan_serving``, ``journalctl SWARM_REQUEST=…``. Used by a process whose stderr is the journal;
writes to the journal's socket (systemd.journal-fields(7)) without blocking. An event that the journal does not accept
goes to stderr, as a line.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

SOCKET: Final = "/run/systemd/journal/socket"
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_NOT_IN_NAMES: Final = re.compile(r"[^A-Z0-9_]")
_MAX_NAME: Final = 57  # 64, the journal's limit, minus our prefix.
_MAX_BYTES: Final = 48 << 10  # Of a field: a datagram holds about 200 KiB.


def is_journal_stream(environment: Mapping[str, str], descriptor: int | None) -> bool:
    """Whether this descriptor is the stream with which systemd connected the process to the journal."""
    if descriptor is None or "JOURNAL_STREAM" not in environment:
        return False
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environment["JOURNAL_STREAM"] == f"{status.st_dev}:{status.st_ino}"


class JournalSocket:
    """Client of the journal's socket."""

    def __init__(self, address: str = SOCKET) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def send(self, event: Mapping[str, Any]) -> bool:
        """Send an event. Return False if the journal does not accept it now."""
        try:
            self._socket.sendto(encode_entry(event), self._address)
        except OSError:
            return False
        return True


def encode_entry(event: Mapping[str, Any]) -> bytes:
    """Encode an event in the journal's native protocol."""
    level = str(event.get("level", "info"))
    rest = {key: value for key, value in event.items() if key not in ("event", "level", "timestamp", "module")}
    exception = rest.pop("exception", None)
    message = " ".join([str(event.get("event", "")), *(f"{key}={value}" for key, value in rest.items())])
    if exception is not None:
        message += f"\n{exception}"
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(_PRIORITIES.get(level, 6)),
        "SYSLOG_IDENTIFIER": "swarm",
        "SWARM_EVENT": str(event.get("event", "")),
        "SWARM_MODULE": str(event.get("module", "")),
    }
    fields |= {f"SWARM_{_field_name(key)}": str(value) for key, value in rest.items()}
    return b"".join(_encode_field(name, value) for name, value in fields.items())


def _field_name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key.upper())[:_MAX_NAME]


def _encode_field(name: str, value: str) -> bytes:
    content = value.encode(errors="replace")[:_MAX_BYTES]
    if b"\n" in content:
        return name.encode() + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"
    return name.encode() + b"=" + content + b"\n"

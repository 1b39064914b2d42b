"""What the kernel has seen of a tcp connection while it carried what it had to. Nothing is sent for it."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

_TCP_INFO: Final = struct.Struct("=8B24I4Q6IQ")  # of linux/tcp.h, up to the rate of delivery
_ROUND_TRIP_US: Final = 8 + 15  # smoothed
_LEAST_ROUND_TRIP_US: Final = 8 + 24 + 4 + 3
_BYTES_PER_S: Final = _LEAST_ROUND_TRIP_US + 3
_HAD_LITTLE_TO_SEND: Final = 7  # its lowest bit


class Seen(NamedTuple):
    """``round_trip_s``: the least of late. ``bytes_per_s``: 0 if that is not known. ``is_least``: there was never more
    to carry, so that the way may well carry more."""

    round_trip_s: float
    bytes_per_s: float
    is_least: bool


def seen_of(connected: socket.socket) -> Seen | None:
    """Ask the kernel; None if it doesn't say: this is no tcp, no Linux, or an old one. Raises OSError."""
    if connected.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(told) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(told)
    least_us = fields[_LEAST_ROUND_TRIP_US] or fields[_ROUND_TRIP_US]
    return Seen(least_us / 1e6, float(fields[_BYTES_PER_S]), bool(fields[_HAD_LITTLE_TO_SEND] & 1))

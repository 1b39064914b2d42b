"""Round trip and throughput of a TCP connection, as measured by the kernel on its normal traffic. Sends nothing."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

# The prefix of ``struct tcp_info`` of linux/tcp.h, up to the delivery rate.
_TCP_INFO: Final = struct.Struct("=8B24I4Q6IQ")
_ROUND_TRIP_US: Final = 8 + 15  # Smoothed.
_LEAST_ROUND_TRIP_US: Final = 8 + 24 + 4 + 3
_BYTES_PER_S: Final = _LEAST_ROUND_TRIP_US + 3
_HAD_LITTLE_TO_SEND: Final = 7  # The lowest bit (``delivery_rate_app_limited``).


class TcpInfo(NamedTuple):
    """Kernel's view of a TCP connection.

    ``round_trip_s``: the recent minimum. ``bytes_per_s``: delivery rate, 0 if unknown. ``is_lower_bound``: the
    connection never had enough traffic to fill the path, so the path may well be faster.
    """

    round_trip_s: float
    bytes_per_s: float
    is_lower_bound: bool


def read_tcp_info(connected: socket.socket) -> TcpInfo | None:
    """Query the kernel. Return None without TCP_INFO (no TCP, no Linux, or an old kernel). Raises OSError."""
    if connected.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    raw = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(raw) < _TCP_INFO.size:
        return None
    fields = _TCP_INFO.unpack(raw)
    least_us = fields[_LEAST_ROUND_TRIP_US] or fields[_ROUND_TRIP_US]
    return TcpInfo(least_us / 1e6, float(fields[_BYTES_PER_S]), bool(fields[_HAD_LITTLE_TO_SEND] & 1))

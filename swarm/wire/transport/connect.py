"""Outgoing TCP connections from a plain thread that must also react to other events meanwhile."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import time
from collections.abc import Callable
from math import ceil
from typing import Any, Final

from swarm.errors import ConfigError
from swarm.wire.transport.connection import set_options
from swarm.wire.transport.io_loop import WakeupFd

PAUSE_S: Final = 0.1  # A restarted peer is found quickly …
LONGEST_PAUSE_S: Final = 0.5  # … and an absent one costs little: two SYNs a second.
_CONNECT_S: Final = 3.0  # A host that drops SYNs would cost minutes per attempt.
_ENDPOINT: Final = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/]+)):([0-9]{1,5})")

# Waits for an event of a socket until a deadline; raises OSError.
WaitForEvent = Callable[[socket.socket, int, float], object]


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``. Raises ConfigError for anything else."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700")
    return match[1] or match[2], int(match[3])


def connect_any(target: tuple[str, int], wait: WaitForEvent) -> socket.socket:
    """Connect to the first of the host's addresses that accepts. Raises OSError."""
    failure = OSError(errno.EHOSTUNREACH, "the host has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(*target, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect(sock, address, wait)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _connect(sock: socket.socket, address: Any, wait: WaitForEvent) -> None:
    set_options(sock)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        wait(sock, select.POLLOUT, time.monotonic() + _CONNECT_S)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    if sock.getsockname() == sock.getpeername():  # TCP self-connect: an ephemeral port can connect to itself.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens there")


def wait_for_any(give_up_at: float | None, *watched: WakeupFd | tuple[socket.socket, int]) -> dict[int, int]:
    """Wait until one of these has an event. Return the events by descriptor. Without ``give_up_at`` there is no
    timeout."""
    poll = select.poll()
    for source in watched:
        if isinstance(source, WakeupFd):
            poll.register(source, select.POLLIN)
        else:
            poll.register(*source)
    left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
    return dict(poll.poll(None if left_s is None else ceil(left_s * 1000)))

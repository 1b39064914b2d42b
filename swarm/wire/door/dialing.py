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
from swarm.wire.door.connection import set_options
from swarm.wire.door.watch import Wake

PAUSE_S: Final = 0.1  # A restarted peer is found quickly …
LONGEST_PAUSE_S: Final = 0.5  # … and an absent one costs little: two SYNs a second.
_CONNECT_S: Final = 3.0  # A host that drops SYNs would cost minutes per attempt.
_ENDPOINT: Final = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/]+)):([0-9]{1,5})")

# Waits for an event of a socket until a deadline; raises OSError.
Await = Callable[[socket.socket, int, float], object]


def place_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``. Raises ConfigError for anything else."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700")
    return found[1] or found[2], int(found[3])


def dialled(place: tuple[str, int], wait: Await) -> socket.socket:
    """Connect to the first of the host's addresses that accepts. Raises OSError."""
    failure = OSError(errno.EHOSTUNREACH, "the host has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(*place, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            _connect(made, address, wait)
        except OSError as error:
            made.close()
            failure = error
        else:
            return made
    raise failure


def _connect(made: socket.socket, address: Any, wait: Await) -> None:
    set_options(made)
    code = made.connect_ex(address)
    if code == errno.EINPROGRESS:
        wait(made, select.POLLOUT, time.monotonic() + _CONNECT_S)
        code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    if made.getsockname() == made.getpeername():  # TCP self-connect: an ephemeral port can connect to itself.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens there")


def wait_for(give_up_at: float | None, *watched: Wake | tuple[socket.socket, int]) -> dict[int, int]:
    """Wait until one of these has an event. Return the events by descriptor. Without ``give_up_at`` there is no
    timeout."""
    poll = select.poll()
    for each in watched:
        if isinstance(each, Wake):
            poll.register(each, select.POLLIN)
        else:
            poll.register(*each)
    left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
    return dict(poll.poll(None if left_s is None else ceil(left_s * 1000)))

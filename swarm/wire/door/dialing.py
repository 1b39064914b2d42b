"""Connecting outwards from a thread that watches something else meanwhile, without waiting for ever."""

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

PAUSE_S: Final = 0.1  # a peer that starts again is found at once …
LONGEST_PAUSE_S: Final = 0.5  # … and one that stays away costs little: two SYNs a second
_CONNECT_S: Final = 3.0  # a host that swallows SYNs would cost minutes per attempt
_ENDPOINT: Final = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/]+)):([0-9]{1,5})")

Await = Callable[[socket.socket, int, float], object]  # a socket, for this event, until then; raises OSError


def place_of(endpoint: str) -> tuple[str, int]:
    """The host and the port in ``tcp://HOST:PORT``. Raises ConfigError if it is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(f"{endpoint!r} is no endpoint like tcp://127.0.0.1:5700")
    return found[1] or found[2], int(found[3])


def dialled(place: tuple[str, int], wait: Await) -> socket.socket:
    """Connect to any of the addresses that the host has. Raises OSError."""
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
    if made.getsockname() == made.getpeername():  # a port of the kernel's own choice can meet itself
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")


def wait_for(give_up_at: float | None, *watched: Wake | tuple[socket.socket, int]) -> dict[int, int]:
    """Wait until one of these has news; what there is. Without ``give_up_at``, for as long as it takes."""
    poll = select.poll()
    for each in watched:
        if isinstance(each, Wake):
            poll.register(each, select.POLLIN)
        else:
            poll.register(*each)
    left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
    return dict(poll.poll(None if left_s is None else ceil(left_s * 1000)))

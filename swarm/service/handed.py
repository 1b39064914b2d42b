"""Socket activation: listening sockets that systemd holds open and passes to the process (sd_listen_fds(3)).

While the process restarts, new connections wait in the kernel's queue, and none is refused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from typing import Final

_FIRST: Final = 3  # the first passed descriptor

_Place = tuple[str, int]
_doors: dict[_Place, socket.socket] = {}


def take_all(environment: MutableMapping[str, str]) -> list[str]:
    """Take the sockets passed to this process, once, at its start; return their addresses.

    The variables are removed, since they do not concern child processes.
    """
    count, of = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if not count.isdecimal() or of != str(os.getpid()):
        return []
    for descriptor in range(_FIRST, _FIRST + int(count)):
        os.set_inheritable(descriptor, False)
        door = socket.socket(fileno=descriptor)
        if door.family in (socket.AF_INET, socket.AF_INET6) and door.type == socket.SOCK_STREAM:
            _doors[_place(*door.getsockname()[:2])] = door
        else:
            door.close()
    return [f"{host} port {port}" for host, port in _doors]


def take(host: str, port: int) -> socket.socket | None:
    """Return the socket that listens there, if it was passed and is not taken yet."""
    try:
        door = _doors.pop(_place(host.strip("[]"), port), None)
    except ValueError:  # a name, not an address
        return None
    if door is not None:
        door.setblocking(False)
    return door


def left() -> list[str]:
    """Close the sockets that were not taken; return their addresses."""
    unused = [f"{host} port {port}" for host, port in _doors]
    for door in _doors.values():
        door.close()
    _doors.clear()
    return unused


def _place(host: str, port: int) -> _Place:
    return str(ipaddress.ip_address(host)), port

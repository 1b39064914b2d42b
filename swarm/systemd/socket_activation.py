"""Socket activation: listening sockets that systemd holds open and passes to the process (sd_listen_fds(3)).

While the process restarts, new connections wait in the kernel's queue, and none is refused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from typing import Final

_FIRST_DESCRIPTOR: Final = 3  # the first passed descriptor

_Address = tuple[str, int]
_sockets: dict[_Address, socket.socket] = {}


def adopt_sockets(environment: MutableMapping[str, str]) -> list[str]:
    """Take the sockets passed to this process, once, at its start; return their addresses.

    The variables are removed, since they do not concern child processes.
    """
    count, of = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if not count.isdecimal() or of != str(os.getpid()):
        return []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        if listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM:
            _sockets[_address(*listener.getsockname()[:2])] = listener
        else:
            listener.close()
    return [f"{host} port {port}" for host, port in _sockets]


def take_socket(host: str, port: int) -> socket.socket | None:
    """Return the socket that listens there, if it was passed and is not taken yet."""
    try:
        listener = _sockets.pop(_address(host.strip("[]"), port), None)
    except ValueError:  # a name, not an address
        return None
    if listener is not None:
        listener.setblocking(False)
    return listener


def close_unused() -> list[str]:
    """Close the sockets that were not taken; return their addresses."""
    unused = [f"{host} port {port}" for host, port in _sockets]
    for listener in _sockets.values():
        listener.close()
    _sockets.clear()
    return unused


def _address(host: str, port: int) -> _Address:
    return str(ipaddress.ip_address(host)), port

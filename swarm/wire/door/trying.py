"""Whether a door can be reached from here: found out before anybody counts on it."""

from __future__ import annotations

import socket
from typing import Final

from swarm.wire.addresses import host_of, is_loopback, port_of
from swarm.wire.door.keys import address_and_key, without_ticket

PATIENCE_S: Final = 3.5  # a first packet that is lost is sent again after one second, and after three


def why_unreachable(endpoint: str, patience_s: float = PATIENCE_S) -> str:
    """Connect, and say why that was in vain; empty: it wasn't, or the door is on this machine. Blocks until then."""
    address = without_ticket(address_and_key(endpoint)[0])[0]
    host = host_of(address)
    if is_loopback(host):
        return ""
    try:
        socket.create_connection((host, port_of(address)), patience_s).close()
    except TimeoutError:
        return f"nothing answers at {address} within {patience_s:g} s, as if a firewall kept it shut"
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""

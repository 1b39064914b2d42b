"""Whether a door can be reached from here: found out before anybody counts on it.

Who listens there must show that it is that door, by its key: an address of a private network is another machine's on
another network, a forwarded port leads somewhere. Who says nothing is taken for the door: its process may be computing.
Who hangs up, or answers as something else, is asked again meanwhile: a door that has its hands full hangs up, too.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from swarm.errors import WireError
from swarm.wire.addresses import host_of, is_loopback, port_of
from swarm.wire.door.keys import address_and_key, public_key_in, without_ticket
from swarm.wire.door.knocking import Trying
from swarm.wire.door.zmtp import HANDSHAKE_BYTES, Inlet, as_command, greeting

PATIENCE_S: Final = 3.5  # a first packet that is lost is sent again after one second, and after three
ANSWER_S: Final = 1.0  # of which an answer is waited for
_PAUSE_S: Final = 0.25


def why_unreachable(endpoint: str, patience_s: float = PATIENCE_S) -> str:
    """Connect, and say why that was in vain; empty: it wasn't, or the door is on this machine. Blocks until then. By a
    relay, it is the relay that is tried."""
    place, key = address_and_key(endpoint)
    address, ticket = without_ticket(place)
    host = host_of(address)
    if is_loopback(host):
        return ""
    door = None if ticket else public_key_in(key)
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection(
                (host, port_of(address)), max(_PAUSE_S, give_up_at - time.monotonic())
            ) as made:
                if door is None or _is_door(made, door):
                    return ""
        except TimeoutError:
            return f"nothing answers at {address} within {patience_s:g} s, as if a firewall kept it shut"
        except OSError as error:
            return f"{address}: {error.strerror or error}"
        if time.monotonic() + _PAUSE_S >= give_up_at:
            return f"something else listens at {address}: it does not have that door's key"
        time.sleep(_PAUSE_S)


def _is_door(made: socket.socket, door: str) -> bool:
    """Has who listens there the secret half of this key? Or may it have, since it says nothing?"""
    trying = Trying(door)
    inlet = Inlet(HANDSHAKE_BYTES, trying)
    give_up_at = time.monotonic() + ANSWER_S
    try:
        made.sendall(greeting(trying.name, listens=False) + as_command(trying.first))
        while not trying.is_proven:
            made.settimeout(max(0.001, give_up_at - time.monotonic()))
            if not (came := made.recv(HANDSHAKE_BYTES)):
                return False
            inlet.feed(came)
            inlet.shake()
    except TimeoutError:
        return True
    except (OSError, WireError):
        return False
    return True

"""Where a worker from elsewhere may be reached: at the address that its connection comes from, or in a network that the
broker's settings allow. Pure.

Other members connect to the address that a worker names. Without this rule a member could have them connect anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from swarm.wire.addresses import host_of
from swarm.wire.door.keys import address_and_key

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
UNKNOWN: Final = "an address that is not known any more"


def why_not_at(endpoint: str, comes_from: str, allowed: Sequence[Network]) -> str:
    """Return why a worker may not be reached at ``endpoint``; empty: it may. ``comes_from``: the remote address of its
    control connection; empty: that connection has ended."""
    named = _plain(host_of(address_and_key(endpoint)[0]))
    if comes_from and named == _plain(comes_from):
        return ""
    if any(named in network for network in allowed):
        return ""
    shown = str(_plain(comes_from)) if comes_from else UNKNOWN
    return f"it names the address {named}, and comes from {shown}; broker.worker_networks may allow the former"


def _plain(text: str) -> _Address:
    """Parse an address. One of IPv4 that is written as IPv6 is the former; a zone is left out."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address

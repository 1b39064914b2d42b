"""Rule for worker addresses: a remote worker may be reached at its connection's source address, or in a network that
the broker's settings allow. Pure.

Other members connect to the address that a worker reports. Without this rule a member could direct their connections
anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from swarm.wire.addresses import host_of
from swarm.wire.transport.keys import address_and_key, is_address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
UNKNOWN_ADDRESS: Final = "an address that is not known any more"


def address_error(endpoint: str, remote_address: str, allowed: Sequence[Network]) -> str:
    """Return why a worker may not use this endpoint; empty if it may. ``remote_address``: remote address of its control
    connection; empty if that has ended."""
    named = _parse_address(host_of(address_and_key(endpoint)[0]))
    if remote_address and named == _parse_address(remote_address):
        return ""
    if any(named in network for network in allowed):
        return ""
    shown = str(_parse_address(remote_address)) if remote_address else UNKNOWN_ADDRESS
    return f"it names the address {named}, and comes from {shown}; broker.worker_networks may allow the former"


def usable_kv_endpoint(kv_endpoint: str, endpoint: str, error: str) -> str:
    """Return a worker's listener for copies of keys and values; empty if other workers may not connect to it.

    It must be at the address of the worker's ``endpoint``, for which ``address_error`` returned ``error``.
    """
    is_beside = is_address(kv_endpoint) and host_of(kv_endpoint) == host_of(endpoint)
    return kv_endpoint if is_beside and not error else ""


def _parse_address(text: str) -> _Address:
    """Parse an address. An IPv4-mapped IPv6 address becomes IPv4; a zone is removed."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address

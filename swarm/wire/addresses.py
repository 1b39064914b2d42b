"""Addresses of this machine (of an interface, or toward a host), and endpoints in ``tcp://HOST:PORT`` form."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from swarm.errors import ConfigError


def resolve_own(names: Sequence[str]) -> tuple[str, ...]:
    """Resolve addresses and names of interfaces to addresses without duplicates. Raises ConfigError if one does not
    exist."""
    resolved: dict[str, None] = {}
    for text in names:
        resolved.update(dict.fromkeys([text] if is_address(text) else _interface_addresses(text)))
    return tuple(resolved)


def is_address(text: str) -> bool:
    """Whether this is an IP address, not a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _interface_addresses(name: str) -> list[str]:
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise ConfigError(f"there is no network interface {name!r} here, only {known}; name one of them, or an address")
    addresses = [each.address for each in interfaces[name] if each.family in (socket.AF_INET, socket.AF_INET6)]
    # A link-local address is useless without the interface's name, which differs between machines.
    usable = [
        address for address in addresses if "%" not in address and not ipaddress.ip_address(address).is_link_local
    ]
    if not usable:
        raise ConfigError(f"the network interface {name!r} has no usable address; give it one")
    return usable


def local_address_for(url: str) -> str:
    """Return this machine's address for connections to the host in ``url``, as the kernel would choose it now.

    Sends nothing. Raises ConfigError if there is no route.
    """
    host = host_of(url)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port_of(url), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this machine has no route to {host} ({error.strerror}): check the address and the network"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this host."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def host_of(url: str) -> str:
    """Return the host in ``tcp://[KEY@]HOST:PORT``, without brackets."""
    return _split(url)[0]


def port_of(url: str) -> int:
    return _split(url)[1]


def _split(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition("@")[2].rpartition(":")
    if not url.startswith("tcp://") or not host or not port.isdecimal():
        raise _no_address(url)
    return host.strip("[]"), int(port)


def _no_address(url: str) -> ConfigError:
    return ConfigError(f"{url!r} is no broker's address: write it as tcp://HOST:PORT, for example tcp://127.0.0.1:5700")


def with_port(place: str, port: int) -> str:
    """Return the endpoint of an address or host name; ``port`` is the default if it has none of its own."""
    if ":" in place and is_address(place):
        return f"tcp://[{place}]:{port}"
    has_port = place.rpartition("]")[2].count(":") == 1
    return f"tcp://{place}" if has_port else f"tcp://{place}:{port}"


def control_endpoint(url: str) -> str:
    """Return the endpoint for workers: the control channel listens one port above the client channel."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal():
        raise _no_address(url)
    return f"tcp://{host}:{int(port) + 1}"

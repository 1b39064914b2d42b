"""Credentials for a broker: its endpoint, and the key pair with which this machine authenticates."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError, Unavailable
from swarm.lock import known
from swarm.lock.rotation import Home
from swarm.wire.addresses import host_of
from swarm.wire.door.keys import KeyPair

DEFAULT_URL: Final = "tcp://127.0.0.1:5700"
ROLES: Final = ("client", "gateway", "admin")  # Roles with which a client program may use a membership.


@dataclass(frozen=True, slots=True)
class Access:
    """Address of a broker and the keys for it. ``url`` is for people; ``endpoint`` includes the broker's public key
    where authentication is required."""

    url: str
    endpoint: str
    pair: KeyPair | None = None
    home: Home | None = None  # Where the keys are stored; they may be rotated.


def access_to(url: str | None, state_dir: Path | None = None) -> Access:
    """Find the broker at this address, or the swarm in which this machine has this name.

    Without ``url``: the swarm that was joined last, else the broker on this machine. Raises Unavailable for a broker on
    another machine whose swarm was not joined.
    """
    if url is not None and is_here(url):
        return Access(url, url)
    try:
        state_dir = state_dir or known.default_state_dir()
        found = known.find(state_dir, url, roles=ROLES)
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    if found is not None:
        return access_by(found, state_dir)
    if url is None:
        return Access(DEFAULT_URL, DEFAULT_URL)
    raise Unavailable(
        f"{url} is on another machine, and this one has not joined that swarm: ask there for an invitation (swarmctl "
        "invite --role client), and give it with --join"
    )


def access_by(joined: known.Known, state_dir: Path) -> Access:
    """Return the credentials of a stored membership."""
    return Access(joined.addresses[0], joined.endpoint, joined.pair, Home(state_dir, joined))


def is_here(url: str) -> bool:
    """Whether the broker is on this machine, so that no key is needed."""
    if not url.startswith("tcp://"):
        return True  # A path, or no address at all; that is reported where it is used.
    try:
        host = host_of(url)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ConfigError:
        return True
    except ValueError:
        return False

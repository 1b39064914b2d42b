"""Credentials for a broker: its endpoint, and the key pair with which this machine authenticates."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.auth import memberships
from swarm.auth.rotation import CredentialStore
from swarm.errors import ConfigError, Unavailable
from swarm.wire.addresses import host_of
from swarm.wire.transport.keys import KeyPair

DEFAULT_URL: Final = "tcp://127.0.0.1:5700"
ROLES: Final = ("client", "gateway", "admin")  # Roles with which a client program may use a membership.


@dataclass(frozen=True, slots=True)
class BrokerCredentials:
    """Address of a broker and the keys for it. ``url`` is for people; ``endpoint`` includes the broker's public key
    where authentication is required."""

    url: str
    endpoint: str
    pair: KeyPair | None = None
    store: CredentialStore | None = None  # Where the keys are stored; they may be rotated.


def credentials_for(url: str | None, state_dir: Path | None = None) -> BrokerCredentials:
    """Find the broker at this address, or the swarm in which this machine has this name.

    Without ``url``: the swarm that was joined last, else the broker on this machine. Raises Unavailable for a broker on
    another machine whose swarm was not joined.
    """
    if url is not None and is_local(url):
        return BrokerCredentials(url, url)
    try:
        state_dir = state_dir or memberships.default_state_dir()
        membership = memberships.find(state_dir, url, roles=ROLES)
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    if membership is not None:
        return credentials_of(membership, state_dir)
    if url is None:
        return BrokerCredentials(DEFAULT_URL, DEFAULT_URL)
    raise Unavailable(
        f"{url} is on another machine, and this one has not joined that swarm: ask there for an invitation (swarmctl "
        "invite --role client), and give it with --join"
    )


def credentials_of(joined: memberships.JoinedSwarm, state_dir: Path) -> BrokerCredentials:
    """Return the credentials of a stored membership."""
    return BrokerCredentials(joined.addresses[0], joined.endpoint, joined.pair, CredentialStore(state_dir, joined))


def is_local(url: str) -> bool:
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

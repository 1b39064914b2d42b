"""Where the broker is, and by which key it knows this machine."""

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
ROLES: Final = ("client", "gateway", "admin")


@dataclass(frozen=True, slots=True)
class Access:
    """``url`` is for people; ``endpoint`` has the broker's public key in it, where it has a lock."""

    url: str
    endpoint: str
    pair: KeyPair | None = None
    home: Home | None = None  # where the keys are kept, which may change


def access_to(url: str | None, state_dir: Path | None = None) -> Access:
    """Find the broker at this address, or the swarm in which this machine has this name. Without any: the swarm that
    was joined last, else the broker on this machine. Raises Unavailable for one elsewhere that was not joined."""
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
    """To a swarm that was joined, as it is kept there."""
    return Access(joined.addresses[0], joined.endpoint, joined.pair, Home(state_dir, joined))


def is_here(url: str) -> bool:
    """Is it on this machine, so that no key is needed?"""
    if not url.startswith("tcp://"):
        return True  # a path; or nothing at all, which is complained about where it is used
    try:
        host = host_of(url)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ConfigError:
        return True
    except ValueError:
        return False

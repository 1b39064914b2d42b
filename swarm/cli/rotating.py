"""Rotation of this machine's own key: the steps of ``auth.rotation``, each sent to the broker by a separate client."""

from __future__ import annotations

import contextlib

import msgspec

from swarm.client.blocking import Client
from swarm.errors import ConfigError, RequestFailed, Unavailable
from swarm.lock.access import Access
from swarm.lock.known import Known
from swarm.lock.rotation import Home, rotate


def rotate_by_order(home: Home) -> str:
    """Change this machine's key on the broker's order, unless another process here has already done it.

    Returns the error, or an empty string. After a failure, the broker repeats the order at the next connection.
    """
    kept = home.renewed()
    if kept is not None and kept.secret != home.joined.secret:
        return ""
    try:
        change_key(home)
    except (ConfigError, RequestFailed, Unavailable) as error:
        return str(error)
    return ""


def change_key(home: Home) -> Known:
    """Change this machine's key. Raises ``ConfigError``, and the broker's ``Unavailable`` or ``RequestFailed``."""
    return rotate(home, _tell, _knock)


def _tell(joined: Known, key: str) -> None:
    """Send the new key, authenticated by the present one. If that is no longer valid, an earlier attempt succeeded, and
    the new key authenticates."""
    with _as(joined) as client:
        try:
            client.rotate_key(key)
        except Unavailable:
            assert joined.next is not None
            with _as(msgspec.structs.replace(joined, secret=joined.next)) as successor:
                successor.rotate_key(key)


def _knock(joined: Known) -> None:
    """Connect with the new key, which makes the broker revoke the old one."""
    with _as(joined) as client, contextlib.suppress(RequestFailed):  # a worker may not query, but connecting is enough
        client.query("status")


def _as(joined: Known) -> Client:
    return Client(Access(joined.addresses[0], joined.endpoint, joined.pair))

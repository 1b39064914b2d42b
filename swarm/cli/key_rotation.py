"""Rotation of this machine's own key: the steps of ``auth.rotation``, each sent to the broker by a separate client."""

from __future__ import annotations

import contextlib

import msgspec

from swarm.auth.access import BrokerCredentials
from swarm.auth.memberships import JoinedSwarm
from swarm.auth.rotation import CredentialStore, rotate
from swarm.client.blocking import Client
from swarm.errors import ConfigError, RequestFailed, Unavailable


def rotate_on_order(home: CredentialStore) -> str:
    """Change this machine's key on the broker's order, unless another process here has already done it.

    Returns the error, or an empty string. After a failure, the broker repeats the order at the next connection.
    """
    membership = home.newer()
    if membership is not None and membership.secret != home.membership.secret:
        return ""
    try:
        change_key(home)
    except (ConfigError, RequestFailed, Unavailable) as error:
        return str(error)
    return ""


def change_key(home: CredentialStore) -> JoinedSwarm:
    """Change this machine's key. Raises ``ConfigError``, and the broker's ``Unavailable`` or ``RequestFailed``."""
    return rotate(home, _send_key, _connect)


def _send_key(joined: JoinedSwarm, key: str) -> None:
    """Send the new key, authenticated by the present one. If that is no longer valid, an earlier attempt succeeded, and
    the new key authenticates."""
    with _client_as(joined) as client:
        try:
            client.rotate_key(key)
        except Unavailable:
            assert joined.next is not None
            with _client_as(msgspec.structs.replace(joined, secret=joined.next)) as successor:
                successor.rotate_key(key)


def _connect(joined: JoinedSwarm) -> None:
    """Connect with the new key, which makes the broker revoke the old one."""
    # a worker may not query, but connecting is enough
    with _client_as(joined) as client, contextlib.suppress(RequestFailed):
        client.query("status")


def _client_as(joined: JoinedSwarm) -> Client:
    return Client(BrokerCredentials(joined.addresses[0], joined.endpoint, joined.pair))

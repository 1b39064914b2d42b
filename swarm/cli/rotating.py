"""A machine changes its own key: the steps of ``lock.rotation``, each said to the broker by a client of its own."""

from __future__ import annotations

import contextlib

import msgspec

from swarm.client.blocking import Client
from swarm.errors import ConfigError, RequestFailed, Unavailable
from swarm.lock.access import Access
from swarm.lock.known import Known
from swarm.lock.rotation import Home, rotate


def rotate_by_order(home: Home) -> str:
    """Give this machine a new key, unless another process here has done it since this one knocked. Returns why not;
    what failed, the broker orders again when it is knocked at."""
    kept = home.renewed()
    if kept is not None and kept.secret != home.joined.secret:
        return ""
    try:
        change_key(home)
    except (ConfigError, RequestFailed, Unavailable) as error:
        return str(error)
    return ""


def change_key(home: Home) -> Known:
    """Give this machine a new key. Raises ConfigError, and Unavailable or RequestFailed of the broker."""
    return rotate(home, _tell, _knock)


def _tell(joined: Known, key: str) -> None:
    """Say it with the present key; if that counts no more, this was done before, and the new one does."""
    with _as(joined) as client:
        try:
            client.rotate_key(key)
        except Unavailable:
            assert joined.next is not None
            with _as(msgspec.structs.replace(joined, secret=joined.next)) as successor:
                successor.rotate_key(key)


def _knock(joined: Known) -> None:
    """From now on the old key opens nothing."""
    with _as(joined) as client, contextlib.suppress(RequestFailed):  # a worker may not ask, but it has knocked
        client.query("status")


def _as(joined: Known) -> Client:
    return Client(Access(joined.addresses[0], joined.endpoint, joined.pair))

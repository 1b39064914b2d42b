"""Starting workers anew, one after the other: who there is to start."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarm.client.blocking import Client
from swarm.ctl.upgrade import Rolling
from swarm.errors import Unavailable


class Broker:
    """A stand-in for the client: tells of these workers."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.workers = workers

    def query(self, what: str) -> dict[str, Any]:
        assert what == "nodes"
        return {"workers": list(self.workers)}


def rolling(*workers: dict[str, Any]) -> Rolling:
    return Rolling(cast(Client, Broker(*workers)))


OUT = {"name": "w0", "incarnation": "w0-1", "build": "0.2.0", "state": "out", "layers": None}


def test_nobody_started_anew_is_no_success() -> None:
    """A script must not take silence for an upgrade."""
    with pytest.raises(Unavailable, match="no worker to start anew: swarmctl nodes shows who is out"):
        list(rolling(OUT).run(()))


def test_an_unknown_name_stops_it_before_anybody_is_touched() -> None:
    here = OUT | {"name": "w1", "state": "member"}
    with pytest.raises(Unavailable, match="no worker w7: the workers are w1"):
        list(rolling(here).run(("w1", "w7")))

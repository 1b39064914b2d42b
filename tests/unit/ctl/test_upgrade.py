"""Starting workers anew, one after the other: who there is to start."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarm.client.blocking import Client
from swarm.ctl.upgrade import RollingRestart, check_named, describe_result, describe_total
from swarm.errors import Unavailable


class Broker:
    """A stand-in for the client: tells of these workers."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.workers = workers

    def query(self, what: str) -> dict[str, Any]:
        assert what == "nodes"
        return {"workers": list(self.workers)}

    def stop_worker(self, name: str, *, force: bool, again: bool) -> None:
        """It is back at once."""
        assert again
        self.workers = tuple(
            each | {"incarnation": f"{name}-2"} if (each["name"], each["state"]) == (name, "member") else each
            for each in self.workers
        )


def rolling(*workers: dict[str, Any]) -> RollingRestart:
    return RollingRestart(cast(Client, Broker(*workers)))


OUT = {"name": "w0", "incarnation": "w0-1", "build": "0.2.0", "state": "out", "layers": None}
HERE = OUT | {"name": "w1", "incarnation": "w1-1", "state": "member"}


def test_nobody_started_anew_is_no_success() -> None:
    """A script must not take silence for an upgrade."""
    with pytest.raises(Unavailable, match="no worker to restart: swarmctl nodes shows which are out"):
        list(rolling(OUT).run(()))


def test_an_unknown_name_stops_it_before_anybody_is_touched() -> None:
    with pytest.raises(Unavailable, match="no worker w7: the workers are w1"):
        list(rolling(HERE).run(("w1", "w7")))


def test_who_left_is_told_so_and_what_to_do() -> None:
    """As other verbs tell it; a name that nobody ever had is told beside it. Whoever is back under its name is here."""
    left = OUT | {"state": "left", "reason": "it was asked to leave", "pid": 7, "host": "a"}
    words = r"w0 has left: it was asked to leave; start it again where it ran \(process 7 on a\)"
    with pytest.raises(Unavailable, match=f"^{words}$"):
        list(rolling(left, HERE).run(("w0",)))
    with pytest.raises(Unavailable, match=f"^{words}; no worker w7: the workers are w1$"):
        list(rolling(left, HERE).run(("w0", "w7", "w1")))
    assert describe_total(list(rolling(left | {"name": "w1"}, HERE).run(("w1",)))) == "1 upgraded"


def test_who_is_out_is_told_and_left_as_it_was() -> None:
    """Also in the end; that is a failure if somebody asked for just that one."""
    frozen = OUT | {"reason": "no heartbeat for 704 ms: frozen or cut off"}
    done = list(rolling(HERE, frozen).run(()))
    assert [describe_result(each).split(" after")[0] for each in done] == [
        "w0 is out and was skipped: no heartbeat for 704 ms: frozen or cut off",
        "w1 is back",
    ]
    assert describe_total(done) == "1 upgraded, 1 out and skipped"
    check_named((), done)
    check_named(("w1",), done)
    with pytest.raises(Unavailable, match="w0 could not be restarted: swarmctl nodes shows why"):
        check_named(("w0", "w1"), done)


def test_a_name_of_which_one_process_lives_is_that_ones() -> None:
    """One that is out is remembered for a while; one that has refused layers lives, too."""
    done = list(rolling(HERE, OUT | {"name": "w1", "incarnation": "w1-0"}).run(()))
    assert (len(done), describe_total(done)) == (1, "1 upgraded")
    assert not rolling(HERE | {"state": "refused"}).list_workers()[0].absence

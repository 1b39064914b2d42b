"""``swarmctl version``: who is of which build, and who is of another one than the broker."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from swarm.ctl.inspect import version as command
from swarm.ctl.inspect.versions import compare_versions, render_versions
from swarm.ctl.main import run
from swarm.version import __version__
from swarm.wire.greeting import Greeting
from swarm.wire.messages import Json
from swarm.wire.schema import schema
from tests.unit.ctl.test_config_show_running import server

OURS: Json = {"protocol": list(Greeting(schema=schema()).versions), "messages": schema()}


def worker(name: str, **more: object) -> Json:
    return {"name": name, "state": "member", "build": __version__, **OURS, **more}


def asked(*workers: Json, **status: object) -> Json:
    return compare_versions({"version": __version__, **OURS, **status}, {"workers": list(workers)})


def shown(body: Json) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render_versions(body))
    return [line.strip() for line in capture.get().splitlines() if line.strip()]


def unlike(body: Json) -> dict[object, object]:
    rows = body["processes"]
    assert isinstance(rows, list)
    return {row["process"]: row["unlike"] for row in rows if row["unlike"]}


def test_all_of_one_build() -> None:
    """Each has a line; whoever is gone has none."""
    body = asked(worker("w1"), worker("w0"), worker("w2", state="left", messages="other"))
    assert unlike(body) == {}
    lines = shown(body)
    assert [line.split()[0] for line in lines[2:-1]] == ["broker", "w0", "w1", "swarmctl"]
    assert all(__version__ in line and schema() in line for line in lines[2:-1])
    assert lines[-1] == "· all have the same build"


def test_who_is_out_is_missing() -> None:
    """Nobody knows what it will be when it is back. Another process of its name that is here stands for it."""
    out = [worker(name, state="out", messages="other") for name in ("w2", "w1", "w1", "w0")]
    body = asked(worker("w0"), *out)
    assert (unlike(body), body["out"]) == ({}, ["w1", "w2"])
    assert shown(body)[-2:] == [
        "· all have the same build",
        "· out, so their builds are unknown: w1 and w2 (see swarmctl nodes)",
    ]


def test_unlike_ones_are_pointed_out() -> None:
    """With what they have otherwise than the broker."""
    body = asked(worker("w0"), worker("w1", build="0.0.9"), worker("w2", messages="00ff", protocol=[7]))
    assert unlike(body) == {"w1": ["version"], "w2": ["protocol", "messages"]}
    assert shown(body)[-2:] == [
        "· w1 has another build than the broker: other version",
        "· w2 has another build than the broker: other protocol and messages",
    ]


def test_this_one_may_be_the_stranger() -> None:
    body = asked(worker("w0", build="9.9"), version="9.9")
    assert unlike(body) == {"swarmctl": ["version"]}


def test_what_an_older_broker_does_not_tell_is_not_compared() -> None:
    body = compare_versions({}, {"workers": [{"name": "w0", "state": "member"}]})
    assert unlike(body) == {}
    assert [line.split() for line in shown(body) if line.startswith("w0")] == [["w0", *(["unknown"] * 3)]]
    assert shown(body)[-1] == "· too old to report their messages: broker and w0"


def test_gateways_that_were_asked_stand_beside_the_workers() -> None:
    """By their addresses; one that tells its version alone is compared by that."""
    body = compare_versions(
        {"version": __version__, **OURS},
        {"workers": [worker("w0")]},
        {"http://a:8000": {"version": __version__, **OURS}, "http://b:8000": {"version": "0.0.9"}},
    )
    assert unlike(body) == {"gateway http://b:8000": ["version"]}
    assert [row["process"] for row in body["processes"]] == [  # type: ignore[attr-defined]
        *("broker", "w0", "gateway http://a:8000", "gateway http://b:8000", "swarmctl")
    ]
    assert shown(body)[-2:] == [
        "· gateway http://b:8000 has another build than the broker: other version",
        "· too old to report their messages: gateway http://b:8000",
    ]


class Broker:
    """Of this build, without workers; a client of it."""

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def query(self, what: str) -> Json:
        return {"version": __version__, **OURS} if what == "status" else {"workers": []}


def test_a_gateway_is_asked_with_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that refuses is told in its words, and nothing else."""
    monkeypatch.setattr(command, "open_client", lambda *_: Broker())
    monkeypatch.setenv("MY_KEY", "sw-alice")
    with server(200, json.dumps({"version": "0.0.9", **OURS}).encode()) as (url, asked):
        assert run(["version", "--json", "--gateway", url, "--api-key-env", "MY_KEY"]) == 0
    assert asked == [("/console/me", "Bearer sw-alice")]
    assert unlike(json.loads(capsys.readouterr().out)) == {f"gateway {url}": ["version"]}
    with server(401, b'{"error": {"message": "that takes a key"}}') as (url, _):
        assert run(["version", "--gateway", url]) == 1
    said = capsys.readouterr()
    assert said.err == f"swarmctl: the gateway at {url} answers 401: that takes a key\n"
    assert said.out == ""

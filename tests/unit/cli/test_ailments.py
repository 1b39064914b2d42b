"""``swarmctl doctor``: what it finds in a swarm's reports, with its remedy."""

from __future__ import annotations

import pytest

from swarm.cli.doctor.checks import Finding
from swarm.ctl.look.ailments import Reports, ailments
from swarm.version import __version__
from swarm.wire.greeting import Greeting
from swarm.wire.messages import Json
from swarm.wire.schema import schema

OURS: Json = {"protocol": list(Greeting(schema=schema()).versions), "messages": schema()}
STATUS: Json = {
    "state": "serving",
    "waits_for": "",
    "version": __version__,
    "model": "village",
    "num_stages": 2,
    "epoch": 3,
    "num_running": 4,
    "num_queued": 0,
    "kv_reserved": 100,
    "kv_capacity": 4096,
    "journal_problem": "",
    "journal_notes": [],
    "connections_problem": "",
    "connections_notes": [],
    **OURS,
}
WORKER: Json = {
    "name": "w0",
    "state": "member",
    "verdict": "well",
    "evidence": "",
    "layers": [0, 4],
    "pace": 1.1,
    "lies": 0,
    "unreachable": "",
    "kernels": "own; float32, exact",
    "loop_lag_s": 0.001,
    "round_trip_s": 0.0002,
    "bytes_per_s": 1e9,
    "build": __version__,
    **OURS,
}
STAGE: Json = {"worker": "w0", "seen_steps": 100, "expected_s": 0.010, "seen_s": 0.011}


def found(status: Json | None = None, worker: Json | None = None, stage: Json | None = None) -> list[Finding]:
    workers = [{**WORKER, **(worker or {})}]
    return ailments(
        Reports({**STATUS, **(status or {})}, {"workers": workers}, {"stages": [{**STAGE, **(stage or {})}]})
    )


def test_a_swarm_that_is_well() -> None:
    """Everything that was looked at has a line, and nothing is asked for."""
    assert [(each.about, each.level, each.text, each.remedy) for each in found()] == [
        ("serving", "ok", "village by 2 stages, epoch 3", ""),
        ("queue", "ok", "nobody waits, 4 run", ""),
        ("builds", "ok", f"all of {__version__}", ""),
        ("w0", "ok", "well, with layers 0-3; its way to the broker: 0.2 ms there and back, 954 MiB a second", ""),
        ("predicted", "ok", "w0 10 ms a step, took 11", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "about", "level", "says", "remedy"),
    [
        ({"status": {"state": "waiting", "waits_for": "2 workers"}}, "serving", "trouble", "for 2 workers", "nodes"),
        ({"status": {"journal_problem": "disk full"}}, "journal", "trouble", "disk full", "make room"),
        ({"status": {"journal_notes": ["3 records lost"]}}, "journal", "note", "3 records lost", "recovery.md"),
        ({"status": {"connections_problem": "no descriptors"}}, "doors", "trouble", "no descriptors", "ulimit"),
        ({"status": {"connections_notes": ["kept waiting"]}}, "doors", "note", "kept waiting", "who knocks"),
        ({"status": {"num_queued": 9}}, "queue", "note", "9 wait", "worker helps"),
        ({"status": {"num_queued": 9, "kv_reserved": 4000}}, "queue", "note", "no more room", "more memory"),
        ({"worker": {"build": "0.0.1"}}, "builds", "note", "than the broker: w0", "upgrade --rolling"),
        ({"worker": {"verdict": "hung", "evidence": "no layer for 9 s"}}, "w0", "trouble", "no layer for 9 s", "log"),
        ({"worker": {"verdict": "slow", "evidence": "3 x"}}, "w0", "note", "slow: 3 x", "drain"),
        ({"worker": {"pace": 1.8}}, "w0", "note", "1.8 times as long", "cores"),
        ({"worker": {"lies": 2}}, "w0", "trouble", "proven wrong 2 times", "memory"),
        ({"worker": {"unreachable": "w1 can't reach it: refused"}}, "w0", "note", "w1 can't reach it", "firewall"),
        ({"worker": {"kernels": "torch; bfloat16, inexact"}}, "w0", "note", "not the same bits", "portable"),
        ({"worker": {"loop_lag_s": 0.4}}, "w0", "note", "400 ms late", "swapped"),
        ({"worker": {"round_trip_s": 0.12}}, "w0", "note", "broker: 120 ms there and back", "nearer"),
        ({"worker": {"bytes_per_s": 40_000.0}}, "w0", "note", "39.1 KiB a second", "MTU"),
        ({"stage": {"seen_s": 0.014}}, "predicted", "note", "10 ms a step, took 14", "rebalance"),
    ],
)
def test_each_ailment_has_its_remedy(changes: dict[str, Json], about: str, level: str, says: str, remedy: str) -> None:
    """One finding more than in a swarm that is well, and the others as they were."""
    (ill,) = [each for each in found(**changes) if each.level != "ok"]
    assert (ill.about, ill.level) == (about, level)
    assert says in ill.text
    assert remedy in ill.remedy


def test_who_has_left_is_no_ailment() -> None:
    """But that nobody is left, is one."""
    (ill,) = [each for each in found(worker={"state": "out", "verdict": "dead"}) if each.level != "ok"]
    assert (ill.about, ill.level, ill.text) == ("workers", "trouble", "none is here")


def test_a_few_steps_say_nothing_of_predictions() -> None:
    assert not [each for each in found(stage={"seen_steps": 3, "seen_s": 1.0}) if each.about == "predicted"]

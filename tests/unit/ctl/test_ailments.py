"""``swarmctl doctor``: what it finds in a swarm's reports, with its remedy."""

from __future__ import annotations

import pytest

from swarm.cli.doctor.checks import Finding
from swarm.ctl.inspect.diagnostics import Reports, diagnose
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
    return diagnose(
        Reports({**STATUS, **(status or {})}, {"workers": workers}, {"stages": [{**STAGE, **(stage or {})}]})
    )


def test_a_swarm_that_is_well() -> None:
    """Everything that was looked at has a line, and nothing is asked for."""
    assert [(each.about, each.level, each.text, each.remedy) for each in found()] == [
        ("serving", "ok", "village by 2 stages, epoch 3", ""),
        ("queue", "ok", "none wait, 4 run", ""),
        ("builds", "ok", f"all of {__version__}", ""),
        (
            "w0",
            "ok",
            "well, with layers 0–3; its connection to the broker: 0.2 ms there and back, 954 MiB a second",
            "",
        ),
        ("predicted", "ok", "w0 10 ms a step, took 11", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "about", "level", "says", "remedy"),
    [
        ({"status": {"state": "waiting", "waits_for": "2 workers"}}, "serving", "trouble", "for 2 workers", "nodes"),
        ({"status": {"journal_problem": "disk full"}}, "journal", "trouble", "disk full", "free space"),
        ({"status": {"journal_notes": ["3 records lost"]}}, "journal", "note", "3 records lost", "recovery.md"),
        ({"status": {"connections_problem": "no descriptors"}}, "doors", "trouble", "no descriptors", "ulimit"),
        ({"status": {"connections_notes": ["kept waiting"]}}, "doors", "note", "kept waiting", "that connect so often"),
        ({"status": {"num_queued": 9}}, "queue", "note", "9 wait", "worker helps"),
        ({"status": {"num_queued": 9, "kv_reserved": 4000}}, "queue", "note", "is used up", "or memory"),
        ({"worker": {"build": "0.0.1"}}, "builds", "note", "the broker's: w0", "upgrade --rolling"),
        ({"worker": {"verdict": "hung", "evidence": "no layer for 9 s"}}, "w0", "trouble", "no layer for 9 s", "log"),
        ({"worker": {"verdict": "slow", "evidence": "3 x"}}, "w0", "note", "slow: 3 x", "cores"),
        ({"worker": {"pace": 1.8}}, "w0", "note", "1.8 times as long", "cores"),
        ({"worker": {"lies": 2}}, "w0", "trouble", "proven wrong 2 times", "memory"),
        ({"worker": {"unreachable": "w1 can't reach it: refused"}}, "w0", "note", "w1 can't reach it", "firewall"),
        ({"worker": {"kernels": "torch; bfloat16, inexact"}}, "w0", "note", "not the same bits", "portable"),
        ({"worker": {"loop_lag_s": 0.4}}, "w0", "note", "lags by 400 ms", "swapped"),
        ({"worker": {"round_trip_s": 0.12}}, "w0", "note", "broker: 120 ms there and back", "nearer"),
        ({"worker": {"bytes_per_s": 40_000.0}}, "w0", "note", "39.1 KiB a second", "MTU"),
        ({"stage": {"seen_s": 0.014}}, "predicted", "note", "10 ms a step, took 14: 40% slower", "what else uses"),
        ({"stage": {"seen_s": 0.006}}, "predicted", "note", "10 ms a step, took 6: 40% faster", "nothing to do"),
    ],
)
def test_each_ailment_has_its_remedy(changes: dict[str, Json], about: str, level: str, says: str, remedy: str) -> None:
    """One finding more than in a swarm that is well, and the others as they were."""
    (ill,) = [each for each in found(**changes) if each.level != "ok"]
    assert (ill.about, ill.level) == (about, level)
    assert says in ill.text
    assert remedy in ill.remedy


def test_that_nobody_is_left_is_an_ailment_of_its_own() -> None:
    (all_of_them, its_own) = [each for each in found(worker={"state": "out", "verdict": "dead"}) if each.level != "ok"]
    assert (all_of_them.about, all_of_them.level, all_of_them.text) == ("workers", "trouble", "there are none")
    assert its_own.about == "w0"


@pytest.mark.parametrize(
    ("row", "level", "says", "remedy"),
    [
        ({"state": "out", "verdict": "dead", "layers": [4, 8], "reason": "its connection closed"}, "trouble",
         "is out, and layers 4–7 wait for another worker: its connection closed", "its log shows why"),
        ({"state": "out", "verdict": "silent", "layers": None, "reason": "no heartbeat for 1.2 s"}, "note",
         "is out: no heartbeat for 1.2 s", "the network to it"),
        ({"state": "out", "verdict": "silent", "last_layers": [5, 6], "layers": None}, "trouble",
         "is out, others have its layers (layer 5), and no worker has joined in its place", "the network to it"),
        ({"state": "out", "verdict": "dead", "last_layers": [5, 6], "layers": None, "steered": "drained"}, "note",
         "is out", "its log shows why"),
        ({"state": "out", "verdict": "lied", "layers": None, "reason": "not finite"}, "trouble", "out", "memory"),
        ({"state": "out", "verdict": "failed", "layers": None, "reason": "its last 2 steps failed"}, "trouble",
         "is out: its last 2 steps failed", "after a test"),
        ({"state": "out", "verdict": "differs", "layers": None, "reason": "sequence 1 ends elsewhere"}, "trouble",
         "is out: sequence 1 ends elsewhere", "comes back by itself"),
        ({"faults": 2, "layers": [4, 5]}, "note", "its steps failed, or a test of its device, 2 times", "its log"),
        ({"state": "left", "verdict": "left", "layers": None, "reason": "it was asked to leave"}, "note",
         "has left: it was asked to leave", "swarmctl join"),
        ({"steered": "cordoned", "layers": [4, 5]}, "note",
         "cordoned by hand: it gets no new layers, and has layer 4", "swarmctl uncordon w1"),
        ({"steered": "drained", "layers": None}, "note", "drained by hand: it gets no layers, and has no layers",
         "swarmctl uncordon w1"),
        ({"steered": "excluded", "layers": None}, "note", "excluded by hand: it gets no layers, and has no layers",
         "swarmctl plan --apply allows it to get layers again"),
        ({"state": "refused", "reason": "no room"}, "note", "could not load its layers: no room", "again"),
        ({"state": "leaving", "layers": [4, 8]}, "note", "it is leaving, and has layers 4–7", "others have"),
    ],
)  # fmt: skip
def test_a_worker_that_is_missing_or_held_back_is_told(row: Json, level: str, says: str, remedy: str) -> None:
    """However well the others are: a swarm that lost one is not called well, and who was asked to go is told, too."""
    nodes: Json = {"workers": [WORKER, {**WORKER, "name": "w1", "layers": [4, 8], **row}]}
    (ill,) = [each for each in diagnose(Reports(STATUS, nodes, {"stages": [STAGE]})) if each.level != "ok"]
    assert (ill.about, ill.level) == ("w1", level)
    assert says in ill.text
    assert remedy in ill.remedy


def test_who_is_back_under_its_name_is_not_missed() -> None:
    """Of several lives of one that is gone, the last is told."""
    lives = [{**WORKER, "state": "out", "verdict": "dead", "layers": None, "reason": why} for why in ("first", "last")]
    nodes: Json = {"workers": [*lives, WORKER, *({**each, "name": "w1"} for each in lives)]}
    told = [each for each in diagnose(Reports(STATUS, nodes, {})) if each.level != "ok"]
    assert [(each.about, each.text) for each in told] == [("w1", "is out: last")]


def test_who_was_lost_is_missed_until_another_one_has_come() -> None:
    """One for one: workers with names of their own each time (of pods, say) do not make trouble for ever."""
    lost = {**WORKER, "state": "out", "verdict": "dead", "layers": None, "last_layers": [4, 8]}
    rows: list[Json] = [
        {**WORKER, "here_for_s": 1000.0},
        {**lost, "name": "a", "verdict_for_s": 500.0},
        {**lost, "name": "b", "verdict_for_s": 100.0},
        {**WORKER, "name": "c", "here_for_s": 50.0},
    ]

    def told(rows: list[Json]) -> dict[str, tuple[str, str]]:
        found = diagnose(Reports(STATUS, {"workers": rows}, {}))
        return {each.about: (each.level, each.text) for each in found if each.about in ("a", "b")}

    alone = "is out, others have its layers (layers 4–7), and no worker has joined in its place"
    assert told(rows) == {"a": ("note", "is out, and c has joined since"), "b": ("trouble", alone)}
    assert told([*rows, {**WORKER, "name": "d", "here_for_s": 20.0}])["b"] == ("note", "is out, and d has joined since")
    assert told(rows[:3]) == {"a": ("trouble", alone), "b": ("trouble", alone)}


def told(*rows: Json, status: Json | None = None, refused: tuple[Json, ...] = ()) -> dict[str, Finding]:
    """What is not as it should be, by what it is about."""
    workers: list[Json] = [{**WORKER, "name": f"w{place}", **row} for place, row in enumerate(rows)]
    reports = Reports({**STATUS, **(status or {})}, {"workers": workers, "refused": list(refused)}, {})
    return {each.about: each for each in diagnose(reports) if each.level != "ok"}


DRAINED: Json = {"steered": "drained", "layers": None}
CORDONED: Json = {"steered": "cordoned", "layers": [0, 8]}


def test_a_swarm_that_one_death_would_stop_is_in_trouble() -> None:
    """All that are here are held back by hand: whoever holds layers, nobody may take them. One that may is enough, but
    neither one that leaves nor one that is out."""
    spare = told(DRAINED, DRAINED, CORDONED)["spare"]
    assert (spare.level, spare.text) == (
        "trouble",
        "if a worker with layers dies, no other may take them: w0, w1 are drained, w2 is cordoned",
    )
    assert spare.remedy == "swarmctl uncordon w0 (or w1, w2) allows them to get layers again"
    assert told(CORDONED, {"steered": "excluded", "layers": None})["spare"].remedy.startswith(
        "swarmctl uncordon w0, swarmctl plan --apply"
    )
    assert "spare" in told(CORDONED, {"state": "leaving"}, {"state": "out"})
    assert "spare" not in told(DRAINED, CORDONED, {"layers": None})
    assert "spare" not in told({"layers": [0, 8]})


def test_a_swarm_that_waits_for_those_held_back_says_what_lets_them() -> None:
    waits = {"state": "waiting", "waits_for": "a worker"}
    assert told(DRAINED, DRAINED, status=waits)["serving"].remedy.startswith("swarmctl uncordon w0 (or w1) ")
    # Somebody may have layers, and it isn't that: by the broker's word alone.
    assert told(DRAINED, {"layers": None}, status=waits)["serving"].remedy == "see swarmctl nodes"
    waits["waits_for"] = "1 MiB more (w0 drained: swarmctl uncordon)"
    assert told(DRAINED, {"layers": None}, status=waits)["serving"].remedy.startswith("swarmctl uncordon w0 ")


REFUSED: Json = {
    "number": 1,
    "name": "w0",
    "host": "a",
    "pid": 7,
    "reason": "taken; call it otherwise",
    "ago_s": 60.0,
    "times": 3,
}


def test_a_process_that_was_sent_away_is_told() -> None:
    """Beside the one that has its name, which is well; until one of that name comes in, or an hour has passed."""
    found = told({"here_for_s": 900.0}, refused=(REFUSED,))["w0"]
    assert found.level == "note"
    assert found.text == "a process (7 on a) was refused 60 s ago, 3 times by now: taken"
    assert found.remedy == "call it otherwise"
    other = told({}, refused=({**REFUSED, "name": "w9", "reason": "another model"},))["w9"]
    assert (other.text.rpartition(": ")[2], other.remedy) == (
        "another model",
        "fix that on its machine, and start it again there",
    )
    assert not told({"here_for_s": 50.0}, refused=(REFUSED,))
    assert not told({"here_for_s": 9000.0}, refused=({**REFUSED, "ago_s": 4000.0},))


def test_draining_is_advised_only_where_it_helps() -> None:
    """Not without layers, not without another one, and not where all are equally slow."""
    slow: Json = {"verdict": "slow", "evidence": "3 x"}
    assert "swarmctl drain w0" in told(slow, {})["w0"].remedy
    assert "swarmctl drain w0" in told({"pace": 1.8}, {})["w0"].remedy
    assert "drain" not in told({**slow, "layers": None}, {})["w0"].remedy
    assert "drain" not in told(slow, DRAINED)["w0"].remedy
    alike = told(slow, {"pace": 1.8})
    assert {each.remedy.partition(":")[0] for each in alike.values()} == {"all are equally slow"}


def test_one_stage_and_one_layer_are_told_so() -> None:
    told = {each.about: each.text for each in found(status={"num_stages": 1}, worker={"layers": [5, 6]})}
    assert told["serving"] == "village by 1 stage, epoch 3"
    assert told["w0"].startswith("well, with layer 5; ")


def ways(*seen: tuple[float, float, bool]) -> list[Finding]:
    """Of w0, w1 … to the next one."""
    keys = ("round_trip_s", "bytes_per_s", "is_least")
    rows = [
        {**WORKER, "name": f"w{place}", "next": {"to": f"w{place + 1}", **dict(zip(keys, each, strict=True))}}
        for place, each in enumerate(seen)
    ]
    return [each for each in diagnose(Reports(STATUS, {"workers": rows}, {})) if each.about == "way"]


def test_ways_between_workers_are_told_as_they_were_seen() -> None:
    """A way that was never full may well carry more, and is not called narrow."""
    assert [(each.level, each.text) for each in ways((2e-4, 5e7, False), (3e-4, 4e4, True), (2e-4, 0.0, True))] == [
        ("ok", "w0 → w1: 0.2 ms there and back, 47.7 MiB a second"),
        ("ok", "w1 → w2: 0.3 ms there and back, at least 39.1 KiB a second"),
        ("ok", "w2 → w3: 0.2 ms there and back"),
    ]


@pytest.mark.parametrize(
    ("slow", "remedy"),
    [
        ((0.12, 1e9, False), "nearer machine"),
        ((2e-4, 4e4, False), "MTU"),
        ((4e-3, 1e9, False), "the others take 0.2 ms"),
        ((2e-4, 2e7, False), "others have 5 times the throughput"),
    ],
)
def test_a_slow_way_is_found_by_itself_and_beside_the_others(slow: tuple[float, float, bool], remedy: str) -> None:
    quick = (2e-4, 1e8, False)
    ill = [each for each in ways(quick, slow, quick) if each.level != "ok"]
    assert {each.text.partition(":")[0] for each in ill} == {"w1 → w2"}
    assert any(remedy in each.remedy for each in ill)


def test_clocks_of_machines_are_told() -> None:
    """By machine, however many workers it has; who does not tell its clock is not judged."""
    rows: list[Json] = [
        {**WORKER, "host": "a", "clock_ahead_s": 0.012},
        {**WORKER, "name": "w1", "host": "b", "clock_ahead_s": -2.34},
        {**WORKER, "name": "w2", "host": "b", "clock_ahead_s": -2.34},
        {**WORKER, "name": "w3", "host": "c", "clock_ahead_s": None},
    ]
    told = [each for each in diagnose(Reports(STATUS, {"workers": rows}, {})) if each.about == "clock"]
    assert [(each.level, each.text) for each in told] == [("note", "b is 2.3 s behind the broker's machine")]
    assert "time service" in told[0].remedy
    right = [each for each in diagnose(Reports(STATUS, {"workers": rows[::3]}, {})) if each.about == "clock"]
    assert [(each.level, each.text) for each in right] == [("ok", "all machines within 12 ms")]


def test_a_finding_is_reported_once() -> None:
    """A slow worker is not also a wrong prediction, what makes it removed is not counted again, and a connection with
    two faults, or workers held back that the whole swarm waits for, have one finding."""

    def ill(status: Json | None = None, worker: Json | None = None, stage: Json | None = None) -> list[str]:
        return [each.about for each in found(status, worker, stage) if each.level != "ok"]

    assert ill(worker={"verdict": "slow", "evidence": "3 x"}, stage={"seen_s": 0.03}) == ["w0"]
    assert ill(worker={"verdict": "slow", "evidence": "3 x"}, stage={"seen_s": 0.003}) == ["w0", "predicted"]
    assert ill(worker={"verdict": "lied", "evidence": "not finite", "lies": 2}) == ["w0"]
    assert ill(worker={"verdict": "failed", "evidence": "2 steps", "faults": 2}) == ["w0"]
    assert ill(worker={"round_trip_s": 0.12, "bytes_per_s": 4e4}) == ["w0"]
    assert [each.about for each in ways((0.12, 4e4, False))] == ["way"]
    assert list(told(DRAINED, CORDONED)) == ["spare"]
    assert list(told(DRAINED, DRAINED, status={"state": "waiting", "waits_for": "a worker"})) == ["serving"]
    [w1] = [each.text for each in diagnose(held_back()) if each.about == "w1"]
    assert w1.startswith("well, with no layers, drained by hand")


def held_back() -> Reports:
    rows: list[Json] = [{**WORKER, **CORDONED}, {**WORKER, "name": "w1", **DRAINED}]
    return Reports(STATUS, {"workers": rows}, {})


def test_a_few_steps_say_nothing_of_predictions() -> None:
    assert not [each for each in found(stage={"seen_steps": 3, "seen_s": 1.0}) if each.about == "predicted"]

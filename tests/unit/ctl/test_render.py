"""How ``swarmctl`` draws workers: what stands in the table, what in words below it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from swarm.admin.orders import standby_report
from swarm.ctl.render import nodes, recoveries, standby


def test_a_table_of_workers_has_room_in_120_columns() -> None:
    """With all that is told of each, as far as the names allow; what belongs together shares a column."""
    worker = {
        "name": "worker-0",
        "state": "member",
        "steered": "cordoned",
        "layers": [10, 12],
        "device": "cpu",
        "dtype": "float32",
        "standby": [[8, 10], [12, 14]],
        "verdict": "loading",
        "verdict_for_s": 119.0,
        "beat_age_s": 0.1,
        "progress_per_s": 12345.0,
        "pace": 1.596,
        "loop_lag_s": 0.0003,
        "kv_used": 123456,
        "kv_capacity": 954304,
        "memory_bytes": 5593 << 20,
        "resident_bytes": 419 << 20,
        "limit_bytes": 6 << 30,
        "host": "machine-1",
        "pid": 123456,
        "build": "0.2.0",
        "next": {"to": "w1"},
        "clock_ahead_s": 0.002,
        "evidence": "",
    }
    shown = io.StringIO()
    Console(file=shown, width=160).print(nodes({"workers": [worker, {**worker, "layers": [5, 6]}]}))
    lines = shown.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 120
    assert "cordoned" in lines[3]
    assert " 13% " in lines[3]
    assert "419 MiB of 6.0 GiB" in lines[3]
    assert "123456 on machine-1" in lines[3]
    assert "10–11" in lines[3]
    assert " 5 " in lines[4]


def test_a_narrow_table_of_workers_keeps_their_processes() -> None:
    """The tutorial kills the process that it names."""
    worker = {
        "name": "w0",
        "state": "member",
        "layers": [0, 3],
        "device": "cpu",
        "standby": [[3, 8]],
        "verdict": "well",
        "verdict_for_s": 65.0,
        "pace": 1.3,
        "kv_capacity": 888000,
        "resident_bytes": 328 << 20,
        "host": "vm-89e2eca8",
        "pid": 9434,
    }
    shown = io.StringIO()
    Console(file=shown, width=80).print(nodes({"workers": [worker]}))
    assert "9434 on vm-89e2eca8" in shown.getvalue()
    assert "328 MiB " in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"layers": [0, 1], "standby": [[1, 2]]}, {"layers": [1, 2], "standby": [[0, 1]]}],
         ["every layer has a standby"]),
        ([{"layers": [0, 2]}, {"layers": [2, 3], "standby": [[0, 1]]}],
         ["layers 1, 2 have no standby, and would have to be loaded if the holder died"]),
        ([{"steered": "drained"}, {"steered": "drained"}, {"layers": [0, 2], "steered": "cordoned"}],
         ["layers 0, 1 have no standby, and no worker may take over if the holder dies: w0, w1 are drained, w2 is "
          "cordoned (swarmctl uncordon w0 (or w1, w2))"]),
        ([{"layers": [0, 1]}, {"layers": [1, 2], "steered": "cordoned", "standby": [[0, 1]]}],
         ["layer 1 has no standby, and would have to be loaded if the holder died",
          "layer 0 has no standby, and no worker may take over if the holder dies: w1 is cordoned (swarmctl "
          "uncordon w1)"]),
        ([{"layers": [0, 1]}],
         ["layer 0 has no standby, and no worker may take over if the holder dies: there is no other worker"]),
        ([{"steered": "drained"}, {}], ["no worker has layers: there is nothing to keep"]),
        ([], ["no worker has layers: there is nothing to keep"]),
    ],
)  # fmt: skip
def test_standby_says_what_nobody_keeps_and_who_may_load_it(rows: list[dict[str, object]], told: list[str]) -> None:
    """Who is held back by hand may not take layers, however warm it has them; without stages nothing is kept."""
    workers = [{"name": f"w{place}", "state": "member", "layers": None, **row} for place, row in enumerate(rows)]
    shown = io.StringIO()
    Console(file=shown, width=400).print(standby(standby_report({"workers": workers})))
    assert [line.strip()[2:] for line in shown.getvalue().splitlines() if line.startswith("·")] == told


def test_standby_shows_the_copies_of_each_worker() -> None:
    route = {"source": "w1", "layers": [4, 6], "positions": 8130, "behind": 40}
    held = {"routes": [route, {**route, "layers": [6, 7], "behind": 0}], "num_bytes": 3 << 20, "free_bytes": 9}
    workers = [{"name": "w0", "state": "member", "layers": [0, 4], "standby": [[0, 4]], "copies": held}]
    shown = io.StringIO()
    Console(file=shown, width=400).print(standby(standby_report({"workers": workers})))
    assert [line.strip()[2:] for line in shown.getvalue().splitlines() if line.startswith("·")] == [
        "every layer has a standby",
        "w0 holds copies of w1's keys and values in layers 4–5: 8130 positions, at most 40 of a sequence behind",
        "w0 holds copies of w1's keys and values in layers 6: 8130 positions, complete",
        "w0's copies take 3.0 MiB",
    ]


def test_nodes_show_what_spilling_workers_have_on_disk() -> None:
    spill = {"num_bytes": 3 << 30, "limit_bytes": 20 << 30, "chunks_written": 30, "chunks_read": 4}
    workers = [
        {"name": "w0", "state": "member", "spill": spill | {"restored_positions": 1024}},
        {"name": "w1", "state": "member", "spill": None},
    ]
    shown = io.StringIO()
    Console(file=shown, width=400).print(nodes({"workers": workers, "refused": []}))
    assert [line.strip()[2:] for line in shown.getvalue().splitlines() if "disk" in line] == [
        "w0: 3.0 GiB of 20.0 GiB of keys and values on disk; it has written 30 chunks, read 4, and restored 1024 "
        "positions"
    ]


def test_a_total_is_not_predicted_from_some_of_the_phases() -> None:
    measured = dict.fromkeys(("detect_s", "plan_s", "load_s", "activate_s", "replay_s", "resume_s"), 0.01)
    predicted = {"load_s": 0.02, "replay_s": 0.0164, "total_s": 0.0364}
    shown = io.StringIO()
    row = {"predicted": predicted, "measured": measured | {"total_s": 0.0764}}
    Console(file=shown, width=120).print(recoveries({"recoveries": [row]}))
    totals = {
        line.split()[0]: line.split() for line in shown.getvalue().splitlines() if "dicted" in line or "red" in line
    }
    assert totals["predicted"] == ["predicted", "–", "–", "20.0", "ms", "–", "16.4", "ms", "–", "–"]
    assert totals["measured"][-2:] == ["76.4", "ms"]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({}, "12 were lost"),
        ({"copied_layer_positions": 4321}, "12 were lost, copies saved 4321"),
        ({"restored_layer_positions": 777}, "12 were lost, 777 were read from disk"),
    ],
)
def test_recoveries_show_what_copies_and_disks_saved(saved: dict[str, int], told: str) -> None:
    recovery = {"sequences": 2, "layer_positions": 12, "least_layer_positions": 12} | saved
    shown = io.StringIO()
    Console(file=shown, width=400).print(recoveries({"recoveries": [recovery]}))
    assert f"2 sequences, 12 layer·positions computed again, {told}" in [
        line.strip() for line in shown.getvalue().splitlines()
    ]

"""What ``swarmctl`` is told."""

from __future__ import annotations

import json

import pytest

from swarm.wire.messages import LoadProgress, Query, Stats, Stop
from tests.unit.broker.bench import MIB, Bench, submit


def ask(bench: Bench, what: str) -> dict:
    """The body of a report; it must be plain JSON."""
    report = bench.ask(Query(what=what))  # type: ignore[arg-type]
    assert (report.what, report.ok) == (what, True)
    return json.loads(json.dumps(report.body))


@pytest.mark.parametrize("what", ["status", "nodes", "plan", "stats", "requests"])
def test_an_empty_swarm_has_answers(bench: Bench, what: str) -> None:
    """Every question can be asked before anybody has joined."""
    assert ask(bench, what) is not None


def test_status_of_an_empty_swarm(bench: Bench) -> None:
    """It says what it waits for."""
    status = ask(bench, "status")
    assert (status["state"], status["waits_for"], status["model"]) == ("waiting", "a worker: none is here", None)


def test_status_while_loading(bench: Bench) -> None:
    """How far each worker of the plan under way has come."""
    bench.mute = {"w0", "w1"}
    bench.join("w0", "w1")
    bench.tick()
    bench.tell("w0", LoadProgress(incarnation="w0.1", loaded_bytes=3, total_bytes=10))
    bench.tell("w1", bench.workers["w1"].prepared(1))
    status = ask(bench, "status")
    assert status["state"] == "preparing"
    assert status["waits_for"] == "the workers to load their layers"
    assert status["loading"] == [
        {"worker": "w0", "loaded_bytes": 3, "total_bytes": 10, "done": False},
        {"worker": "w1", "loaded_bytes": 4 * MIB, "total_bytes": 4 * MIB, "done": True},
    ]


def test_status_while_serving(serving: Bench) -> None:
    """What runs, what waits, what is reserved."""
    serving.say(submit("a", num_prompt=40))
    status = ask(serving, "status")
    assert (status["state"], status["waits_for"], status["loading"]) == ("serving", "", [])
    assert (status["epoch"], status["num_workers"], status["num_stages"]) == (1, 2, 2)
    assert (status["num_running"], status["num_queued"], status["steps_in_flight"]) == (1, 0, 1)
    assert (status["kv_reserved"], status["kv_capacity"]) == (64, 4096)


def test_nodes_are_told_with_verdict_and_evidence(serving: Bench) -> None:
    """Everybody with layers, verdict and evidence; who went is listed with the reason."""
    serving.tell("w1", Stats(incarnation="w1.1", values={"kv_used": 5.0, "resident_bytes": 7.0}))
    serving.tick()
    serving.join("w2", memory_bytes=1)
    serving.lose("w0")
    nodes = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert (nodes["w0"]["state"], nodes["w0"]["verdict"], nodes["w0"]["evidence"]) == (
        "out",
        "dead",
        "its connection closed",
    )
    assert (nodes["w1"]["layers"], nodes["w1"]["kv_used"], nodes["w1"]["resident_bytes"]) == ([0, 6], 5, 7)
    assert nodes["w2"]["layers"] is None


def test_nodes_show_what_the_beats_say(serving: Bench) -> None:
    """The verdict with its evidence and for how long it has held, the age of the last beat, the counter's speed, the
    control loop's lag, and whom a blocked worker waits for, by name. Who never beat has no such figures."""
    serving.join("w2", memory_bytes=1)
    for tenth in range(20):
        serving.beat("w1", state="computing", progress=4 * tenth)
        serving.beat("w0", state="blocked", blocked_on="w1.1", since_s=tenth / 10, loop_lag_s=0.02)
        serving.now += 0.1
    nodes = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert (nodes["w0"]["verdict"], nodes["w0"]["blocked_on"]) == ("blocked", "w1")
    assert nodes["w0"]["evidence"].startswith("blocked on w1 for 2.0 s; it is judged by w1, which is well: computing")
    assert (nodes["w0"]["beat_age_s"], nodes["w0"]["loop_lag_s"]) == (0.1, 0.02)
    assert nodes["w1"]["progress_per_s"] == pytest.approx(40.0, rel=0.2)
    assert (nodes["w1"]["doing"], nodes["w1"]["blocked_on"]) == ("computing", "")
    assert (nodes["w2"]["beat_age_s"], nodes["w2"]["progress_per_s"]) == (None, 0.0)
    serving.now += 1.0
    again = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert again["w0"]["verdict_for_s"] == 1.0


def test_plan_shows_the_one_in_force_and_the_one_under_way(serving: Bench) -> None:
    """While a newcomer loads, both are there."""
    assert [s["layers"] for s in ask(serving, "plan")["stages"]] == [[0, 3], [3, 6]]
    assert "coming" not in ask(serving, "plan")
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    plan = ask(serving, "plan")
    assert (plan["epoch"], plan["coming"]["epoch"]) == (1, 2)
    assert [s["layers"] for s in plan["coming"]["stages"]] == [[0, 2], [2, 4], [4, 6]]
    assert plan["why"][0].startswith("w0 holds layers 0–2")


def test_kernels_are_named(serving: Bench) -> None:
    """What multiplies on each worker stands in both reports, as it said when it had loaded; in the plan under way too,
    as soon as it is known."""
    assert [s["kernels"] for s in ask(serving, "plan")["stages"]] == ["of w0.1; exact", "of w1.1; exact"]
    serving.mute = {"w2"}
    serving.join("w2")
    serving.tick()
    nodes = {n["name"]: n["kernels"] for n in ask(serving, "nodes")["workers"]}
    assert nodes == {"w0": "of w0.1; exact", "w1": "of w1.1; exact", "w2": ""}
    coming = ask(serving, "plan")["coming"]["stages"]
    assert {s["worker"]: s.get("kernels") for s in coming} == {
        "w0": "of w0.1; exact",
        "w1": "of w1.1; exact",
        "w2": None,
    }


def test_counters_of_broker_and_stages_are_told(serving: Bench) -> None:
    """The broker's own counters and each stage's."""
    serving.tell("w0", Stats(incarnation="w0.1", values={"steps": 3.0}))
    serving.say(submit(max_tokens=3))
    serving.run_dry()
    stats = ask(serving, "stats")
    assert stats["stages"] == {"w0": {"steps": 3.0}, "w1": {}}
    assert (stats["pipeline"]["tokens"], stats["pipeline"]["sequences_length"]) == (3, 1)
    # The prompt, two decodes, and the step that gives the room back.
    assert (stats["pipeline"]["steps"], stats["pipeline"]["positions"]) == (4, 5)


def test_a_request_runs_if_one_of_its_sequences_does(make_bench) -> None:
    """Each with its state: one that runs makes it running, whatever the others do."""
    bench = make_bench().serve(1, max_sequences=2)
    bench.say(submit("r", n=3))
    bench.say(Stop(request_id="r", index=0, at_index=0))
    bench.finish()
    bench.finish()
    bench.say(submit("later", n=1))
    rows = {r["request_id"]: r for r in ask(bench, "requests")["requests"]}
    assert (rows["r"]["state"], rows["r"]["reasons"], rows["r"]["n"]) == ("running", ["stop", None, None], 3)
    assert rows["later"]["state"] == "waiting"
    bench.run_dry()
    assert rows["r"]["ended_age_s"] is None
    bench.now += 2.0
    found = {r["request_id"]: (r["state"], r["ended_age_s"]) for r in ask(bench, "requests")["requests"]}
    assert found == {"r": ("ended", 2.0), "later": ("ended", 2.0)}


def test_unlike_kernels_are_told(bench: Bench, serving: Bench) -> None:
    """A plan whose stages compute with unlike kernels says what that means; one with like kernels says nothing."""
    assert any("kernels differ" in why for why in ask(serving, "plan")["why"])
    bench.serve(1)
    assert not any("kernels differ" in why for why in ask(bench, "plan")["why"])


def test_unlike_kernels_with_the_same_bits_are_no_matter(make_bench) -> None:
    """What counts is whether the bits are the same, not which kernels compute them."""
    bench = make_bench()
    for name in ("w0", "w1"):
        bench.join(name, kernels=f"linears of {name}; exact", bits="portable bits")
    bench.tick()
    plan = ask(bench, "plan")
    assert {stage["kernels"] for stage in plan["stages"]} == {"linears of w0; exact", "linears of w1; exact"}
    assert not any("kernels differ" in why for why in plan["why"])


def test_a_stage_that_binds_all_is_named(bench: Bench) -> None:
    """One with far less room than the others, and what can be done about it."""
    bench.add("w0", kv_capacity=4096)
    bench.add("w1", kv_capacity=320)
    for name in ("w0", "w1"):
        bench.tell(name, bench.workers[name].hello())
    bench.tick()
    (told,) = [why for why in ask(bench, "plan")["why"] if "limits all stages" in why]
    assert told.startswith("w1 limits all stages to 320 KV positions, w0 could hold 4096")


def test_nodes_show_the_way_to_the_next_stage_and_the_clock(serving: Bench) -> None:
    """As each worker saw them; of a way that it does not see there is nothing."""
    seen = {"next.round_trip_s": 2e-4, "next.bytes_per_s": 1e8, "next.is_least": 1.0, "clock_ahead_s": -3.5}
    serving.tell("w0", Stats(incarnation="w0.1", values=seen))
    nodes = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert nodes["w0"]["next"] == {"to": "w1", "round_trip_s": 2e-4, "bytes_per_s": 1e8, "is_least": True}
    assert (nodes["w0"]["clock_ahead_s"], nodes["w1"]["next"], nodes["w1"]["clock_ahead_s"]) == (-3.5, None, None)
    serving.tell("w1", Stats(incarnation="w1.1", values=seen))
    nodes = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert nodes["w1"]["next"]["to"] == "the broker"


def test_nodes_show_the_disk_of_workers_that_spill(bench: Bench) -> None:
    """Zeros until the worker has reported its figures."""
    bench.join("w0", spill_from=512)
    bench.join("w1")
    nodes = {n["name"]: n["spill"] for n in ask(bench, "nodes")["workers"]}
    none = dict.fromkeys(("num_bytes", "limit_bytes", "chunks_written", "chunks_read", "restored_positions"), 0)
    assert nodes == {"w0": none, "w1": None}
    values = {"spill_bytes": 7e9, "spill_limit_bytes": 2e10, "spill_chunks_written": 30.0, "spill_chunks_read": 4.0}
    bench.tell("w0", Stats(incarnation="w0.1", values=values | {"spill_positions_restored": 1024.0}))
    (spill,) = [n["spill"] for n in ask(bench, "nodes")["workers"] if n["name"] == "w0"]
    assert list(spill.values()) == [7_000_000_000, 20_000_000_000, 30, 4, 1024]


def test_nodes_show_what_the_lost_had_and_since_when_the_others_are_here(serving: Bench) -> None:
    """Of one that went as it should there is nothing: nobody misses it."""
    serving.now += 5.0
    serving.lose("w1")
    nodes = {n["name"]: n for n in ask(serving, "nodes")["workers"]}
    assert (nodes["w1"]["last_layers"], nodes["w1"]["here_for_s"]) == ([3, 6], None)
    assert nodes["w0"]["last_layers"] is None
    assert nodes["w0"]["here_for_s"] >= 5.0

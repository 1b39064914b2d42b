"""The view of reports: what changes by the clock alone is no news, and nobody sees what is others'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm.gateway.console.patch import diff
from swarm.gateway.console.view import MAX_ENDED, MAX_REQUESTS, LatestReports, build_view, restrict_to_tenant

WORKER: dict[str, Any] = {
    "name": "w0",
    "incarnation": "w0-1",
    "host": "here",
    "pid": 7,
    "endpoint": "tcp://127.0.0.1:9",
    "state": "member",
    "verdict": "well",
    "evidence": "idle, last heartbeat 96 ms ago",
    "verdict_for_s": 6.4,
    "beat_age_s": 0.096,
    "progress_per_s": 0.0,
    "pace": 1.5961,
    "loop_lag_s": 0.0003,
    "resident_bytes": 350253056,
    "round_trip_s": 0.00023525899996457156,
    "bytes_per_s": 597915288.6,
    "layers": [0, 3],
}
OTHER = WORKER | {"name": "w1", "incarnation": "w1-1", "layers": [3, 6], "bytes_per_s": 1e6}
PLAN: dict[str, Any] = {
    "state": "serving",
    "epoch": 1,
    "stages": [{"worker": "w0", "layers": [0, 3]}, {"worker": "w1", "layers": [3, 6]}],
    "forecast": {"stages": [{"worker": "w0", "hop_s": 0.0006}, {"worker": "w1", "hop_s": 0.0}]},
}


def request(name: str, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "state": "running", "tenant": "alice", "age_s": 2.0, "deadline_s": None} | more


def known(at: float = 1000.0, *requests: dict[str, Any], **more: Any) -> LatestReports:
    reports = {
        "status": {"state": "serving", "epoch": 1, "uptime_s": at - 900.0},
        "nodes": {"workers": [WORKER, OTHER]},
        "plan": PLAN,
        "requests": {"requests": list(requests)},
    }
    return LatestReports(at, **(reports | more))


def test_an_idle_swarm_makes_no_news() -> None:
    """A second later all ages are others, and beats came."""
    first = build_view(known(), {}, {})
    later = {
        "verdict_for_s": 7.4,
        "beat_age_s": 0.01,
        "evidence": "idle, last heartbeat 10 ms ago",
        "loop_lag_s": 0.0041,
        "resident_bytes": 350253056 + 8192,
        "clock_ahead_s": 0.0021,
        "here_for_s": 101.0,
        "next": {"to": "w1", "round_trip_s": 1e-4, "bytes_per_s": 2e6, "is_least": True},
    }
    nodes = {"workers": [row | later for row in known().nodes["workers"]]}  # type: ignore[attr-defined]
    second = build_view(known(1001.03, nodes=nodes), {}, first)
    assert set(diff(first, second)) == {"at"}


def test_steps_alone_make_no_news() -> None:
    """What changes with every step is told by the rates: else a stream would be news at each look."""
    first = build_view(known(), {}, {})
    status = known().status | {"tokens_total": 512, "steps_in_flight": 2, "kv_reserved": 96, "kv_cached": 64}
    second = build_view(replace(known(1001.0), status=status | {"uptime_s": 101.0}), {}, first)
    assert set(diff(first, second)) == {"at"}


def test_ages_are_moments() -> None:
    rows = [request("r", deadline_s=8.0), request("e", state="ended", age_s=3.0, ended_age_s=1.0)]
    first = build_view(known(1000.0, *rows), {}, {})
    assert first["status"]["started_at"] == 900.0
    assert "uptime_s" not in first["status"]
    assert first["requests"]["r"]["began_at"] == 998.0
    assert first["requests"]["r"]["deadline_at"] == 1008.0
    assert first["ended"]["e"]["ended_at"] == 999.0
    assert not {"age_s", "ended_age_s", "deadline_s"} & set(first["requests"]["r"]) | set()
    older = [request("r", age_s=2.53, deadline_s=7.46), request("e", state="ended", age_s=3.5, ended_age_s=1.52)]
    second = build_view(known(1000.5, *older), {}, first)
    assert set(diff(first, second)) == {"at"}


def test_a_broker_that_was_started_again_has_another_moment() -> None:
    first = build_view(known(), {}, {})
    second = build_view(known(1010.0, status={"state": "serving", "uptime_s": 2.0}), {}, first)
    assert second["status"]["started_at"] == 1008.0


def test_there_are_no_more_requests_than_fit() -> None:
    rows = [request(f"r{n}") for n in range(MAX_REQUESTS + 7)]
    over = [request(f"e{n}", state="ended", ended_age_s=float(n)) for n in range(MAX_ENDED + 5)]
    found = build_view(known(1000.0, *over, *rows, requests={"requests": rows + over, "kept": over}), {}, {})
    assert (len(found["requests"]), found["requests_more"]) == (MAX_REQUESTS, 7)
    assert list(found["ended"]) == [f"e{n}" for n in range(MAX_ENDED)]


def test_a_tenant_sees_its_own_requests_alone() -> None:
    rows = [
        request("mine"),
        request("hers", tenant="bob"),
        request("old", tenant="bob", state="ended", ended_age_s=1.0),
    ]
    whole = build_view(known(1000.0, *rows), {}, {})
    seen = restrict_to_tenant("alice", whole)
    assert (list(seen["requests"]), seen["requests_more"], seen["ended"]) == (["mine"], 1, {})
    assert not {"pid", "endpoint"} & set(seen["workers"]["w0-1"])
    assert seen["workers"]["w0-1"]["host"] == "here"
    assert "hers" not in str(seen)
    assert restrict_to_tenant(None, whole) is whole


def test_links_join_the_chain_to_the_broker() -> None:
    """From worker to worker as the plan reckons, and as much passes as was seen there; to the broker as was measured.
    What nobody could measure is not told."""
    links = build_view(known(), {}, {})["links"]
    assert list(links) == ["broker>w0", "w0>w1", "w1>broker"]
    assert links["broker>w0"] == {"from": "broker", "to": "w0", "latency_s": 0.000118, "bytes_per_s": 598e6}
    assert links["w0>w1"] == {"from": "w0", "to": "w1", "latency_s": 0.0006, "bytes_per_s": None}
    for seen, rate in (({"to": "w1"}, 2e6), ({"to": "w2"}, None), ({"to": "w1", "is_least": True}, None)):
        first = WORKER | {"next": {"bytes_per_s": 2e6, **seen}, "bytes_per_s": 1e12}
        links = build_view(known(nodes={"workers": [first, OTHER]}), {}, {})["links"]
        assert (links["broker>w0"]["bytes_per_s"], links["w0>w1"]["bytes_per_s"]) == (None, rate)
    assert build_view(known(plan={}), {}, {})["links"] == {}


RECOVERY: dict[str, Any] = {
    "detected_at": 3124.6,
    "workers": ["w1"],
    "lost": [[3, 6]],
    "cause": "w1 was lost",
    "age_s": 1.0,
    "measured": {"total_s": 0.2},
    "predicted": {},
    "sequences": 1,
}


def test_a_recovery_is_told_while_it_runs_and_when_it_is_over() -> None:
    during = build_view(known(recoveries={"recoveries": [RECOVERY]}), {}, {})
    assert during["recovery"]["began_at"] == 999.0
    assert during["recoveries"] == []
    over = RECOVERY | {"age_s": 1.4, "resumed_all_at": 3125.0, "epoch": 2}
    early = build_view(known(1000.4, recoveries={"recoveries": [over]}), {}, during)
    assert "took" not in early["recoveries"][0]["sentence"]  # the plan that is known is still the one before
    moved = {"epoch": 2, "stages": [{"worker": "w0", "layers": [0, 6]}]}
    coming = {"epoch": None, "stages": [], "coming": moved}  # as it was told while the layers were loaded
    at_once = build_view(known(1000.4, recoveries={"recoveries": [over]}, plan=coming), {}, during)
    assert "w0 took layers 3–5" in at_once["recoveries"][0]["sentence"]
    moved = PLAN | moved
    after = build_view(known(1000.5, recoveries={"recoveries": [over]}, plan=moved), {}, early)
    assert after["recovery"] is None
    assert [row["began_at"] for row in after["recoveries"]] == [999.0]
    assert "w0 took layers 3–5" in after["recoveries"][0]["sentence"]
    back = PLAN | {"epoch": 3}  # whose layers w1's next life has
    later = build_view(known(1010.0, recoveries={"recoveries": [over | {"age_s": 10.9}]}, plan=back), {}, after)
    assert later["recoveries"][0]["sentence"] == after["recoveries"][0]["sentence"]


def test_the_latest_recoveries_come_first_and_few() -> None:
    rows = [RECOVERY | {"detected_at": float(n), "resumed_all_at": n + 1.0, "epoch": n} for n in range(20)]
    found = build_view(known(recoveries={"recoveries": rows}), {}, {})["recoveries"]
    assert [row["epoch"] for row in found] == list(range(19, 11, -1))


def test_an_older_broker_says_no_age() -> None:
    row = {key: value for key, value in RECOVERY.items() if key != "age_s"}
    assert build_view(known(recoveries={"recoveries": [row]}), {}, {})["recovery"]["began_at"] is None


def test_a_broker_that_is_away_is_away_for_whole_seconds() -> None:
    here = build_view(known(), {}, {})
    assert here["away_s"] is None
    away = [build_view(replace(known(), away_s=away_s), {}, here)["away_s"] for away_s in (0.6, 1.2, 1.9)]
    assert away == [0, 1, 1]


def test_of_what_was_not_asked_again_nothing_is_made_anew() -> None:
    """The same values stand for it; what has come is made."""
    before = known(1000.0, request("r"))
    first = build_view(before, {}, {})
    after = replace(before, at=1001.0, status={"state": "serving", "epoch": 2, "uptime_s": 101.0})
    second = build_view(after, {}, first, before)
    for name in ("workers", "plan", "requests", "ended", "links", "recoveries"):
        assert second[name] is first[name]
    assert diff(first, second) == {"at": 1001.0, "status": {"epoch": 2}}
    assert build_view(after, {}, first) == second


def test_nothing_is_known_at_first() -> None:
    """Of recoveries: neither that there were none, which the page says in other words, and offers to show one."""
    empty = build_view(LatestReports(1.0), {}, {})
    assert empty["recoveries"] is None
    assert build_view(known(recoveries={"recoveries": []}), {}, empty)["recoveries"] == []
    assert (empty["workers"], empty["plan"], empty["requests"], empty["recovery"]) == ({}, None, {}, None)

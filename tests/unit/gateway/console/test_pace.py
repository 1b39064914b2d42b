"""When the broker is asked what: as often as there can be news, and never so often that looking slows anything down."""

from __future__ import annotations

from typing import Any

from swarm.gateway.console.pace import BUSY_S, IDLE_S, MAX_S, PRESSED_S, ROOMY_SHARE, SHARE, Load, Pace

IDLE: dict[str, Any] = {"state": "serving", "epoch": 1, "num_running": 0, "num_queued": 0, "num_workers": 2}
BUSY = IDLE | {"num_running": 1}


def begun(status: dict[str, Any]) -> Pace:
    """One that has asked for everything at 0."""
    pace = Pace()
    pace.heard(status, is_recovering=False)
    assert set(pace.due(0.0)) == {"stats", "nodes", "plan", "recoveries", "requests"}
    return pace


def asked(pace: Pace, seconds: float, status: dict[str, Any]) -> dict[str, int]:
    """How often each was asked for, at looks as the pace wants them."""
    now, counts = 0.0, {"status": 0}
    while now < seconds:
        now += pace.wait_s(0.0, 1, 0.0)
        for what in ("status", *pace.due(now)):
            counts[what] = counts.get(what, 0) + 1
        pace.heard(status, is_recovering=False)
    return counts


def test_an_idle_swarm_is_asked_little() -> None:
    counts = asked(begun(IDLE), 10.0, IDLE)
    assert counts == {"status": 20, "stats": 10, "nodes": 10, "requests": 5, "plan": 2, "recoveries": 2}


def test_a_busy_one_is_looked_at_ten_times_a_second() -> None:
    counts = asked(begun(BUSY), 10.0, BUSY)
    assert 98 <= counts["status"] <= 101
    assert 30 <= counts["requests"] <= 41
    assert counts["nodes"] <= 10


def test_news_in_the_status_are_followed_at_once() -> None:
    pace = begun(IDLE)
    pace.heard(IDLE | {"epoch": 2}, is_recovering=False)
    assert set(pace.due(0.1)) == {"nodes", "plan", "recoveries"}
    pace.heard(IDLE | {"epoch": 2, "num_queued": 1}, is_recovering=False)
    assert pace.due(0.2) == ["requests"]


def test_a_recovery_is_looked_at_whole() -> None:
    pace = begun(IDLE)
    pace.heard(IDLE, is_recovering=True)
    assert pace.is_busy
    assert set(pace.due(0.1)) == set(pace.due(0.11)) == {"nodes", "plan", "recoveries"}


def test_a_swarm_that_does_not_serve_is_busy() -> None:
    pace = begun(IDLE | {"state": "preparing"})
    assert pace.is_busy


def test_dear_looks_come_seldom() -> None:
    """All looks together take their share of the time, and no more: a small one where the gateway is pressed."""
    pace = begun(BUSY)
    assert pace.wait_s(0.0, 1, 1.0) == PRESSED_S
    assert pace.wait_s(0.002, 1, 0.9) == 0.002 / SHARE
    assert pace.wait_s(0.002, 1, 0.1) == BUSY_S
    assert pace.wait_s(0.01, 1, 0.1) == 0.01 / ROOMY_SHARE
    assert pace.wait_s(10.0, 1, 0.1) == MAX_S
    pace.heard(IDLE, is_recovering=False)
    assert pace.wait_s(0.0, 0, 0.0) == IDLE_S


def test_a_load_is_that_of_late() -> None:
    load = Load()
    load.now(5.0, 100.0)
    assert load.now(5.5, 101.0) == 0.5
    assert load.now(5.5, 101.0) == 0.0
    assert load.now(7.5, 103.0) == 1.0


def test_there_are_no_more_than_ten_events_a_second() -> None:
    assert begun(BUSY).wait_s(0.0, 2, 0.0) == 2 * BUSY_S


def test_all_is_asked_again_after_an_absence() -> None:
    pace = begun(IDLE)
    pace.ask_all()
    assert len(pace.due(0.1)) == 5

"""When the broker is asked what: as often as there can be news, and never so often that looking slows anything down."""

from __future__ import annotations

from typing import Any

from swarm.gateway.console.polling import (
    BUSY_LOAD_POLL_S,
    BUSY_S,
    CHANGES_GAP_S,
    IDLE_S,
    IDLE_SHARE,
    LIST_SHARE,
    MAX_EVENTS_PER_S,
    MAX_LIST_S,
    MAX_S,
    MIN_LOAD,
    QUICK_FOR_S,
    QUICK_S,
    QUICK_SHARE,
    RESERVED_EVENTS,
    SHARE,
    LoadMeter,
    PollSchedule,
)

IDLE: dict[str, Any] = {"state": "serving", "epoch": 1, "num_running": 0, "num_queued": 0, "num_workers": 2}
BUSY = IDLE | {"num_running": 1}


def begun(status: dict[str, Any]) -> PollSchedule:
    """One that has asked for everything at 0."""
    pace = PollSchedule()
    pace.on_status(status, 0.0, is_recovering=False)
    assert set(pace.take_due(0.0)) == {"stats", "nodes", "plan", "recoveries", "requests"}
    return pace


def asked(pace: PollSchedule, seconds: float, status: dict[str, Any]) -> dict[str, int]:
    """How often each was asked for, at looks as the pace wants them."""
    now, counts = 0.0, {"status": 0}
    while now < seconds:
        now += pace.wait_s(now, 0.0, 0.0)
        for what in ("status", *pace.take_due(now)):
            counts[what] = counts.get(what, 0) + 1
        pace.on_status(status, now, is_recovering=False)
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
    pace.on_status(IDLE | {"epoch": 2}, 0.1, is_recovering=False)
    assert set(pace.take_due(0.1)) == {"nodes", "plan", "recoveries"}
    pace.on_status(IDLE | {"epoch": 2, "num_queued": 1}, 0.2, is_recovering=False)
    assert "requests" in pace.take_due(0.2)


def test_a_recovery_is_looked_at_quickly_for_a_moment() -> None:
    """Its phases at each look, what it costs more to report as often as ever; one that lasts is looked at as anything
    that is under way."""
    pace = begun(IDLE)
    pace.on_status(IDLE, 0.1, is_recovering=True)
    assert pace.is_busy
    assert set(pace.take_due(0.1)) == {"nodes", "plan", "recoveries"}
    assert pace.wait_s(0.1, 0.0, 0.0) == QUICK_S
    assert pace.take_due(0.1 + QUICK_S) == ["recoveries"]
    assert {"nodes", "plan", "recoveries"} <= set(pace.take_due(0.1 + BUSY_S))
    late = 0.1 + QUICK_FOR_S
    pace.on_status(IDLE, late, is_recovering=True)
    assert pace.wait_s(late, 0.0, 0.0) == BUSY_S
    assert "recoveries" in pace.take_due(late)


def test_a_plan_that_changes_is_looked_after_at_once() -> None:
    """It may be a recovery's; one that takes its time is looked at as anything that is under way."""
    for change in ({"state": "preparing"}, {"epoch": 2}):
        pace = begun(BUSY)
        pace.on_status(BUSY | change, 0.1, is_recovering=False)
        assert pace.wait_s(0.1, 0.0, 1.0) == QUICK_S
        assert "recoveries" in pace.take_due(0.1 + QUICK_S)
        pace.on_status(BUSY | change, 0.1 + QUICK_FOR_S, is_recovering=False)
        assert pace.wait_s(0.1 + QUICK_FOR_S, 0.0, 0.0) == BUSY_S


def test_while_looks_are_quick_all_but_recoveries_is_told_calmly() -> None:
    pace = begun(BUSY)
    assert pace.may_send_changes(0.1, is_of_recoveries=False)
    pace.record_sent(1, 0.1)
    assert pace.may_send_changes(0.2, is_of_recoveries=False)
    pace.poll_quickly(0.2)
    assert not pace.may_send_changes(0.2, is_of_recoveries=False)
    assert pace.may_send_changes(0.2, is_of_recoveries=True)
    assert pace.may_send_changes(0.1 + CHANGES_GAP_S, is_of_recoveries=False)


def test_the_end_of_a_recovery_ends_the_hurry() -> None:
    pace = begun(BUSY)
    pace.on_status(BUSY, 0.1, is_recovering=True)
    pace.on_status(BUSY, 0.2, is_recovering=False)
    assert pace.wait_s(0.2, 0.0, 0.0) == BUSY_S


def test_what_an_order_brings_about_is_seen_from_its_beginning() -> None:
    """Also at an idle swarm, and by a gateway that has its hands full; nothing comes of it, and all is as before."""
    pace = begun(IDLE)
    pace.poll_quickly(1.0)
    for load in (0.0, 1.0):
        assert pace.wait_s(1.0, 0.0, load) == QUICK_S
    assert pace.wait_s(1.0, 0.01, 1.0) == 0.01 / QUICK_SHARE
    pace.take_due(1.0)
    assert pace.take_due(1.0 + QUICK_S) == ["recoveries"]
    assert pace.wait_s(1.0 + QUICK_FOR_S, 0.0, 0.0) == IDLE_S


def test_a_swarm_that_does_not_serve_is_busy() -> None:
    pace = begun(IDLE | {"state": "preparing"})
    assert pace.is_busy


def test_dear_looks_come_seldom() -> None:
    """All looks together take their share of the time, and no more: a small one where the gateway is pressed."""
    pace = begun(BUSY)
    assert pace.wait_s(0.0, 0.0, 1.0) == BUSY_LOAD_POLL_S
    assert pace.wait_s(0.0, 0.001, 1.0) == 0.001 / SHARE
    assert pace.wait_s(0.0, 0.001, 0.75) == 0.001 / SHARE / 0.75
    assert pace.wait_s(0.0, 0.0, 0.3) == BUSY_LOAD_POLL_S / MIN_LOAD
    assert pace.wait_s(0.0, 0.002, 0.1) == BUSY_S
    assert pace.wait_s(0.0, 0.01, 0.1) == 0.01 / IDLE_SHARE
    assert pace.wait_s(0.0, 10.0, 0.1) == MAX_S
    pace.on_status(IDLE, 0.0, is_recovering=False)
    assert pace.wait_s(0.0, 0.0, 0.0) == IDLE_S


def test_a_long_list_of_requests_keeps_nothing_else_waiting() -> None:
    """Where the gateway is pressed, it is asked for by its own cost, however often requests change; else as ever."""
    pace = begun(BUSY)
    pace.charge(0.0005, 1.0, 0.0, has_requests=False)
    assert pace.charge(0.0025, 1.0, 0.0, has_requests=True) == 0.0005
    assert pace.wait_s(0.0, 0.0005, 1.0) == BUSY_LOAD_POLL_S
    for number, now in enumerate((0.3, 0.6, 0.9, 1.15)):
        pace.on_status(BUSY | {"num_queued": number}, now, is_recovering=False)
        found = pace.take_due(now)
        assert "stats" in found or now != 0.6
        assert "requests" not in found
    assert "requests" in pace.take_due(0.002 / LIST_SHARE)
    pace.charge(10.0, 1.0, 2.0, has_requests=True)
    assert "requests" not in pace.take_due(1.99 + MAX_LIST_S)
    assert "requests" in pace.take_due(2.0 + MAX_LIST_S)
    pace.charge(10.0, 1.0, 9.0, has_requests=True)
    pace.request_all()
    assert "requests" in pace.take_due(9.1)
    roomy = begun(BUSY)
    assert roomy.charge(0.0025, 0.1, 0.0, has_requests=True) == 0.0025
    assert "requests" in roomy.take_due(0.3)


def test_a_load_is_that_of_late() -> None:
    load = LoadMeter()
    load.measure(5.0, 100.0)
    assert load.measure(5.5, 101.0) == 0.5
    assert load.measure(5.5, 101.0) == 0.0
    assert load.measure(7.5, 103.0) == 1.0


def test_there_are_no_more_than_ten_events_in_any_second() -> None:
    """However much there is to tell, and however quick the looks are."""
    pace, now = begun(BUSY), 0.0
    told: list[float] = []
    for look in range(400):
        if look % 50 == 0:
            pace.poll_quickly(now)
        count = 2 if pace.may_send_events(now) else 1
        told += [now] * count
        pace.record_sent(count, now)
        now += pace.wait_s(now, 0.0, 0.0)
    assert all(later - at > 0.999 for at, later in zip(told, told[MAX_EVENTS_PER_S:], strict=False))
    assert len(told) / now > 9  # and not much fewer


def test_news_leave_room_for_phases() -> None:
    """While these tick off, the last places of a second are theirs."""
    pace = begun(BUSY)
    pace.record_sent(MAX_EVENTS_PER_S - RESERVED_EVENTS, 5.0)
    assert pace.may_send_events(5.1)
    pace.poll_quickly(5.1)
    assert not pace.may_send_events(5.1)
    assert pace.may_send_events(6.1)
    assert pace.wait_s(5.1, 0.0, 0.0) == QUICK_S


def test_all_is_asked_again_after_an_absence() -> None:
    pace = begun(IDLE)
    pace.request_all()
    assert len(pace.take_due(0.1)) == 5

"""How much of the broker's time one member may take."""

from __future__ import annotations

import pytest

from swarm.broker.requests import cpu_budget
from swarm.broker.requests.cpu_budget import BURST_S, MAX_PAUSE_S, MIN_PAUSE_S, SHARE, CpuBudget


def test_who_goes_on_and_on_has_its_share_of_the_time() -> None:
    """After what it may use up at once: whoever rests as long as it is told to takes that share, and no more."""
    told, now, taken = CpuBudget(), 0.0, 0.0
    while now < 1000.0:
        taken += 0.001
        now += 0.001 + told.charge("a", 0.001, now + 0.001)
    assert taken == pytest.approx(BURST_S + SHARE * 1000.0, rel=0.01)


def test_who_asks_now_and_then_never_rests() -> None:
    """Nor who comes with much at once after a pause; and nobody for what another one did."""
    told = CpuBudget()
    told.charge("flood", 10.0, 0.0)
    assert [told.charge("a", 0.09, float(second)) for second in range(100)] == [0.0] * 100
    assert told.charge("a", BURST_S, 200.0) == 0.0
    assert told.charge("a", SHARE * MIN_PAUSE_S / 2, 200.0) == 0.0  # it is not worth it
    assert told.charge("a", SHARE, 200.0) == pytest.approx(1.0, rel=0.01)


def test_nobody_rests_for_long() -> None:
    """However much it took, say a question that is found out in a minute."""
    told = CpuBudget()
    assert told.charge("a", 60.0, 0.0) == MAX_PAUSE_S
    assert told.charge("a", 0.0, MAX_PAUSE_S) == 0.0


def test_no_more_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has said nothing for longest is forgotten."""
    monkeypatch.setattr(cpu_budget, "MAX_MEMBERS", 2)
    told = CpuBudget()
    for key in ("a", "b", "a", "c"):
        told.charge(key, 2.0, 0.0)
    assert told.charge("a", 0.0, 0.0) == MAX_PAUSE_S
    assert told.charge("b", 0.0, 0.0) == 0.0

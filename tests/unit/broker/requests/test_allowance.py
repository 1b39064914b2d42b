"""How much of the broker's time one member may take."""

from __future__ import annotations

import pytest

from swarm.broker.requests import allowance
from swarm.broker.requests.allowance import AT_ONCE_S, LEAST_REST_S, MOST_REST_S, SHARE, Allowance


def test_who_goes_on_and_on_has_its_share_of_the_time() -> None:
    """After what it may use up at once: whoever rests as long as it is told to takes that share, and no more."""
    told, now, taken = Allowance(), 0.0, 0.0
    while now < 1000.0:
        taken += 0.001
        now += 0.001 + told.spent("a", 0.001, now + 0.001)
    assert taken == pytest.approx(AT_ONCE_S + SHARE * 1000.0, rel=0.01)


def test_who_asks_now_and_then_never_rests() -> None:
    """Nor who comes with much at once after a pause; and nobody for what another one did."""
    told = Allowance()
    told.spent("flood", 10.0, 0.0)
    assert [told.spent("a", 0.09, float(second)) for second in range(100)] == [0.0] * 100
    assert told.spent("a", AT_ONCE_S, 200.0) == 0.0
    assert told.spent("a", SHARE * LEAST_REST_S / 2, 200.0) == 0.0  # it is not worth it
    assert told.spent("a", SHARE, 200.0) == pytest.approx(1.0, rel=0.01)


def test_nobody_rests_for_long() -> None:
    """However much it took, say a question that is found out in a minute."""
    told = Allowance()
    assert told.spent("a", 60.0, 0.0) == MOST_REST_S
    assert told.spent("a", 0.0, MOST_REST_S) == 0.0


def test_no_more_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has said nothing for longest is forgotten."""
    monkeypatch.setattr(allowance, "MOST_KNOWN", 2)
    told = Allowance()
    for key in ("a", "b", "a", "c"):
        told.spent(key, 2.0, 0.0)
    assert told.spent("a", 0.0, 0.0) == MOST_REST_S
    assert told.spent("b", 0.0, 0.0) == 0.0

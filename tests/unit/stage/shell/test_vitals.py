"""What the beat thread reads."""

from __future__ import annotations

import pytest

from swarm.stage.shell.vitals import LOOP_INTERVAL_S, MAX_TURN_S, Condition, Vitals
from swarm.testing import ManualClock


def test_since_moves_only_when_the_condition_changes() -> None:
    """A worker that is blocked on the same peer for long says for how long; another peer is another condition."""
    clock = ManualClock(5.0)
    vitals = Vitals(clock)
    vitals.set_condition("blocked", "w2")
    assert vitals.since == 5.0
    clock.advance(3.0)
    vitals.set_condition("blocked", "w2")
    assert vitals.since == 5.0
    vitals.set_condition("blocked", "w3")
    assert (vitals.since, vitals.blocked_on) == (8.0, "w3")
    clock.advance(1.0)
    vitals.set_condition("idle")
    assert (vitals.since, vitals.blocked_on, vitals.condition) == (9.0, "", "idle")


@pytest.mark.parametrize(
    ("condition", "shown"),
    [("idle", "loading"), ("computing", "computing"), ("blocked", "blocked"), ("parked", "parked")],
)
def test_loading_shows_when_nothing_else_goes_on(condition: Condition, shown: Condition) -> None:
    """A worker that loads in the background and computes is judged by its computing."""
    vitals = Vitals(ManualClock())
    vitals.set_condition(condition)
    assert vitals.visible_condition == condition
    vitals.set_loading(True)
    assert vitals.visible_condition == shown


def test_what_is_shown_began_when_it_did() -> None:
    """A fresh worker has been idle since it was made; loading counts from its own beginning, and so does what follows
    it; what is computed meanwhile counts by itself."""
    clock = ManualClock(4720.0)
    vitals = Vitals(clock)
    assert vitals.visible_since == 4720.0
    clock.advance(10.0)
    vitals.set_loading(True)
    clock.advance(1.0)
    assert (vitals.visible_condition, vitals.visible_since) == ("loading", 4730.0)
    vitals.set_condition("computing")
    clock.advance(1.0)
    assert (vitals.visible_condition, vitals.visible_since) == ("computing", 4731.0)
    vitals.set_condition("idle")
    clock.advance(1.0)
    vitals.set_loading(False)
    assert (vitals.visible_condition, vitals.visible_since) == ("idle", 4733.0)


def test_progress_counts_computing_and_loading() -> None:
    """Either of them is a sign of life."""
    vitals = Vitals(ManualClock(), computed=3, loaded=4)
    assert vitals.progress == 7


@pytest.mark.parametrize("condition", ["idle", "blocked", "parked"])
def test_a_compute_thread_that_stands_still_computes(condition: Condition) -> None:
    """Whatever it hangs in, a step or an order: it is judged like one that computes, since it last looked around."""
    clock = ManualClock(100.0)
    vitals = Vitals(clock)
    vitals.set_condition(condition)
    clock.advance(5.0)
    vitals.last_turn_at = clock.now()
    clock.advance(MAX_TURN_S)
    assert vitals.visible_condition == condition
    clock.advance(1.0)
    assert (vitals.visible_condition, vitals.visible_since) == ("computing", 105.0)
    vitals.last_turn_at = clock.now()
    assert vitals.visible_condition == condition


def test_a_control_loop_that_stands_still_shows_at_once() -> None:
    """The lag grows while the loop stands still, and is told once more when it goes on; going round in time is none."""
    clock = ManualClock(100.0)
    vitals = Vitals(clock)
    assert vitals.loop_lag_s == 0.0
    vitals.record_loop_turn()
    clock.advance(LOOP_INTERVAL_S)
    assert vitals.loop_lag_s == pytest.approx(0.0)
    clock.advance(3.0)
    assert vitals.loop_lag_s == pytest.approx(3.0)
    vitals.record_loop_turn()
    assert vitals.loop_lag_s == pytest.approx(3.0)
    clock.advance(LOOP_INTERVAL_S)
    vitals.record_loop_turn()
    assert vitals.loop_lag_s == pytest.approx(0.0)

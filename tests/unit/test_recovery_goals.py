"""The figures of recoveries and copies are computed and compared with their goals as the table says."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.documents import ROOT

_SPEC = importlib.util.spec_from_file_location("recovery_goals", ROOT / "tools" / "recovery_goals.py")
assert _SPEC is not None
assert _SPEC.loader is not None
goals = importlib.util.module_from_spec(_SPEC)
sys.modules["recovery_goals"] = goals  # dataclasses look their module up
_SPEC.loader.exec_module(goals)


def test_the_median_with_copies_is_compared_with_the_goal() -> None:
    row = goals.Figure("1 × 256", "ms", [30.0, 39.0, 900.0], [300.0], goals.stall_goal(1, 256, demo=True))
    assert row.is_met
    assert row.cells() == ["1 × 256", "39 ms", "300 ms", "≤ 40 ms", "yes", ""]
    missed = goals.Figure("8 × 1024", "ms", [81.0], [], goals.stall_goal(8, 1024, demo=True), {"replayed": 12.0})
    assert missed.cells() == ["8 × 1024", "81 ms", "–", "≤ 80 ms", "NO", "replayed 12"]


def test_a_row_without_a_goal_or_samples_has_no_verdict() -> None:
    assert goals.stall_goal(8, 256, demo=True) is None
    assert goals.Figure("8 × 256", "ms", [1.0], [2.0]).is_met is None
    assert goals.Figure("a drain", "ms", [], [2.0], goals.DRAIN_GAP).is_met is None


def test_a_row_is_shown_as_soon_as_it_is_measured() -> None:
    shown: list[str] = []
    figures = goals.Figures(shown.append)
    figures.add(goals.Figure("stall, 1 × 256", "ms", [39.0], [57.0], goals.stall_goal(1, 256, demo=True)))
    assert shown == ["stall, 1 × 256: on 39 ms, off 57 ms, goal ≤ 40 ms, met yes"]
    figures.add(goals.Figure("two deaths", "ms", [4.0], [], also={"copied": 12.0}))
    assert shown[1:] == ["two deaths: on 4 ms, off –, goal –, met –, copied 12"]
    assert [row.case for row in figures.rows] == ["stall, 1 × 256", "two deaths"]


def test_the_goals_are_those_of_the_issue() -> None:
    assert goals.stall_goal(8, 8192, demo=False).most == 500.0
    assert goals.slope_goal().most == 0.05
    assert (goals.cost_goal(demo=True).most, goals.cost_goal(demo=False).most) == (3.0, 2.0)
    assert (goals.DRAIN_GAP.most, goals.DRAIN_REPLAYED.most, goals.GAIN_ERROR.most) == (300.0, 0.0, 25.0)


def test_gaps_of_rebuilt_and_resumed_sequences_are_told_apart() -> None:
    """The next plan is active at 1.0, and the last layer is complete at 3.0."""
    early = [0.0, 0.9, 1.5, 1.9, 2.9, 3.5, 9.0]  # resumed at 1.5, waits 1.0 for others; what is later doesn't count
    late = [0.0, 0.8, 3.1, 3.2]
    assert goals.longest_gaps([early, late], 1.0, 3.0) == goals.Gaps(pytest.approx(2.3), pytest.approx(1.0))
    assert goals.longest_gaps([late], 1.0, 3.0).resumed == 0.0
    assert goals.longest_gaps([], 1.0, 3.0) == goals.Gaps(0.0, 0.0)


def test_a_stall_has_a_slope_if_contexts_differ() -> None:
    assert goals.slope([(256, 100.0), (1024, 100.0 + 768 * 0.2)]) == pytest.approx(0.2)
    assert goals.slope([(256, 100.0), (256, 120.0)]) is None
    assert goals.slope([]) is None


def test_a_gain_is_compared_with_its_prediction() -> None:
    assert goals.gain_error(2.0, 1.5) == pytest.approx(25.0)
    assert goals.gain_error(1.6, 1.7) == pytest.approx(6.25)

"""Whole swarms with keys and values on disk: nothing wrong is ever read, late or lost, and whatever dies meanwhile."""

from __future__ import annotations

import pytest

from swarm.broker.state.restores import RestoreState
from swarm.sim.actors import spill_shell
from swarm.sim.run import run
from swarm.stage import kv_spill
from tests.unit.sim.groups import NUM, in_groups

schedules = pytest.mark.schedules


@in_groups
def test_accidents_with_disks(first_seed: int) -> None:
    """Every request reaches its one right end, and in many schedules positions are read."""
    played = [run(seed, spills=True) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_restored > 0 for o in played) >= NUM // 10


def test_without_disks_nothing_is_read() -> None:
    assert run(5).num_restored == 0


def test_bits_that_change_between_plans_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing is excluded that was computed with other bits."""

    def start_plan(restores: RestoreState, bits: str, num_positions: int, running: dict[int, int]) -> None:
        restores.bits, restores.num_positions = bits, num_positions if bits else 0

    monkeypatch.setattr(RestoreState, "start_plan", start_plan)
    assert "I16" in (run(51, spills=True).failure or "")


@schedules
def test_a_wrong_file_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a chunk's name says which it is, but not of which tokens."""
    named = kv_spill.extend_name
    monkeypatch.setattr(kv_spill, "extend_name", lambda before, tokens, *_: named(before, range(len(tokens))))
    failures = [run(seed, spills=True).failure for seed in range(NUM)]
    assert any(failure and "I16" in failure for failure in failures)


@pytest.mark.parametrize(
    "first_seed", [20, *(pytest.param(first, marks=[schedules, pytest.mark.long]) for first in (0, 40, 60, 80))]
)
def test_a_stage_that_reports_more_than_it_has_read(first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what it was ordered to read, so that the next step fails there: no request is ever to blame for that."""
    monkeypatch.setattr(spill_shell, "WRONG_ANSWERS", 0.5)
    monkeypatch.setattr(spill_shell, "WRONG_BY", (1, spill_shell.CHUNK))
    played = [run(seed, spills=True) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_differences for o in played) > 0

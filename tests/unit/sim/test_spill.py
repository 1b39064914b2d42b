"""Whole swarms with keys and values on disk: nothing wrong is ever read, late or lost, and whatever dies meanwhile."""

from __future__ import annotations

import pytest

from swarm.sim.run import run
from swarm.stage import kv_spill

schedules = pytest.mark.schedules
NUM = 20


@pytest.mark.parametrize("first_seed", [0, *(pytest.param(first, marks=schedules) for first in (20, 40, 60, 80))])
def test_accidents_with_disks(first_seed: int) -> None:
    """Every request reaches its one right end, and in many schedules positions are read."""
    played = [run(seed, spills=True) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_restored > 0 for o in played) >= NUM // 10


def test_without_disks_nothing_is_read() -> None:
    assert run(5).num_restored == 0


@schedules
def test_a_wrong_file_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a chunk's name says which it is, but not of which tokens."""
    named = kv_spill.extend_name
    monkeypatch.setattr(kv_spill, "extend_name", lambda before, tokens: named(before, range(len(tokens))))
    failures = [run(seed, spills=True).failure for seed in range(NUM)]
    assert any(failure and "I16" in failure for failure in failures)

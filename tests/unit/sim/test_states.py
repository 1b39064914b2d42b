"""Recurrent models in whole swarms with accidents: a state that is lost or wrong fails the schedule."""

from __future__ import annotations

import pytest

from swarm.sim.run import run
from swarm.stage.sequences import StoredSequence
from tests.unit.sim.groups import NUM, in_groups, with_and_without_disks


@in_groups
@with_and_without_disks
def test_accidents_beside_states(first_seed: int, spills: bool) -> None:
    """Steps are fenced in the middle, layers move, sequences are cut, copied, forked and preempted. Nothing is restored
    from disk."""
    played = [run(seed, states=True, spills=spills) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_replayed for o in played) > 10 * NUM
    assert sum(o.num_preemptions for o in played) > 0
    assert sum(o.num_adopted for o in played) > NUM
    assert [o.num_restored for o in played] == [0] * NUM


def test_a_state_that_is_not_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here stages cut states like keys and values."""
    monkeypatch.setattr(StoredSequence, "_held_before", lambda self, held, position: min(held, position))
    failures = (run(seed, states=True).failure for seed in range(NUM))
    assert next((failure for failure in failures if failure is not None), "")

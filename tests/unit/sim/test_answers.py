"""Requests for vectors and for log probabilities of prompts in whole swarms with accidents: each ends once, with its
right answer."""

from __future__ import annotations

import pytest

from swarm.broker.state import Sequence
from swarm.sim.run import run
from swarm.testing import FakeExecutor
from swarm.wire.messages import Row
from tests.unit.sim.groups import NUM, in_groups, with_and_without_disks


@in_groups
@with_and_without_disks
def test_accidents_beside_vectors(first_seed: int, spills: bool) -> None:
    """In most schedules some are computed although workers, connections and brokers are lost."""
    played = [run(seed, answers=True, spills=spills) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_vectors for o in played) > NUM // 4
    assert sum(o.num_scored for o in played) > 40 * NUM


def test_without_them_there_are_none() -> None:
    assert (run(5).num_vectors, run(5).num_scored) == (0, 0)


def first_failure() -> str:
    failures = (run(seed, answers=True).failure for seed in range(3 * NUM))
    return next((failure for failure in failures if failure is not None), "")


def test_a_mean_that_resumes_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it keeps its positions over a change of plan, and starts from others' beginnings: its sum is not there."""
    monkeypatch.setattr(Sequence, "keeps_sum", False)
    assert "its sum has" in first_failure()


def test_a_wrong_vector_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a stage does not add the first position of each row after the first."""
    add = FakeExecutor._add

    def skip(self: FakeExecutor, row: Row, outputs: list[int]) -> int:
        return add(self, row, outputs[1:] if row.start else outputs)

    monkeypatch.setattr(FakeExecutor, "_add", skip)
    assert "its vector is" in first_failure()

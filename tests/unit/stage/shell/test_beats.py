"""Asleep is not busy, not starved, and not waiting for a disk."""

from __future__ import annotations

import pytest

from swarm.stage.shell.heartbeat import SleepDetector, ThreadSample


def told(*seen: tuple[int, float, bool]) -> float:
    """A beat every tenth of a second: progress, processor time so far, whether somebody attends."""
    slumber, said = SleepDetector(), 0.0
    slumber.mark_awake(0, 0.0)
    for number, (progress, ran_s, attends) in enumerate(seen, start=1):
        said = slumber.update(progress, ThreadSample(ran_s, attends), number / 10)
    return said


def test_nothing_but_sleep_adds_up() -> None:
    assert told(*((0, 1.0, False) for _ in range(9))) == pytest.approx(0.8)  # since the first look at it
    assert told(*((0, 1.0 + i * 0.001, False) for i in range(9))) == pytest.approx(0.8)  # somebody looks around


@pytest.mark.parametrize(
    "last", [(1, 1.0, False), (0, 1.05, False), (0, 1.0, True)], ids=["progress", "it ran", "it waits for a core"]
)
def test_any_sign_of_work_begins_it_anew(last: tuple[int, float, bool]) -> None:
    assert told(*((0, 1.0, False) for _ in range(9)), last) == 0.0
    assert told(*((0, 1.0, False) for _ in range(9)), last, (last[0], last[1], False)) == pytest.approx(0.1)


def test_who_had_nothing_to_do_has_not_slept() -> None:
    slumber = SleepDetector()
    slumber.mark_awake(0, 0.0)
    assert slumber.update(0, ThreadSample(1.0, is_active=False), 100.0) == 0.0

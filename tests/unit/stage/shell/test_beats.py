"""Asleep is not busy, not starved, and not waiting for a disk."""

from __future__ import annotations

import hashlib
import sys
import threading
import time

import pytest

from swarm.stage.shell.beats import Look, Slumber, look


def told(*seen: tuple[int, float, bool]) -> float:
    """A beat every tenth of a second: progress, processor time so far, whether somebody attends."""
    slumber, said = Slumber(), 0.0
    slumber.awake(0, 0.0)
    for number, (progress, ran_s, attends) in enumerate(seen, start=1):
        said = slumber.asleep_s(progress, Look(ran_s, attends), number / 10)
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
    slumber = Slumber()
    slumber.awake(0, 0.0)
    assert slumber.asleep_s(0, Look(1.0, attends=False), 100.0) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of threads")
def test_real_threads_are_seen_to_work_and_to_sleep() -> None:
    """One computes outside the interpreter's lock for as long as this test looks; then it sleeps."""
    stop, slept = threading.Event(), threading.Event()
    native: list[int] = []

    def work() -> None:
        native.append(threading.get_native_id())
        block = bytes(1 << 20)
        while not stop.is_set():
            hashlib.sha256(block).digest()
        slept.wait(60.0)

    thread = threading.Thread(target=work)
    thread.start()
    while not native:
        time.sleep(0.01)
    others = frozenset(t.native_id or 0 for t in threading.enumerate()) - {native[0]}
    before, began = look(others), time.monotonic()
    while (seen := look(others)) is None or before is None or seen.ran_s - before.ran_s < 0.05:
        assert time.monotonic() - began < 30.0
        time.sleep(0.01)
    stop.set()
    while (seen := look(others)) is None or seen.attends:
        assert time.monotonic() - began < 60.0
        time.sleep(0.01)
    again = look(others)
    assert again is not None
    assert again.ran_s - seen.ran_s < 0.01
    slept.set()
    thread.join()

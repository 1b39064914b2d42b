"""What the system tells of a process's threads: who works, who sleeps."""

from __future__ import annotations

import hashlib
import sys
import threading
import time

import pytest

from swarm.stage.shell.heartbeat import sample_threads


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
    before, began = sample_threads(others), time.monotonic()
    while (seen := sample_threads(others)) is None or before is None or seen.ran_s - before.ran_s < 0.05:
        assert time.monotonic() - began < 30.0
        time.sleep(0.01)
    stop.set()
    while (seen := sample_threads(others)) is None or seen.is_active:
        assert time.monotonic() - began < 60.0
        time.sleep(0.01)
    again = sample_threads(others)
    assert again is not None
    assert again.ran_s - seen.ran_s < 0.01
    slept.set()
    thread.join()

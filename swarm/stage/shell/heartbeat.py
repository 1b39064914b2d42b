"""The heartbeat thread: reports, over a socket of its own, that the worker's process is alive and how far it has come.

A step without progress may be long, starved of processor time, or hung. A thread that computes is running, or waiting
for a core or a disk, however busy the machine is. A thread that is blocked on a lock which is never released, or on a
device that does not answer, does none of these. So heartbeats report how long all threads have been asleep
(``SleepDetector``), as the operating system shows it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm import failpoints
from swarm.stage.shell.connections import PeerConnector
from swarm.stage.shell.vitals import Vitals
from swarm.wire.codec import HEARTBEAT
from swarm.wire.messages import Heartbeat

TASKS: Final = Path("/proc/self/task")
BUSY_SHARE = 0.2  # of one core; idle threads with timers take less
_ACTIVE_STATES: Final = frozenset({"R", "D"})  # thread states: R, running or waiting for a core; D, waiting for a disk


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """State of the process's threads at one time."""

    ran_s: float  # processor time of all threads so far
    is_active: bool  # a thread that may compute is running, or waiting for a core or a disk


class SleepDetector:
    """Detector of a process whose threads are all asleep. It takes one sample per heartbeat."""

    def __init__(self) -> None:
        self._progress = -1  # progress counter at the last sample
        self._last_sample: ThreadSample | None = None  # None after ``mark_awake``: the next sample can't be compared
        self._sampled_at = 0.0
        self._awake_at = 0.0  # when a thread was last seen running

    def mark_awake(self, progress: int, now: float) -> None:
        """Reset: nothing is being computed, or no sample is available."""
        self._progress, self._last_sample, self._awake_at = progress, None, now

    def update(self, progress: int, sample: ThreadSample, now: float) -> float:
        """Add a sample; return the seconds for which all threads have been asleep without progress."""
        last, self._last_sample = self._last_sample, sample
        passed_s, self._sampled_at = now - self._sampled_at, now
        moved = progress != self._progress
        self._progress = progress
        if moved or last is None or sample.is_active or sample.ran_s - last.ran_s > BUSY_SHARE * passed_s:
            self._awake_at = now
        return now - self._awake_at


def sample_threads(excluded: frozenset[int]) -> ThreadSample | None:
    """Sample every thread of this process except those in ``excluded``, which only pass messages on.

    Returns None if the operating system offers no such figures (it is not Linux).
    """
    ran_ns, is_active = 0, False
    try:
        for task in os.listdir(TASKS):
            if int(task) in excluded:
                continue
            ran_ns += int((TASKS / task / "schedstat").read_text().split()[0])
            name, _, rest = (TASKS / task / "stat").read_text().partition("(")[2].rpartition(")")
            is_active = is_active or (rest.split()[0] in _ACTIVE_STATES and not name.startswith("ZMQ"))
    except FileNotFoundError:
        # A thread ended meanwhile, so something was running. Without the folder, this is another operating system.
        return ThreadSample(0.0, is_active=True) if TASKS.is_dir() else None
    except (OSError, ValueError, IndexError):
        return None
    return ThreadSample(ran_ns / 1e9, is_active)


class HeartbeatThread:
    """Thread that sends heartbeats while the process lives, whatever its other threads do."""

    def __init__(
        self,
        connector: PeerConnector,
        endpoint: str,
        interval_s: float,
        incarnation: str,
        vitals: Vitals,
    ) -> None:
        self._connector = connector
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._incarnation = incarnation
        self._vitals = vitals
        self._sleep_detector = SleepDetector()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        channel = self._connector.open(self._endpoint)
        try:
            while not self._stopped.wait(self._interval_s):
                if failpoints.armed:
                    failpoints.hit("beat.due")
                channel.send(HEARTBEAT.encode(self._make_heartbeat()))
        finally:
            channel.close()

    def _asleep_s(self) -> float:
        """Return the seconds without activity; threads are sampled only while a step makes no progress."""
        vitals, now = self._vitals, self._vitals.clock.now()
        sample = None
        if vitals.visible_condition == "computing":
            sample = sample_threads(frozenset({threading.main_thread().native_id or 0, threading.get_native_id()}))
        if sample is None:
            self._sleep_detector.mark_awake(vitals.progress, now)
            return 0.0
        return self._sleep_detector.update(vitals.progress, sample, now)

    def _make_heartbeat(self) -> Heartbeat:
        vitals = self._vitals
        return Heartbeat(
            epoch=vitals.epoch,
            incarnation=self._incarnation,
            progress=vitals.progress,
            state=vitals.visible_condition,
            blocked_on=vitals.blocked_on,
            since_s=max(0.0, vitals.clock.now() - vitals.visible_since),
            asleep_s=self._asleep_s(),
            loop_lag_s=vitals.loop_lag_s,
            memory_bytes=vitals.memory_bytes,
            kv_used=vitals.kv_used,
            kv_capacity=vitals.kv_capacity,
        )

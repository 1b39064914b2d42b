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
from swarm.stage.shell.vitals import Vitals
from swarm.stage.shell.way import Way
from swarm.wire.codec import BEAT
from swarm.wire.messages import Beat

TASKS: Final = Path("/proc/self/task")
BUSY_SHARE = 0.2  # of one core; idle threads with timers take less
_ATTENDS: Final = frozenset({"R", "D"})  # thread states: R, running or waiting for a core; D, waiting for a disk


@dataclass(frozen=True, slots=True)
class Look:
    """State of the process's threads at one time."""

    ran_s: float  # processor time of all threads so far
    attends: bool  # a thread that may compute is running, or waiting for a core or a disk


class Slumber:
    """Detector of a process whose threads are all asleep. It takes one sample per heartbeat."""

    def __init__(self) -> None:
        self._progress = -1  # progress counter at the last sample
        self._last: Look | None = None  # None after ``mark_awake``: the next sample can't be compared
        self._looked_at = 0.0
        self._awake_at = 0.0  # when a thread was last seen running

    def awake(self, progress: int, now: float) -> None:
        """Reset: nothing is being computed, or no sample is available."""
        self._progress, self._last, self._awake_at = progress, None, now

    def asleep_s(self, progress: int, look: Look, now: float) -> float:
        """Add a sample; return the seconds for which all threads have been asleep without progress."""
        last, self._last = self._last, look
        passed_s, self._looked_at = now - self._looked_at, now
        moved = progress != self._progress
        self._progress = progress
        if moved or last is None or look.attends or look.ran_s - last.ran_s > BUSY_SHARE * passed_s:
            self._awake_at = now
        return now - self._awake_at


def look(besides: frozenset[int]) -> Look | None:
    """Sample every thread of this process except those in ``excluded``, which only pass messages on.

    Returns None if the operating system offers no such figures (it is not Linux).
    """
    ran_ns, attends = 0, False
    try:
        for task in os.listdir(TASKS):
            if int(task) in besides:
                continue
            ran_ns += int((TASKS / task / "schedstat").read_text().split()[0])
            name, _, rest = (TASKS / task / "stat").read_text().partition("(")[2].rpartition(")")
            attends = attends or (rest.split()[0] in _ATTENDS and not name.startswith("ZMQ"))
    except FileNotFoundError:
        # A thread ended meanwhile, so something was running. Without the folder, this is another operating system.
        return Look(0.0, attends=True) if TASKS.is_dir() else None
    except (OSError, ValueError, IndexError):
        return None
    return Look(ran_ns / 1e9, attends)


class BeatThread:
    """Thread that sends heartbeats while the process lives, whatever its other threads do."""

    def __init__(
        self,
        way: Way,
        endpoint: str,
        interval_s: float,
        incarnation: str,
        vitals: Vitals,
    ) -> None:
        self._way = way
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._incarnation = incarnation
        self._vitals = vitals
        self._slumber = Slumber()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        push = self._way.open(self._endpoint)
        try:
            while not self._stopped.wait(self._interval_s):
                if failpoints.armed:
                    failpoints.reached("beat.due")
                push.send(BEAT.encode(self._beat()))
        finally:
            push.close()

    def _asleep_s(self) -> float:
        """Return the seconds without activity; threads are sampled only while a step makes no progress."""
        vitals, now = self._vitals, self._vitals.clock.now()
        seen = None
        if vitals.shown == "computing":
            seen = look(frozenset({threading.main_thread().native_id or 0, threading.get_native_id()}))
        if seen is None:
            self._slumber.awake(vitals.progress, now)
            return 0.0
        return self._slumber.asleep_s(vitals.progress, seen, now)

    def _beat(self) -> Beat:
        vitals = self._vitals
        return Beat(
            epoch=vitals.epoch,
            incarnation=self._incarnation,
            progress=vitals.progress,
            state=vitals.shown,
            blocked_on=vitals.blocked_on,
            since_s=max(0.0, vitals.clock.now() - vitals.shown_since),
            asleep_s=self._asleep_s(),
            loop_lag_s=vitals.loop_lag_s,
            memory_bytes=vitals.memory_bytes,
            kv_used=vitals.kv_used,
            kv_capacity=vitals.kv_capacity,
        )

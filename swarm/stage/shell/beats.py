"""The beat thread: says that the worker's process lives and how far it is, over a socket of its own.

A step that makes no progress may be long, starved, or hung. Whoever computes runs, or waits for a core or a disk,
however busy the machine is; who waits for a lock that nobody gives back, or for a device that doesn't answer, does none
of that. So beats say for how long there has been nothing but sleep (``Slumber``), as the system sees it.
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
BUSY_SHARE = 0.2  # of one core; less is what threads take that only look around
_ATTENDS: Final = frozenset({"R", "D"})  # it runs or waits for a core; it waits for a disk


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the threads at one time."""

    ran_s: float  # processor time of all of them so far
    attends: bool  # one of those that may compute runs, or waits for a core or a disk


class Slumber:
    """Feed it a look at every beat; it says for how long there has been nothing but sleep."""

    def __init__(self) -> None:
        self._progress = -1
        self._last: Look | None = None
        self._looked_at = 0.0
        self._awake_at = 0.0

    def awake(self, progress: int, now: float) -> None:
        """There is nothing to compute, or no telling."""
        self._progress, self._last, self._awake_at = progress, None, now

    def asleep_s(self, progress: int, look: Look, now: float) -> float:
        last, self._last = self._last, look
        passed_s, self._looked_at = now - self._looked_at, now
        moved = progress != self._progress
        self._progress = progress
        if moved or last is None or look.attends or look.ran_s - last.ran_s > BUSY_SHARE * passed_s:
            self._awake_at = now
        return now - self._awake_at


def look(besides: frozenset[int]) -> Look | None:
    """Read every thread of this process but those ``besides``: they only tell and hand on. None: the system doesn't
    say (it is no Linux)."""
    ran_ns, attends = 0, False
    try:
        for task in os.listdir(TASKS):
            if int(task) in besides:
                continue
            ran_ns += int((TASKS / task / "schedstat").read_text().split()[0])
            name, _, rest = (TASKS / task / "stat").read_text().partition("(")[2].rpartition(")")
            attends = attends or (rest.split()[0] in _ATTENDS and not name.startswith("ZMQ"))
    except FileNotFoundError:
        # One ended meanwhile: somebody did something. Without a list there is no such system.
        return Look(0.0, attends=True) if TASKS.is_dir() else None
    except (OSError, ValueError, IndexError):
        return None
    return Look(ran_ns / 1e9, attends)


class BeatThread:
    """Says that the process lives, whatever its other threads do."""

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
        """Only while a step makes no progress is it worth a look."""
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

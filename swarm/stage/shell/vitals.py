"""Values shared between a worker's threads without locks: plain attributes, each written by one thread only."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Literal

import psutil

from swarm.clock import Clock

Condition = Literal["idle", "loading", "computing", "blocked", "parked"]

MAX_TURN_S = 0.5  # an idle compute thread makes a turn far more often; a longer one means that it is computing
LOOP_INTERVAL_S = 0.1  # interval of the control loop's sign of life


@dataclass(slots=True)
class Vitals:
    """State of the worker's threads, read by the heartbeat thread.

    Assigning an attribute is atomic in CPython. A heartbeat that mixes two moments does no harm: the next one follows a
    tenth of a second later.
    """

    clock: Clock
    epoch: int = 0  # compute thread: the epoch in force
    fence: int = 0  # control loop: the highest epoch received; ``forward`` reads it between layers
    computed: int = 0  # compute thread: layers done so far
    loaded: int = 0  # loader thread: tensors read so far
    is_loading: bool = False  # loader thread: a load is running
    loading_changed_at: float = field(init=False)  # loader thread
    condition: Condition = "idle"  # compute thread
    blocked_on: str = ""  # compute thread: the next stage's name while it accepts nothing
    since: float = field(init=False)  # compute thread: when ``condition`` changed
    last_turn_at: float | None = None  # compute thread: end of its last turn; None: it hasn't begun
    last_loop_at: float | None = None  # control loop: time of its last turn
    loop_lagged_s: float = 0.0  # control loop: delay of its last turn
    kv_used: int = 0
    kv_capacity: int = 0
    memory_bytes: int = 0
    process_usage: dict[str, float] = field(default_factory=dict)  # control loop: further figures of the process

    def __post_init__(self) -> None:
        self.since = self.loading_changed_at = self.clock.now()

    def set_condition(self, condition: Condition, blocked_on: str = "") -> None:
        """Set the compute thread's condition; ``since`` changes only with it."""
        if condition != self.condition or blocked_on != self.blocked_on:
            self.since = self.clock.now()
            self.blocked_on = blocked_on
            self.condition = condition

    def set_loading(self, loading: bool) -> None:
        """Record that the loader thread begins or ends."""
        self.loading_changed_at = self.clock.now()
        self.is_loading = loading

    @property
    def visible_condition(self) -> Condition:
        """Condition for heartbeats.

        Loading runs in parallel with other work, and is reported only while the worker is otherwise idle. A compute
        thread whose current turn takes long is reported as computing, whatever it does.
        """
        if self._is_busy:
            return "computing"
        return "loading" if self.is_loading and self.condition == "idle" else self.condition

    @property
    def visible_since(self) -> float:
        """Time at which the shown condition began."""
        if self._is_busy and self.last_turn_at is not None and self.condition != "computing":
            return self.last_turn_at
        return max(self.since, self.loading_changed_at) if self.condition == "idle" else self.since

    @property
    def _is_busy(self) -> bool:
        return self.condition == "computing" or (
            self.last_turn_at is not None and self.clock.now() - self.last_turn_at > MAX_TURN_S
        )

    @property
    def loop_lag_s(self) -> float:
        """Seconds by which the control loop is late: now, or at its last turn."""
        since_s = 0.0 if self.last_loop_at is None else self.clock.now() - self.last_loop_at
        return max(self.loop_lagged_s, since_s - LOOP_INTERVAL_S, 0.0)

    def record_loop_turn(self) -> None:
        """Record a turn of the control loop, one per ``LOOP_INTERVAL_S``."""
        now = self.clock.now()
        self.loop_lagged_s = 0.0 if self.last_loop_at is None else max(0.0, now - self.last_loop_at - LOOP_INTERVAL_S)
        self.last_loop_at = now

    @property
    def progress(self) -> int:
        return self.computed + self.loaded


def read_process_usage(process: psutil.Process) -> dict[str, float]:
    """Return processor time, open descriptors and their limit."""
    times = process.cpu_times()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {"cpu_s": times.user + times.system, "descriptors": process.num_fds(), "descriptor_limit": limit}

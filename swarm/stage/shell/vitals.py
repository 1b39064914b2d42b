"""What a worker's threads tell each other without locks: plain attributes, each written by one thread only."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Literal

import psutil

from swarm.clock import Clock

Condition = Literal["idle", "loading", "computing", "blocked", "parked"]

TURN_S = 0.5  # the compute thread looks around far more often, if it isn't busy
LOOK_S = 0.1  # how often the control loop says that it goes round


@dataclass(slots=True)
class Vitals:
    """Read by the beat thread. Assigning an attribute is atomic in CPython, and a beat that mixes two moments does no
    harm: the next one comes a tenth of a second later."""

    clock: Clock
    epoch: int = 0  # compute thread: the epoch in force
    fence: int = 0  # control loop: the highest epoch heard of; forward looks at it between layers
    computed: int = 0  # compute thread: layers done so far
    loaded: int = 0  # loader thread: tensors read so far
    loading: bool = False
    loading_changed_at: float = field(init=False)  # loader thread, as is ``loading``
    condition: Condition = "idle"
    blocked_on: str = ""
    since: float = field(init=False)
    turned_at: float | None = None  # compute thread: when it was last through with everything; None: it hasn't begun
    loop_seen_at: float | None = None  # control loop: when it last went round
    loop_lagged_s: float = 0.0  # control loop: by how much it was late then
    kv_used: int = 0
    kv_capacity: int = 0
    memory_bytes: int = 0
    process: dict[str, float] = field(default_factory=dict)  # control loop: what the process takes beside that

    def __post_init__(self) -> None:
        self.since = self.loading_changed_at = self.clock.now()

    def set(self, condition: Condition, blocked_on: str = "") -> None:
        """The compute thread's condition; ``since`` moves only when it changes."""
        if condition != self.condition or blocked_on != self.blocked_on:
            self.since = self.clock.now()
            self.blocked_on = blocked_on
            self.condition = condition

    def set_loading(self, loading: bool) -> None:
        """The loader thread begins or ends."""
        self.loading_changed_at = self.clock.now()
        self.loading = loading

    @property
    def shown(self) -> Condition:
        """Loading happens beside everything else; it shows when nothing else is going on. A compute thread that has
        been at one thing for long computes, whatever that is."""
        if self._is_busy:
            return "computing"
        return "loading" if self.loading and self.condition == "idle" else self.condition

    @property
    def shown_since(self) -> float:
        """When what is shown began."""
        if self._is_busy and self.turned_at is not None and self.condition != "computing":
            return self.turned_at
        return max(self.since, self.loading_changed_at) if self.condition == "idle" else self.since

    @property
    def _is_busy(self) -> bool:
        return self.condition == "computing" or (
            self.turned_at is not None and self.clock.now() - self.turned_at > TURN_S
        )

    @property
    def loop_lag_s(self) -> float:
        """Seconds by which the control loop is late: now, or when it last went round."""
        since_s = 0.0 if self.loop_seen_at is None else self.clock.now() - self.loop_seen_at
        return max(self.loop_lagged_s, since_s - LOOK_S, 0.0)

    def loop_turned(self) -> None:
        """The control loop goes round, every ``LOOK_S``."""
        now = self.clock.now()
        self.loop_lagged_s = 0.0 if self.loop_seen_at is None else max(0.0, now - self.loop_seen_at - LOOK_S)
        self.loop_seen_at = now

    @property
    def progress(self) -> int:
        return self.computed + self.loaded


def process_figures(process: psutil.Process) -> dict[str, float]:
    """Tell what the process takes beside memory: processor time, descriptors, and how many of those it may have."""
    times = process.cpu_times()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {"cpu_s": times.user + times.system, "descriptors": process.num_fds(), "descriptor_limit": limit}

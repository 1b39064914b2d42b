"""A simulated worker's heartbeats, like those of the production heartbeat thread: progress, state, and what it waits
for."""

from __future__ import annotations

from typing import Protocol

from swarm.sim.actors.environment import Environment
from swarm.sim.network import SimLink
from swarm.sim.views import HEARTBEAT_S, WorkerView
from swarm.wire.messages import Heartbeat

PROGRESS_S = 0.2  # interval at which a long computation shows progress
MOST_BEAT_STRIDE = 2  # heartbeats that were regular must not appear late when a schedule calms down


class HeartbeatSource(WorkerView, Protocol):
    """View of a worker for its heartbeats. ``blocked_on``: the peer to which it can't send now."""

    is_frozen: bool
    is_hung: bool
    is_busy: bool

    @property
    def blocked_on(self) -> str: ...


class SimHeartbeats:
    """Heartbeats of one worker, once its broker has welcomed it (``start``)."""

    def __init__(self, cluster: Environment, node: HeartbeatSource) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._node = node
        self._link: SimLink | None = None
        # when the current state began; when it last showed progress
        self._since = self._progressed_at = self._world.now
        self._progress = 0

    def start(self) -> None:
        """Start sending heartbeats, or reconnect if the connection is cut."""
        if self._link is None:
            node, pace = self._node, self._world.pace.control
            opens = None if (key := node.key) is None else lambda: self._cluster.broker.accepts_key("beat", key)
            self._link = self._cluster.network.link(node.name, "broker", "beats", pace, opens)
            self._send()
        elif self._link.is_cut:
            self._link.reconnect()

    def close(self) -> None:
        """Close the connection: the worker is dead."""
        if self._link is not None:
            self._link.close()

    def kill(self) -> None:
        """Drop everything in flight: the broker is dead."""
        if self._link is not None:
            self._link.kill()

    def on_compute_start(self) -> None:
        """Record the start of a computation."""
        self._since = self._progressed_at = self._world.now

    def on_compute_end(self) -> None:
        """Record the end of a computation."""
        self._since = self._world.now

    def _send(self) -> None:
        if not self._node.is_alive or self._link is None:
            return
        if not self._node.is_frozen:
            beat = self._make()
            self._link.send(lambda: self._cluster.send_heartbeat(beat, self._node.key))
        self._world.schedule(HEARTBEAT_S * min(MOST_BEAT_STRIDE, self._cluster.stride), self._send)

    def _make(self) -> Heartbeat:
        node, now = self._node, self._world.now
        if node.is_busy and not node.is_hung and now - self._progressed_at > PROGRESS_S:
            self._progressed_at = now
            self._progress += 1
        blocked_on = node.blocked_on
        return Heartbeat(
            epoch=node.core.active or 0,
            incarnation=node.incarnation,
            progress=int(node.core.counters.get("steps", 0)) + self._progress,
            state="computing" if node.is_busy else "blocked" if blocked_on else "idle",
            blocked_on=blocked_on,
            since_s=now - self._since,
            asleep_s=now - self._progressed_at if node.is_busy and node.is_hung else 0.0,
            loop_lag_s=0.0,
            memory_bytes=0,
            kv_used=0,
            kv_capacity=0,
        )

"""A simulated worker's heartbeats, like those of the production heartbeat thread: progress, state, and what it waits
for."""

from __future__ import annotations

from typing import Protocol

from swarm.sim.actors.surroundings import Surroundings
from swarm.sim.network import Link
from swarm.sim.roles import BEAT_S, Worker
from swarm.wire.messages import Beat

PROGRESS_S = 0.2  # interval at which a long computation shows progress
MOST_BEAT_STRIDE = 2  # heartbeats that were regular must not appear late when a schedule calms down


class Beating(Worker, Protocol):
    """View of a worker for its heartbeats. ``blocked_on``: the peer to which it can't send now."""

    frozen: bool
    hung: bool
    is_busy: bool

    @property
    def stuck_to(self) -> str: ...


class Beats:
    """Heartbeats of one worker, once its broker has welcomed it (``start``)."""

    def __init__(self, cluster: Surroundings, node: Beating) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._node = node
        self._link: Link | None = None
        # when the current state began; when it last showed progress
        self._since = self._progressed_at = self._world.now
        self._progress = 0

    def start(self) -> None:
        """Start sending heartbeats, or reconnect if the connection is cut."""
        if self._link is None:
            node, pace = self._node, self._world.pace.control
            opens = None if (key := node.key) is None else lambda: self._cluster.broker.hears("beat", key)
            self._link = self._cluster.network.link(node.name, "broker", "beats", pace, opens)
            self._beat()
        elif self._link.is_cut:
            self._link.reconnect()

    def cut(self) -> None:
        """Close the connection: the worker is dead."""
        if self._link is not None:
            self._link.cut()

    def break_off(self) -> None:
        """Drop everything in flight: the broker is dead."""
        if self._link is not None:
            self._link.break_off()

    def computes(self) -> None:
        """Record the start of a computation."""
        self._since = self._progressed_at = self._world.now

    def rests(self) -> None:
        """Record the end of a computation."""
        self._since = self._world.now

    def _beat(self) -> None:
        if not self._node.alive or self._link is None:
            return
        if not self._node.frozen:
            beat = self._make()
            self._link.carry(lambda: self._cluster.to_broker_beat(beat, self._node.key))
        self._world.at(BEAT_S * min(MOST_BEAT_STRIDE, self._cluster.stride), self._beat)

    def _make(self) -> Beat:
        node, now = self._node, self._world.now
        if node.is_busy and not node.hung and now - self._progressed_at > PROGRESS_S:
            self._progressed_at = now
            self._progress += 1
        stuck_to = node.stuck_to
        return Beat(
            epoch=node.core.active or 0,
            incarnation=node.incarnation,
            progress=int(node.core.counters.get("steps", 0)) + self._progress,
            state="computing" if node.is_busy else "blocked" if stuck_to else "idle",
            blocked_on=stuck_to,
            since_s=now - self._since,
            asleep_s=now - self._progressed_at if node.is_busy and node.hung else 0.0,
            loop_lag_s=0.0,
            memory_bytes=0,
            kv_used=0,
            kv_capacity=0,
        )

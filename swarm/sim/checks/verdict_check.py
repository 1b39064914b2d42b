"""Verdicts come in time, and none is false (I4).

A killed worker is out as soon as the disconnection can have reached the broker; a frozen or unreachable one, within the
heartbeat timeout. A worker with nothing but late messages, slow steps or a broker that stood still is never out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from swarm.broker.state import State, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.sim.checks.audit import Violation
from swarm.sim.views import HEARTBEAT_S, TICK_S

if TYPE_CHECKING:
    from swarm.sim.views import SceneView, WorkerView

SLACK_S = 0.05
# How long an incident may be the reason of a worker's verdict: it may have missed an order, and answer late.
AFTERMATH_S = 8.0


class VerdictCheck:
    """Incidents of each worker, and checks that the broker has noticed them in time."""

    def __init__(self, scene: SceneView, poisonous: Collection[str]) -> None:
        """Initialise. ``poisonous``: requests that make steps fail, wherever they are computed."""
        self._scene = scene
        self._poisonous = poisonous
        self._world = scene.world
        self._suspect_until: dict[str, float] = {}  # machine -> until when a verdict on it may be right
        self._num_lost_workers = 0.0
        self._out: set[str] = set()  # incarnations that are out

    def record_incident(self, name: str, for_s: float = 0.0) -> None:
        """Record an incident of a machine or its connections that lasts ``for_s`` seconds."""
        until = self._world.now + for_s + AFTERMATH_S
        self._suspect_until[name] = max(until, self._suspect_until.get(name, 0.0))

    def on_broker_paused(self, since: float) -> None:
        """Extend incidents during a standstill of the broker, which notices them only now."""
        for name, until in self._suspect_until.items():
            if until >= since:
                self._suspect_until[name] = max(until, self._world.now + AFTERMATH_S)

    def has_incident(self, name: str) -> bool:
        """Whether an incident of this machine may be the reason of a verdict."""
        return self._suspect_until.get(name, 0.0) >= self._world.now

    def on_killed(self, node: WorkerView) -> None:
        self.record_incident(node.name)
        self._demand_out_after(self._disconnect_delay_s + self._tick_s + SLACK_S, node, "was killed", lambda: True)

    def on_revoked(self, node: WorkerView) -> None:
        """Record that a worker's key is revoked: the broker is notified at this moment, and must react in the same
        event."""
        self.record_incident(node.name)
        self._demand_out_after(0.0, node, "has a key that was revoked", lambda: True)

    def on_silenced(self, node: WorkerView, for_s: float, is_silent: Callable[[], bool]) -> None:
        """Record that a worker is silent for ``for_s`` seconds: frozen or cut off.

        Its earlier messages may be delayed by an earlier incident, and arrive then.
        """
        held_up_s = max(0.0, self._suspect_until.get(node.name, 0.0) - AFTERMATH_S - self._world.now)
        self.record_incident(node.name, for_s)
        worker = self._scene.broker.core.state.workers.get(node.incarnation)
        if worker is not None and self._world.now - worker.joined_at < 2 * self._timeout_s:
            return  # it may not have sent a heartbeat yet, and has more time for the first one
        within = held_up_s + self._timeout_s + HEARTBEAT_S + self._disconnect_delay_s + self._tick_s + SLACK_S
        if for_s > within:
            since = self._world.now
            self._demand_out_after(
                within, node, f"unreachable since {since:.2f}", lambda: node.is_alive and is_silent()
            )

    @property
    def _disconnect_delay_s(self) -> float:
        weather = self._scene.network.weather
        return self._world.pace.control[1] + (weather.jitter_s if weather.late else 0.0)

    @property
    def _tick_s(self) -> float:
        return TICK_S * self._scene.stride

    @property
    def _timeout_s(self) -> float:
        return self._scene.broker.core.settings.health.beat_timeout_s

    def _demand_out_after(self, within: float, node: WorkerView, what: str, holds: Callable[[], bool]) -> None:
        def check() -> None:
            if self._scene.broker.is_away or self._scene.broker.has_paused_since(began):
                return  # a broker that was away cannot have noticed
            worker = self._scene.broker.core.state.workers.get(node.incarnation)
            if worker is not None and not worker.is_gone and worker.joined_at <= began and holds():
                raise Violation(f"I4: {node.incarnation} {what}, and is still {worker.state.value}")

        began = self._world.now
        self._world.schedule(within, check)

    def on_broker_restarted(self) -> None:
        """Reset: another broker judges now, and counts from zero."""
        self._num_lost_workers = 0.0
        self._out.clear()

    def check(self, state: State) -> None:
        """Demand that every worker that is newly out had an incident."""
        num_lost = state.counters.get("workers_lost", 0)
        if num_lost == self._num_lost_workers:
            return
        self._num_lost_workers = num_lost
        out = {i for i, worker in state.workers.items() if worker.state is WorkerState.OUT}
        for incarnation in sorted(out - self._out):
            worker = state.workers[incarnation]
            is_suspect = worker.verdict is Verdict.FAILED and self._poisonous
            if not is_suspect and not self.has_incident(worker.name):
                raise Violation(f"I4: {incarnation} is out, and nothing had happened to it: {worker.reason}")
        self._out = out

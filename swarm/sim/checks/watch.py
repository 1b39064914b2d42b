"""Verdicts in time, and no false ones (I4).

A worker that is killed is out within the time that the news of it takes; one that is frozen or can't be heard, within
the beats' timeout. Nobody is out who had nothing but late messages, slow steps or a broker that stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from swarm.broker.state import State, WorkerState
from swarm.broker.state.workers import Verdict
from swarm.sim.checks.audit import Violation
from swarm.sim.roles import BEAT_S, TICK_S

if TYPE_CHECKING:
    from swarm.sim.roles import Scene, Worker

SLACK_S = 0.05
# For how long something that happened to a worker may be the reason of a verdict: it missed an order, and is late.
AFTERMATH_S = 8.0


class Watch:
    """Knows what was done to whom, and asks in time whether the broker has noticed."""

    def __init__(self, scene: Scene, poisonous: Collection[str]) -> None:
        """``poisonous``: requests that make steps fail, wherever they are computed."""
        self._scene = scene
        self._poisonous = poisonous
        self._world = scene.world
        self._disturbed: dict[str, float] = {}  # machine -> until when a verdict on it may be right
        self._num_lost = 0.0
        self._out: set[str] = set()

    def disturbed(self, name: str, for_s: float = 0.0) -> None:
        """Something happens to this machine or its connections, for so long."""
        until = self._world.now + for_s + AFTERMATH_S
        self._disturbed[name] = max(until, self._disturbed.get(name, 0.0))

    def broker_slept(self, since: float) -> None:
        """What happened to others while the broker stood still it notices now."""
        for name, until in self._disturbed.items():
            if until >= since:
                self._disturbed[name] = max(until, self._world.now + AFTERMATH_S)

    def was_disturbed(self, name: str) -> bool:
        """Whether something has happened to this machine that may be the reason of a verdict."""
        return self._disturbed.get(name, 0.0) >= self._world.now

    def killed(self, node: Worker) -> None:
        self.disturbed(node.name)
        self._demand_out_after(self._news_s + self._tick_s + SLACK_S, node, "was killed", lambda: True)

    def revoked(self, node: Worker) -> None:
        """Its key is revoked at this moment: the broker is told, and needs no time to find anything out."""
        self.disturbed(node.name)
        self._demand_out_after(0.0, node, "has a key that was revoked", lambda: True)

    def silenced(self, node: Worker, for_s: float, is_silent: Callable[[], bool]) -> None:
        """Note that a worker can't be heard for so long: it is frozen, or cut off. What it said before may be held up
        by what happened to it earlier, and is heard then."""
        held_up_s = max(0.0, self._disturbed.get(node.name, 0.0) - AFTERMATH_S - self._world.now)
        self.disturbed(node.name, for_s)
        known = self._scene.broker.core.state.workers.get(node.incarnation)
        if known is not None and self._world.now - known.joined_at < 2 * self._timeout_s:
            return  # it may not have beaten yet, and has more time for its first beat
        within = held_up_s + self._timeout_s + BEAT_S + self._news_s + self._tick_s + SLACK_S
        if for_s > within:
            since = self._world.now
            self._demand_out_after(
                within, node, f"can't be heard since {since:.2f}", lambda: node.alive and is_silent()
            )

    @property
    def _news_s(self) -> float:
        weather = self._scene.network.weather
        return self._world.pace.control[1] + (weather.jitter_s if weather.late else 0.0)

    @property
    def _tick_s(self) -> float:
        return TICK_S * self._scene.stride

    @property
    def _timeout_s(self) -> float:
        return self._scene.broker.core.settings.health.beat_timeout_s

    def _demand_out_after(self, within: float, node: Worker, what: str, holds: Callable[[], bool]) -> None:
        def look() -> None:
            if self._scene.broker.is_away or self._scene.broker.stood_still_since(began):
                return  # nobody is asked to see what happens while he is not there
            worker = self._scene.broker.core.state.workers.get(node.incarnation)
            if worker is not None and not worker.is_gone and worker.joined_at <= began and holds():
                raise Violation(f"I4: {node.incarnation} {what}, and is still {worker.state.value}")

        began = self._world.now
        self._world.at(within, look)

    def restarted(self) -> None:
        """Begin anew: another broker judges now, and counts from zero."""
        self._num_lost = 0.0
        self._out.clear()

    def look(self, state: State) -> None:
        """Demand that whoever is newly out was disturbed."""
        num_lost = state.counters.get("workers_lost", 0)
        if num_lost == self._num_lost:
            return
        self._num_lost = num_lost
        out = {i for i, worker in state.workers.items() if worker.state is WorkerState.OUT}
        for incarnation in sorted(out - self._out):
            worker = state.workers[incarnation]
            is_suspect = worker.verdict is Verdict.FAILED and self._poisonous
            if not is_suspect and not self.was_disturbed(worker.name):
                raise Violation(f"I4: {incarnation} is out, and nothing had happened to it: {worker.reason}")
        self._out = out

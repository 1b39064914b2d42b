"""The routes of steps: to a listener, or through the broker's relay to a worker whose listener cannot be reached."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from swarm.broker.state import Plan
from swarm.sim.checks.audit import Violation
from swarm.sim.network import SimLink
from swarm.sim.views import SceneView, WorkerView
from swarm.wire.transport.keys import split_ticket

RELAY: Final = "tcp://relay:1"


@lru_cache
def parse_ticket(endpoint: str) -> str:
    """Return the ticket by which the relay identifies the listener; empty: the endpoint has none. Called for every
    message."""
    return split_ticket(endpoint)[1]


def kv_endpoint(incarnation: str) -> str:
    """Return the address of a worker's listener for copies of keys and values."""
    return f"kv:{incarnation}"


def _kv_incarnation(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


class SimRoutes:
    """Routes between workers.

    ``hidden``: names of workers whose listeners cannot be reached. ``elsewhere``: the ones of them that report another
    machine's address, to which no process may connect (I14).
    """

    def __init__(self, scene: SceneView, hidden: tuple[str, ...], elsewhere: tuple[str, ...] = ()) -> None:
        self._scene = scene
        self._hidden = frozenset(hidden)
        self._elsewhere = frozenset(elsewhere)

    def address_error(self, name: str) -> str:
        """Return the broker's objection to the address in this worker's Hello; empty: none."""
        return "it names another machine's address" if name in self._elsewhere else ""

    def receiver(self, endpoint: str) -> WorkerView | None:
        """Return the worker that receives what is sent to this endpoint."""
        ticket = parse_ticket(endpoint)
        if not ticket:
            return self._scene.workers.get(endpoint)
        return next((node for node in self._scene.workers.values() if node.ticket == ticket), None)

    def can_reach(self, source: str, endpoint: str) -> bool:
        """Whether ``source`` can connect to this listener, or to the relay in front of it."""
        node, network = self.receiver(endpoint), self._scene.network
        self._check_allowed(source, endpoint, node)
        if node is None or parse_ticket(endpoint):
            return not network.is_blocked(source, "broker")
        return node.name not in self._hidden and not network.is_blocked(source, node.name)

    def check_plan(self, plan: Plan) -> None:
        """Check a plan that is about to be activated: every stage but the last must reach the next one (I11)."""
        for stage in plan.stages[1:]:
            if stage.name in self._hidden and not stage.relay:
                raise Violation(f"I11: the plan of epoch {plan.epoch} counts on a way to {stage.name}, which is shut")

    def open_link(self, source: str, endpoint: str, key: str | None) -> SimLink:
        scene, node = self._scene, self.receiver(endpoint)
        self._check_allowed(source, endpoint, node)
        target = "broker" if node is None else node.name
        opens = None if key is None else lambda: self._accepts(endpoint, key)
        via = "broker" if parse_ticket(endpoint) else ""
        return scene.network.link(source, target, "data", scene.world.pace.data, opens, via=via)

    def kv_receiver(self, endpoint: str) -> WorkerView | None:
        """Return the worker whose listener for copies has this endpoint."""
        return self._scene.workers.get(_kv_incarnation(endpoint))

    def open_kv_link(self, source: str, endpoint: str, key: str | None) -> SimLink:
        """Connect to a listener for copies. No relay leads to it, and what is sent to a dead process is lost."""
        scene, node = self._scene, self.kv_receiver(endpoint)
        self._check_allowed(source, endpoint, node)
        target = _kv_incarnation(endpoint).rpartition(".")[0]

        def opens() -> bool:
            receiver = self.kv_receiver(endpoint)
            if receiver is None:
                return True
            return receiver.name not in self._hidden and receiver.kv_listener.accepts(key)

        return scene.network.link(source, target, "kv", scene.world.pace.kv, opens)

    def _check_allowed(self, source: str, endpoint: str, node: WorkerView | None) -> None:
        if node is not None and node.name in self._elsewhere and not parse_ticket(endpoint):
            raise Violation(f"I14: {source} connects to the address that {node.name} named, which is another machine's")

    def _accepts(self, endpoint: str, key: str) -> bool:
        """Whether messages to this endpoint are accepted now. Messages to an endpoint without a process are lost."""
        broker, node = self._scene.broker, self.receiver(endpoint)
        if endpoint == broker.core.settings.data_endpoint:
            return broker.accepts_key("data", key)
        ticket = parse_ticket(endpoint)
        if ticket and not (broker.relays(ticket) and (node is None or node.relay == endpoint)):
            return False
        if node is None:
            return True
        return bool(ticket or node.name not in self._hidden) and node.listener.accepts(key)

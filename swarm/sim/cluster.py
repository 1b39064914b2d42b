"""Who is there, and how they reach each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.broker import events as broker_event
from swarm.broker.core import BrokerSettings
from swarm.sim.audit import Audit
from swarm.sim.nodes import LEAVE_S, BrokerNode, ClientNode, WorkerNode
from swarm.sim.schedule import Machines
from swarm.sim.world import Link, World
from swarm.stage import events as stage_event
from swarm.testing import FakeExecutor
from swarm.wire.messages import Beat, ClientMessage, Manifest, Order, ServerMessage, Step, StepDone, WorkerMessage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESTART_S = (0.3, 2.0)  # a supervisor's backoff and a process's start


class Cluster:
    """One broker, workers that come and go, clients."""

    def __init__(self, world: World, manifest: Manifest, settings: BrokerSettings, machines: Machines) -> None:
        self.world = world
        self.manifest = manifest
        self.machines = machines
        self.audit = Audit(manifest)
        self.workers: dict[str, WorkerNode] = {}  # by incarnation: the living processes
        self.clients: dict[bytes, ClientNode] = {}
        self._links: dict[bytes, Link] = {}
        self._num_started = 0
        self._ready = False
        self.broker = BrokerNode(self, settings)
        self._ready = True

    # --- coming and going --------------------------------------------------------------------------------------------

    def start_worker(self, name: str, memory_bytes: int, capacity: int) -> None:
        self._num_started += 1
        executor = FakeExecutor(self.manifest, capacity)
        node = WorkerNode(self, name, self._num_started, executor, memory_bytes)
        self.workers[node.incarnation] = node

    def crash(self, incarnation: str) -> None:
        """Kill a worker; its supervisor starts it again."""
        node = self.workers.pop(incarnation)
        self.world.tell("world", f"** {node.incarnation} is killed")
        node.kill()
        self._restart_after(self.world.draw(RESTART_S), node)

    def double(self, incarnation: str) -> None:
        """Somebody starts a second process under the name of a living one."""
        node = self.workers[incarnation]
        self.start_worker(node.name, node.memory_bytes, node.executor.capacity)

    def terminate(self, incarnation: str) -> None:
        """Stop a worker as an operator would; its supervisor starts it again."""
        node = self.workers[incarnation]
        node.terminate()
        self._restart_after(LEAVE_S + self.world.draw(RESTART_S), node)

    def _restart_after(self, delay: float, node: WorkerNode) -> None:
        def restart() -> None:
            if all(other.name != node.name for other in self.workers.values()):
                self.start_worker(node.name, node.memory_bytes, node.executor.capacity)

        self.world.at(delay, restart)

    def worker_gone(self, node: WorkerNode) -> None:
        self._cut(node.peer)
        self._soon(lambda: self.broker.feed(broker_event.WorkerDisconnected(node.peer)))

    def worker_exits(self, node: WorkerNode) -> None:
        """In good order, as the core asked."""
        self.workers.pop(node.incarnation, None)
        node.kill()

    def client_gone(self, node: ClientNode) -> None:
        self._cut(node.peer)
        self._soon(lambda: self.broker.feed(broker_event.ClientUnreachable(node.peer)))

    def client_back(self, node: ClientNode) -> None:
        self.clients[node.peer] = node

    # --- messages ----------------------------------------------------------------------------------------------------

    def to_client(self, client: bytes, message: ServerMessage) -> None:
        node = self.clients.get(client)
        if node is not None:
            self._link(client).carry(lambda: node.hear(message))

    def to_worker(self, peer: bytes, order: Order) -> None:
        node = self._worker(peer)
        if node is not None:
            self._link(peer).carry(lambda: node.take_order(order))

    def to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32] | None) -> None:
        node = self._worker(endpoint.encode())
        if node is not None:
            node.post(stage_event.StepArrived(step, hidden, 0))

    def to_broker(self, node: WorkerNode, message: WorkerMessage) -> None:
        self.broker.feed(broker_event.WorkerSaid(node.peer, message))

    def to_broker_beat(self, beat: Beat) -> None:
        self.broker.feed(broker_event.BeatHeard(beat))

    def to_broker_done(self, done: StepDone) -> None:
        self.broker.feed(broker_event.StepFinished(done))

    def to_broker_from_client(self, node: ClientNode, message: ClientMessage) -> None:
        self.broker.feed(broker_event.ClientSaid(node.peer, message))

    # --- the audit ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Called after every event that a core has handled."""
        if not self._ready:
            return
        state = self.broker.core.state
        self.audit.check_broker(state)
        for node in self.workers.values():
            self.audit.check_stage(node, state.book.epoch)

    def _worker(self, peer: bytes) -> WorkerNode | None:
        return next((node for node in self.workers.values() if node.peer == peer), None)

    def _link(self, peer: bytes) -> Link:
        if peer not in self._links:
            self._links[peer] = Link(self.world, self.world.pace.control)
        return self._links[peer]

    def _cut(self, peer: bytes) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.cut()

    def _soon(self, what: Callable[[], None]) -> None:
        self.world.at(self.world.draw(self.world.pace.control), what)

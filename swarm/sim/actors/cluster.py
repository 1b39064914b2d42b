"""The cluster: its processes, and how they reach each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.broker import events as broker_event
from swarm.broker.state import PlanPhase
from swarm.sim.actors.broker import BrokerNode
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.ways import Ways
from swarm.sim.actors.worker import LEAVE_S, Trap, WorkerNode
from swarm.sim.checks import guard
from swarm.sim.checks.audit import Audit, Violation
from swarm.sim.checks.blame import Blame
from swarm.sim.checks.neighbours import Neighbours
from swarm.sim.checks.promises import Promises
from swarm.sim.checks.watch import Watch
from swarm.sim.garble import garbled
from swarm.sim.network import LinksOfBroker, Network
from swarm.sim.roles import Client, Reader, Worker
from swarm.sim.schedules.schedule import Schedule, WorkerSpec
from swarm.sim.world import World
from swarm.stage import events as stage_event
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    NOBODYS,
    Activate,
    Beat,
    ClientMessage,
    Hello,
    Order,
    ServerMessage,
    Step,
    StepDone,
    StopWorker,
    WorkerMessage,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


RESTART_S = (0.3, 2.0)  # a supervisor's back-off and a process's start
RECONNECT_S = (0.1, 0.5)
REVOKED_S = (0.0, 1.5)  # until a process whose key was revoked ends
CALM_STRIDE = 3  # see ``Cluster.stride``


class Cluster:
    """One broker, workers that come and go, and clients."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        self.world = world
        self.network = Network(world, schedule.weather)
        self.manifest = fake_manifest(schedule.num_layers)
        self.machines = schedule.machines
        self.log_bytes = schedule.log_bytes
        self.put_off_every = schedule.put_off_every
        self.recalls = schedule.recalls
        self.uses_keys = schedule.keys
        self.revoked: set[str] = set()  # keys; the broker's registry survives it
        self.neighbours = Neighbours()
        self.ways = Ways(self, schedule.hidden, schedule.elsewhere)
        self.specs = {spec.name: spec for spec in schedule.workers}
        self.workers: dict[str, WorkerNode] = {}  # the living processes, by incarnation
        self.clients: dict[bytes, ClientNode] = {}
        self.readers: list[Reader] = []
        self.traps: list[Trap] = []
        self.struck: Counter[str] = Counter()  # number of faults, by kind
        self.num_garbled = self.num_refused = 0
        self.let_go: set[str] = set()  # incarnations that may end
        self.is_healed = False
        self._num_coming = 0  # processes that are about to start
        self._links = LinksOfBroker(self.network, world)
        self.totals: Counter[str] = Counter()  # counters of brokers that died
        self._num_started = 0
        self.blame = Blame()
        self.audit = Audit(self.manifest, log_bytes=schedule.log_bytes)
        self.watch = Watch(self, self.blame.poisonous.keys())
        self._ready = False  # the parts exist that the checks need
        self.broker = BrokerNode(self, schedule.settings)
        self.promises = Promises(self, self.audit)
        self._ready = True

    # --- coming and going --------------------------------------------------------------------------------------------

    def start_worker(self, spec: WorkerSpec) -> WorkerNode:
        self._num_started += 1
        node = WorkerNode(self, spec, self._num_started)
        self.workers[node.incarnation] = node
        return node

    def join(self, spec: WorkerSpec) -> None:
        """Start a worker that was not there before."""
        self.specs[spec.name] = spec
        self.start_worker(spec)

    def crash(self, incarnation: str, *, restart: WorkerSpec | None = None) -> None:
        """Kill a worker. Its supervisor restarts it as it was, or as ``restart`` defines."""
        node = self.workers.pop(incarnation)
        self.world.tell("world", f"** {node.incarnation} is killed")
        self.audit.num_blows += 1
        self.watch.killed(node)
        node.kill()
        self._restart_after(self.world.draw(RESTART_S), restart or self.specs[node.name])

    def revoke(self, incarnation: str) -> None:
        """Revoke a worker's key: the broker closes its connection.

        The process goes on for a moment and ends; a supervisor starts another one, which has a key of its own.
        """
        node = self.workers[incarnation]
        if node.key is None:
            return
        self.audit.num_blows += 1
        self.let_go.add(incarnation)
        self.revoked.add(node.key)
        self.watch.revoked(node)
        self.broker.feed(broker_event.KeyRevoked(node.key))
        self._links.cut(node.peer)
        self._soon(self._for_this_broker(broker_event.WorkerDisconnected(node.peer)))
        ends_after = self.world.draw(REVOKED_S)
        self.world.at(ends_after, lambda: self.worker_exits(node) if node.alive else None)
        self._restart_after(ends_after + self.world.draw(RESTART_S), self.specs[node.name])

    def double(self, incarnation: str) -> None:
        """Start a second process under the name of a living one, which must not suffer from it."""
        node = self.workers[incarnation]
        self.promises.doubled(node.name)
        self.let_go.add(self.start_worker(self.specs[node.name]).incarnation)

    def terminate(self, incarnation: str) -> None:
        """Stop a worker as an operator would; its supervisor restarts it."""
        node = self.workers[incarnation]
        self.let_go.add(incarnation)
        self.watch.disturbed(node.name, LEAVE_S)  # it ends even if the broker does not receive its wish to leave
        node.terminate()
        self._restart_after(LEAVE_S + self.world.draw(RESTART_S), self.specs[node.name])

    def ask_to_leave(self, client: ClientNode, incarnation: str) -> None:
        name = self.workers[incarnation].name
        self.let_go.update(node.incarnation for node in self.workers.values() if node.name == name)
        self.to_broker_from_client(client, StopWorker(worker=name), self.broker.life)

    def drop_control(self, node: WorkerNode) -> None:
        """Break the connection between a living worker and the broker.

        The broker may notice the break, or only the new connection.
        """
        self.watch.disturbed(node.name)
        back_after = self.world.draw(RECONNECT_S)
        link = self._links.get(node.peer)
        if link is not None:
            link.drop(back_after, keeps=False)
        node.drop_control(back_after)
        if self.world.random.random() < 0.8:
            seen_after = self.world.draw((0.0, back_after))
            self.world.at(seen_after, self._for_this_broker(broker_event.WorkerDisconnected(node.peer)))

    def _restart_after(self, delay: float, spec: WorkerSpec) -> None:
        self._num_coming += 1

        def restart() -> None:
            self._num_coming -= 1
            if all(other.name != spec.name for other in self.workers.values()):
                self.start_worker(self.specs[spec.name] if self.is_healed else spec)

        self.world.at(delay, restart)

    def worker_gone(self, node: Worker) -> None:
        self._links.cut(node.peer)
        self._soon(self._for_this_broker(broker_event.WorkerDisconnected(node.peer)))

    def worker_exits(self, node: Worker) -> None:
        """End a worker in good order, as its core asked. A worker with a broken device is restarted on another one."""
        if node.executor.broken and node.incarnation not in self.let_go:
            self._restart_after(self.world.draw(RESTART_S), self.specs[node.name])
        elif node.incarnation not in self.let_go and not self._has_lost_its_name(node):
            raise Violation(f"I8: {node.incarnation} ends, and nobody wanted it to")
        self.workers.pop(node.incarnation, None)
        node.kill()

    def _has_lost_its_name(self, node: Worker) -> bool:
        """Whether another process was admitted under this worker's name, so that the broker may end this one.

        That happens while this worker was away or before any broker knew it. The admitting broker may be the current
        one, or an earlier one that died before this process had returned to it, so that both processes come with equal
        claims.
        """
        others = [
            each for each in self.workers.values() if each.name == node.name and each.incarnation != node.incarnation
        ]
        known_to = node.core.lineage.generation if node.core.layers is None else math.inf
        return any(
            self.watch.was_disturbed(node.name) or node.core.lineage == NOBODYS or known_to < other.came_with.generation
            for other in others
        )

    def client_gone(self, node: Client) -> None:
        self._links.cut(node.peer)
        self._soon(self._for_this_broker(broker_event.ClientUnreachable(node.peer)))

    def broker_gone(self, *, power: bool) -> None:
        """Break the broker's connections. Messages that it sent may still arrive; messages to it do not."""
        self.totals.update(self.broker.core.state.counters)
        self._links.broker_gone()
        for node in list(self.workers.values()):
            node.lose_broker()
        for client in self.clients.values():
            client.lose_broker()

    def journal_changed(self) -> None:
        """Prepare the checks for a broker whose journal has another past."""
        self.promises.journal_changed()
        self.audit.journal_changed(self.broker.disk)

    def broker_back(self) -> None:
        """Drop the links of the former broker process; living workers reconnect."""
        self._links.broker_back()
        self.promises.restarted(self.broker.core.state)
        self.audit.restarted(self.broker.core.state, self.broker.disk)
        self.watch.restarted()
        self.blame.restarted()
        for node in self.workers.values():
            node.find_broker()

    def client_back(self, node: Client) -> None:
        assert isinstance(node, ClientNode)
        self.clients[node.peer] = node

    def reader_came(self, reader: Reader) -> None:
        self.readers.append(reader)

    def springs(self, node: Worker, when: str, kind: str) -> bool:
        """Spring a matching trap; return whether the worker dies here."""
        for trap in self.traps:
            if trap.when == when and trap.kind == kind and node.alive and node.incarnation in self.workers:
                self.traps.remove(trap)
                self.world.tell("world", f"** {when} {kind}:")
                self.struck[f"crash {when} {kind}"] += 1
                self.crash(node.incarnation)
                return True
        return False

    def heal(self) -> None:
        """End all faults: routes are free, every process runs, and workers that were restarted with less memory are
        restarted."""
        self.is_healed = True
        self.world.tell("world", "** all is healed")
        self.network.heal()
        self.traps.clear()
        self.broker.traps.clear()
        self.broker.disk.heal()
        self.broker.short_until = 0.0
        self.broker.thaw()
        for node in list(self.workers.values()):
            node.device.heal()
            node.garbles = 0
            node.loses_orders = node.loses_answers = 0
            node.wake(at_once=True)
            node.thaw(at_once=True)
            if node.memory_bytes < self.specs[node.name].memory_bytes and node.alive:
                self.crash(node.incarnation)

    # --- messages ----------------------------------------------------------------------------------------------------

    def to_client(self, client: bytes, message: ServerMessage) -> None:
        node = self.clients.get(client)
        if node is not None and not node.has_room:
            self.world.at(0.0, self._for_this_broker(broker_event.ClientStuck(client)))
        elif node is not None:
            self._links.to(client, node.name, "client").carry(lambda: node.hear(message))

    def to_worker(self, peer: bytes, order: Order) -> None:
        node = self._worker(peer)
        if node is not None:
            self._links.to(peer, node.name, "control").carry(lambda: node.take_order(order))

    def to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32] | None, sender: str) -> None:
        node = self.ways.behind(endpoint)
        if node is not None:
            if self.uses_keys:
                self.neighbours.step_passes(sender, node)
            node.post(stage_event.StepArrived(step, hidden, 0))

    def to_stage_garbled(self, endpoint: str, step: Step, hidden: NDArray[np.float32]) -> None:
        """Carry a step over the real codec, with a bit flipped on the way: the receiver must refuse it."""
        node = self.ways.behind(endpoint)
        if node is None:
            return
        self.num_garbled += 1
        arrived = garbled(step, hidden, self.world.random)
        if isinstance(arrived, str):
            self.num_refused += 1
            node.post(stage_event.StepRefused(arrived))
            return
        raise Violation(f"I7: step {arrived.step} came with a flipped bit and was taken")

    def to_broker(self, node: Worker, message: WorkerMessage, life: int) -> None:
        """Deliver a worker's message. ``life``: the broker process to which it was sent."""
        if life == self.broker.life and node.key not in self.revoked:
            self.blame.told(message, self.broker.core.state)
            not_at = self.ways.why_not_at(node.name) if isinstance(message, Hello) else ""
            self.broker.feed(broker_event.WorkerSaid(node.peer, message, not_at=not_at))

    def to_broker_beat(self, beat: Beat, key: str | None) -> None:
        self.broker.feed(broker_event.BeatHeard(beat, key or ""))

    def to_broker_done(self, done: StepDone, sender: str) -> None:
        if self.uses_keys and self.broker.alive:
            self.neighbours.answer_passes(sender, self.broker.core.state)
        self.blame.step_comes(done, self.broker.core.state)
        self.broker.feed(broker_event.StepFinished(done))

    def to_broker_from_client(self, node: Client, message: ClientMessage, life: int) -> None:
        if life == self.broker.life:
            self.broker.feed(broker_event.ClientSaid(node.peer, message))

    # --- checks ------------------------------------------------------------------------------------------------------

    def after_broker(self, guarded: guard.Before | None) -> None:
        """Run the checks after an event on which the broker's core has acted."""
        if self._ready:
            if self.audit.check_broker(self.broker.core.state):
                self.audit.check_bounds(self.broker.core.state, list(self.workers.values()))
            self.promises.look(self.broker.core.state)
            guard.after(guarded, self.broker.core.state, self.workers)
            self.watch.look(self.broker.core.state)
            self.blame.look(self.broker.core.state)

    def after_stage(self, node: Worker, held: tuple[Activate, guard.Lengths] | None) -> None:
        """Run the checks after an event on which this stage's core has acted."""
        self.audit.check_stage(node, self.broker.core.state)
        guard.held_after(held, node)

    @property
    def counters(self) -> Counter[str]:
        """Sum of the counters of all broker processes."""
        total = Counter(self.totals)
        if self.broker.alive:
            total.update(self.broker.core.state.counters)
        return total

    @property
    def stride(self) -> int:
        """Factor by which timers slow down once all faults are over.

        Much of a schedule then waits for slow readers, and no process is to be declared late. Heartbeats stay well
        below their timeout.
        """
        return CALM_STRIDE if self.is_healed else 1

    @property
    def progress(self) -> float:
        """Number that grows with every token computed or taken, and with every end."""
        counters = self.counters
        ends = sum(counters.get(f"sequences_{how}", 0) for how in ("stop", "length", "cancelled", "failed"))
        return counters.get("tokens", 0) + ends + self.audit.num_taken

    @property
    def has_recovered(self) -> bool:
        """Whether a plan serves and every living worker is a member."""
        state = self.broker.core.state
        known = [state.workers.get(incarnation) for incarnation in self.workers]
        return (
            self.broker.alive
            and not self._num_coming
            and state.book.current is not None
            and all(w is not None and not w.is_gone for w in known)
        )

    @property
    def is_settled(self) -> bool:
        """Whether no plan is about to change, and every stage has activated the one in force."""
        book = self.broker.core.state.book
        plan = book.current if self.broker.alive and book.phase is PlanPhase.SERVING else None
        return plan is not None and all(
            guard.is_in_force(plan.epoch, node, self.broker.core.state)
            for node in self.workers.values()
            if node.incarnation in plan.members
        )

    def check_members(self) -> None:
        """Demand that the swarm has recovered, a while after all faults ended."""
        self.audit.check_members(self.broker.core.state, self.workers.values())

    def check_end(self) -> None:
        """Demand that everything has ended well, when nothing moves any more."""
        state, workers = self.broker.core.state, list(self.workers.values())
        self.audit.check_end(state, workers)
        for reader in self.readers:
            reader.check_end()
        self.audit.check_members(state, workers)
        if self.num_refused != self.num_garbled:
            raise Violation(f"I7: of {self.num_garbled} garbled tensors {self.num_refused} were refused")

    def _worker(self, peer: bytes) -> WorkerNode | None:
        return self.workers.get(peer.decode())

    def _for_this_broker(self, event: broker_event.Event) -> Callable[[], None]:
        """Return a callback that feeds an event about a connection, unless the broker has been restarted by then."""
        life = self.broker.life
        return lambda: self.broker.feed(event) if self.broker.life == life else None

    def _soon(self, what: Callable[[], None]) -> None:
        self.world.at(self.world.draw(self.world.pace.control), what)

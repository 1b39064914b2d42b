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
from swarm.sim.actors.routes import SimRoutes
from swarm.sim.actors.spill_shell import SimSpillDisk
from swarm.sim.actors.worker import RELEASE_TIMEOUT_S, WorkerNode, WorkerTrap
from swarm.sim.checks import effects
from swarm.sim.checks.adapter_check import AdapterCheck
from swarm.sim.checks.audit import Audit, Violation
from swarm.sim.checks.blame import BlameCheck
from swarm.sim.checks.image_check import ImageCheck
from swarm.sim.checks.kv_check import KvCheck
from swarm.sim.checks.promises import PromiseCheck
from swarm.sim.checks.sender_check import SenderCheck
from swarm.sim.checks.speculation_check import SpeculationCheck
from swarm.sim.checks.spill_check import SpillCheck
from swarm.sim.checks.verdict_check import VerdictCheck
from swarm.sim.network import BrokerLinks, Network, garble_step
from swarm.sim.schedules.schedule import Schedule, WorkerSpec
from swarm.sim.views import ClientView, ReaderView, WorkerView
from swarm.sim.world import World
from swarm.stage import events as stage_event
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    NO_LINEAGE,
    Activate,
    AdapterCommand,
    ClientMessage,
    Heartbeat,
    Hello,
    Order,
    ServerMessage,
    Step,
    StepDone,
    StopWorker,
    WorkerMessage,
)
from swarm.wire.tensors import Bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


RESTART_S = (0.3, 2.0)  # a supervisor's back-off and a process's start
RECONNECT_S = (0.1, 0.5)
REVOKED_S = (0.0, 1.5)  # until a process whose key was revoked ends
CALM_STRIDE = 3  # see ``Cluster.stride``


class Cluster:
    """One broker, workers that come and go, and clients."""

    def __init__(self, world: World, schedule: Schedule, spill_disk: SimSpillDisk | None = None) -> None:
        self.world = world
        self.network = Network(world, schedule.weather)
        self.manifest = fake_manifest(
            schedule.num_layers, state_stride=schedule.state_stride, sees=schedule.image_room > 0
        )
        self.image_room = schedule.image_room
        self.machines = schedule.machines
        self.log_bytes = schedule.log_bytes
        self.put_off_every = schedule.put_off_every
        self.kv_conditions = schedule.kv
        self.spill_disk = spill_disk  # None: nothing is written
        self.recalls = schedule.recalls
        self.speculation = schedule.speculation
        self.uses_keys = schedule.keys
        self.revoked: set[str] = set()  # keys; the broker's registry survives it
        self.sender_check = SenderCheck()
        self.routes = SimRoutes(self, schedule.hidden, schedule.elsewhere)
        self.specs = {spec.name: spec for spec in schedule.workers}
        self.workers: dict[str, WorkerNode] = {}  # the living processes, by incarnation
        self._furthest: dict[int, int] = {}  # most positions that the stages have had of a sequence
        self.clients: dict[bytes, ClientNode] = {}
        self.readers: list[ReaderView] = []
        self.traps: list[WorkerTrap] = []
        self.owner_traps: list[
            int
        ] = []  # numbers of copied parts still to arrive until the sender of the last one dies
        self.fault_counts: Counter[str] = Counter()  # number of faults, by kind
        self.num_garbled = self.num_refused = 0
        self.may_exit: set[str] = set()  # incarnations that may end
        self.is_healed = False
        self._num_starting = 0  # processes that are about to start
        self._links = BrokerLinks(self.network, world)
        self.totals: Counter[str] = Counter()  # counters of brokers that died
        self._num_started = 0
        self.blame_check = BlameCheck()
        self.spill_check = SpillCheck()
        self.kv_check = KvCheck(self, self.manifest.num_layers, schedule.machines.unlike)
        self.speculation_check = SpeculationCheck(self, self.manifest.num_layers)
        self.audit = Audit(self.manifest, log_bytes=schedule.log_bytes)
        self.adapter_check = AdapterCheck(self.audit)
        self.image_check = ImageCheck()
        self.verdict_check = VerdictCheck(self, self.blame_check.poisonous.keys())
        self._is_ready = False  # the parts exist that the checks need
        self.broker = BrokerNode(self, schedule.settings)
        self.promise_check = PromiseCheck(self, self.audit)
        self._is_ready = True

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
        self.audit.num_faults += 1
        self.verdict_check.on_killed(node)
        node.kill()
        self._restart_after(self.world.draw(RESTART_S), restart or self.specs[node.name])

    def revoke(self, incarnation: str) -> None:
        """Revoke a worker's key: the broker closes its connection.

        The worker's process runs for another moment and ends. A supervisor then starts a new process with a new key.
        """
        node = self.workers[incarnation]
        if node.key is None:
            return
        self.audit.num_faults += 1
        self.may_exit.add(incarnation)
        self.revoked.add(node.key)
        self.verdict_check.on_revoked(node)
        self.broker.feed(broker_event.KeyRevoked(node.key))
        self._links.close(node.peer)
        self._schedule_soon(self._feed_this_broker(broker_event.WorkerDisconnected(node.peer)))
        ends_after = self.world.draw(REVOKED_S)
        self.world.schedule(ends_after, lambda: self.on_worker_exit(node) if node.is_alive else None)
        self._restart_after(ends_after + self.world.draw(RESTART_S), self.specs[node.name])

    def start_duplicate(self, incarnation: str) -> None:
        """Start a second process under the name of a living one, which must not suffer from it."""
        node = self.workers[incarnation]
        self.promise_check.on_duplicate_started(node.name)
        self.may_exit.add(self.start_worker(self.specs[node.name]).incarnation)

    def terminate(self, incarnation: str) -> None:
        """Stop a worker as an operator would; its supervisor restarts it."""
        node = self.workers[incarnation]
        self.may_exit.add(incarnation)
        # it ends even if the broker does not receive its wish to leave
        self.verdict_check.record_incident(node.name, RELEASE_TIMEOUT_S)
        node.terminate()
        self._restart_after(RELEASE_TIMEOUT_S + self.world.draw(RESTART_S), self.specs[node.name])

    def ask_to_leave(self, client: ClientNode, incarnation: str) -> None:
        name = self.workers[incarnation].name
        self.may_exit.update(node.incarnation for node in self.workers.values() if node.name == name)
        self.send_from_client(client, StopWorker(worker=name), self.broker.life)

    def drop_control_link(self, node: WorkerNode) -> None:
        """Break the connection between a living worker and the broker.

        The broker may notice the break, or only the new connection.
        """
        self.verdict_check.record_incident(node.name)
        back_after = self.world.draw(RECONNECT_S)
        link = self._links.get(node.peer)
        if link is not None:
            link.drop(back_after, keeps=False)
        node.drop_control_link(back_after)
        if self.world.random.random() < 0.8:
            seen_after = self.world.draw((0.0, back_after))
            self.world.schedule(seen_after, self._feed_this_broker(broker_event.WorkerDisconnected(node.peer)))

    def _restart_after(self, delay: float, spec: WorkerSpec) -> None:
        self._num_starting += 1

        def restart() -> None:
            self._num_starting -= 1
            if all(other.name != spec.name for other in self.workers.values()):
                self.start_worker(self.specs[spec.name] if self.is_healed else spec)

        self.world.schedule(delay, restart)

    def on_worker_gone(self, node: WorkerView) -> None:
        self._links.close(node.peer)
        self._schedule_soon(self._feed_this_broker(broker_event.WorkerDisconnected(node.peer)))

    def on_worker_exit(self, node: WorkerView) -> None:
        """End a worker in good order, as its core asked. A worker with a broken device is restarted on another one."""
        if node.executor.broken and node.incarnation not in self.may_exit:
            self._restart_after(self.world.draw(RESTART_S), self.specs[node.name])
        elif node.incarnation not in self.may_exit and not self._has_lost_its_name(node):
            raise Violation(f"I8: {node.incarnation} ended without a request to end")
        self.workers.pop(node.incarnation, None)
        node.kill()

    def _has_lost_its_name(self, node: WorkerView) -> bool:
        """Whether another process was admitted under this worker's name, so that the broker may end this one.

        That happens while this worker was away or before any broker knew it. The admitting broker may be the current
        one, or an earlier one that died before this process had returned to it, so that both processes come with equal
        claims.
        """
        others = [
            other_node
            for other_node in self.workers.values()
            if other_node.name == node.name and other_node.incarnation != node.incarnation
        ]
        generation = node.core.lineage.generation if node.core.layers is None else math.inf
        return any(
            self.verdict_check.has_incident(node.name)
            or node.core.lineage == NO_LINEAGE
            or generation < other.previous_lineage.generation
            for other in others
        )

    def on_client_gone(self, node: ClientView) -> None:
        self._links.close(node.peer)
        self._schedule_soon(self._feed_this_broker(broker_event.ClientUnreachable(node.peer)))

    def on_broker_gone(self, *, power: bool) -> None:
        """Break the broker's connections. Messages that it sent may still arrive; messages to it do not."""
        self.totals.update(self.broker.core.state.counters)
        self._links.on_broker_gone()
        for node in list(self.workers.values()):
            node.on_broker_gone()
        for client in self.clients.values():
            client.on_broker_gone()

    def on_journal_changed(self) -> None:
        """Prepare the checks for a broker that starts with another journal, whose content differs from what was
        promised before."""
        self.promise_check.on_journal_changed()
        self.adapter_check.on_journal_changed()
        self.audit.on_journal_changed(self.broker.disk)

    def on_broker_back(self) -> None:
        """Drop the links of the former broker process; living workers reconnect."""
        self._links.on_broker_back()
        self.promise_check.on_broker_restarted(self.broker.core.state)
        self.audit.on_broker_restarted(self.broker.core.state, self.broker.disk)
        self.verdict_check.on_broker_restarted()
        self.blame_check.on_broker_restarted()
        self.speculation_check.on_broker_restarted()
        for node in self.workers.values():
            node.on_broker_back()

    def on_client_back(self, node: ClientView) -> None:
        assert isinstance(node, ClientNode)
        self.clients[node.peer] = node

    def add_reader(self, reader: ReaderView) -> None:
        self.readers.append(reader)

    def spring_trap(self, node: WorkerView, when: str, kind: str) -> bool:
        """Spring a matching trap; return whether the worker dies here."""
        for trap in self.traps:
            if trap.when == when and trap.kind == kind and node.is_alive and node.incarnation in self.workers:
                self.traps.remove(trap)
                self.world.tell("world", f"** {when} {kind}:")
                self.fault_counts[f"crash {when} {kind}"] += 1
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
        self.owner_traps.clear()
        self.broker.traps.clear()
        self.broker.disk.heal()
        self.broker.short_until = 0.0
        self.broker.thaw()
        for node in list(self.workers.values()):
            node.device.heal()
            node.num_garbled = 0
            node.executor.fail_adapters = ""
            node.misreporter.heal()
            node.kv.heal()
            node.num_lost_orders = node.num_lost_answers = 0
            node.wake(immediately=True)
            node.thaw(immediately=True)
            if node.memory_bytes < self.specs[node.name].memory_bytes and node.is_alive:
                self.crash(node.incarnation)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send_to_client(self, client: bytes, message: ServerMessage) -> None:
        node = self.clients.get(client)
        if node is not None and not node.has_space:
            self.world.schedule(0.0, self._feed_this_broker(broker_event.ClientBlocked(client)))
        elif node is not None:
            self._links.get_or_open(client, node.name, "client").send(lambda: node.receive(message))

    def send_to_worker(self, peer: bytes, order: Order) -> None:
        node = self._worker(peer)
        if node is not None:
            self._links.get_or_open(peer, node.name, "control").send(lambda: node.receive_order(order))

    def send_to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32] | None, sender: str) -> None:
        node = self.routes.receiver(endpoint)
        if node is not None:
            if hidden is not None:
                self.image_check.on_passed_on(step)
            if self.uses_keys:
                self.sender_check.check_step(sender, node)
            node.post(stage_event.StepArrived(step, hidden, 0))

    def send_garbled_to_stage(self, endpoint: str, step: Step, hidden: NDArray[np.float32]) -> None:
        """Carry a step over the real codec, with a bit flipped on the way: the receiver must refuse it."""
        node = self.routes.receiver(endpoint)
        if node is None:
            return
        self.num_garbled += 1
        arrived = garble_step(step, hidden, self.world.random)
        if isinstance(arrived, str):
            self.num_refused += 1
            node.post(stage_event.StepRefused(arrived))
            return
        raise Violation(f"I7: step {arrived.step} came with a flipped bit and was taken")

    def send_kv_part(self, endpoint: str, frames: list[Bytes], sender: WorkerView, *, is_garbled: bool) -> None:
        """Deliver a part of keys and values. The receiver must refuse a garbled one. The sender may die now."""
        node = self.routes.kv_receiver(endpoint)
        if node is None:
            return
        assert isinstance(node, WorkerNode)
        is_taken = node.kv.receive(frames, sender.key, is_garbled=is_garbled)
        self.num_garbled += is_garbled
        self.num_refused += not is_taken
        if is_taken == is_garbled:
            raise Violation(f"I7: a part of keys and values is {'garbled and taken' if is_garbled else 'refused'}")
        self.owner_traps = [num_left - 1 for num_left in self.owner_traps]
        if 0 in self.owner_traps and sender.incarnation in self.workers:
            self.fault_counts["owner of copies"] += 1
            self.crash(sender.incarnation)
        self.owner_traps = [num_left for num_left in self.owner_traps if num_left > 0]

    def send_to_broker(self, node: WorkerView, message: WorkerMessage, life: int) -> None:
        """Deliver a worker's message. ``life``: the broker process to which it was sent."""
        if life == self.broker.life and node.key not in self.revoked:
            self.blame_check.before_message(message, self.broker.core.state)
            not_at = self.routes.address_error(node.name) if isinstance(message, Hello) else ""
            self.broker.feed(broker_event.WorkerMessageReceived(node.peer, message, address_error=not_at))

    def send_heartbeat(self, beat: Heartbeat, key: str | None) -> None:
        self.broker.feed(broker_event.HeartbeatReceived(beat, key or ""))

    def send_step_done(self, done: StepDone, sender: str) -> None:
        if self.uses_keys and self.broker.is_alive:
            self.sender_check.check_step_done(sender, self.broker.core.state)
        self.blame_check.on_step_done(done, self.broker.core.state)
        self.broker.feed(broker_event.StepFinished(done))

    def send_from_client(self, node: ClientView, message: ClientMessage, life: int) -> None:
        if life == self.broker.life:
            if isinstance(message, AdapterCommand):
                self.adapter_check.on_command(message)
            self.broker.feed(broker_event.ClientMessageReceived(node.peer, message))

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_after_broker(self, snapshot: effects.BrokerSnapshot | None) -> None:
        """Run the simulation's checks after the broker's core has handled an event."""
        if self._is_ready:
            if self.audit.check_broker(self.broker.core.state):
                self.audit.check_bounds(self.broker.core.state, list(self.workers.values()))
                self.kv_check.check_leaks(self.workers.values(), self.broker.core.state)
                self.image_check.check_pixels(self.broker.core.state)
            self.promise_check.check_first_plan(self.broker.core.state)
            effects.check_effects(snapshot, self.broker.core.state, self.workers)
            if self.speculation is not None:
                self.speculation_check.check_step(snapshot, self.broker.core.state)
                self.speculation_check.check_preemptions(self.broker.core.state)
            self.verdict_check.check(self.broker.core.state)
            self.blame_check.check(self.broker.core.state)

    def check_after_stage(self, node: WorkerView, snapshot: tuple[Activate, effects.LayerPositions] | None) -> None:
        """Run the checks after an event on which this stage's core has acted."""
        self.audit.check_stage(node, self.broker.core.state)
        effects.check_held(snapshot, node)

    @property
    def counters(self) -> Counter[str]:
        """Sum of the counters of all broker processes."""
        total = Counter(self.totals)
        if self.broker.is_alive:
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
        """Number that grows with every token computed or taken, with every end, and with every position that is
        computed for the first time: a long prompt takes a while in small chunks."""
        counters = self.counters
        for sequence in self.broker.core.state.running:
            self._furthest[sequence.id] = max(self._furthest.get(sequence.id, 0), sequence.kv)
        ends = sum(counters.get(f"sequences_{how}", 0) for how in ("stop", "length", "cancelled", "failed"))
        return counters.get("tokens", 0) + ends + self.audit.num_delivered + sum(self._furthest.values())

    @property
    def has_recovered(self) -> bool:
        """Whether a plan serves and every living worker is a member."""
        state = self.broker.core.state
        members = [state.workers.get(incarnation) for incarnation in self.workers]
        return (
            self.broker.is_alive
            and not self._num_starting
            and state.plans.current is not None
            and all(w is not None and not w.is_gone for w in members)
        )

    @property
    def is_settled(self) -> bool:
        """Whether no plan is about to change, and every stage has activated the one in force."""
        state = self.broker.core.state
        plans = state.plans
        plan = plans.current if self.broker.is_alive and plans.phase is PlanPhase.SERVING else None
        if not self.adapter_check.is_settled(state, self.workers.values()):
            return False
        return plan is not None and all(
            effects.is_in_force(plan.epoch, node, state)
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
        self.adapter_check.check_end(state, workers)
        self.image_check.check_end(state, workers, self.broker.disk.ledger)
        for node in workers:
            self.kv_check.check_node(node)
            self.kv_check.check_tokens(node, state)
        for reader in self.readers:
            reader.check_end()
        self.audit.check_members(state, workers)
        if self.num_refused != self.num_garbled:
            raise Violation(f"I7: of {self.num_garbled} garbled tensors {self.num_refused} were refused")

    def _worker(self, peer: bytes) -> WorkerNode | None:
        return self.workers.get(peer.decode())

    def _feed_this_broker(self, event: broker_event.Event) -> Callable[[], None]:
        """Return a callback that feeds an event about a connection, unless the broker has been restarted by then."""
        life = self.broker.life
        return lambda: self.broker.feed(event) if self.broker.life == life else None

    def _schedule_soon(self, what: Callable[[], None]) -> None:
        self.world.schedule(self.world.draw(self.world.pace.control), what)

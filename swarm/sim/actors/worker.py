"""A worker's process: a stage's core and its executor, connected to the simulated network.

Simulated links replace the sockets of the production shell, and virtual time its threads; nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.errors import ModelError
from swarm.sim.actors.beats import Beats
from swarm.sim.actors.device import Device
from swarm.sim.actors.introduction import introduction, slowness_of
from swarm.sim.actors.surroundings import Surroundings
from swarm.sim.checks import guard
from swarm.sim.doors import Door, key_of
from swarm.sim.network import Link
from swarm.sim.schedules.schedule import WorkerSpec
from swarm.stage import actions as stage_act
from swarm.stage import events as stage_event
from swarm.stage.core import StageCore, StageSettings
from swarm.testing import FakeExecutor
from swarm.wire.messages import (
    NOBODYS,
    Activate,
    Activated,
    Fence,
    Hello,
    LayerRange,
    Leaving,
    Order,
    Prepare,
    Prepared,
    Step,
    Welcome,
    WorkerMessage,
    layers_of,
    ranges_of,
)

STAGE_TICK_S = 0.1  # interval of the worker's timer
LEAVE_S = 3.0  # how long a worker that wants to leave waits for its release
KNOCK_S = (0.01, 0.8)  # until a worker notices that the broker is back


@dataclass(slots=True)
class Trap:
    """Point at which a worker dies: before or after it handles or sends a message of a kind."""

    when: str  # "before" or "after"
    kind: str


class WorkerNode:
    """Simulated process of a worker."""

    def __init__(self, cluster: Surroundings, spec: WorkerSpec, number: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name = spec.name
        self.incarnation = f"{name}.{number}"
        self.peer = self.incarnation.encode()
        self.key = key_of(self.incarnation) if cluster.uses_keys else None
        self.ticket = "" if self.key is None else key_of(f"ticket of {self.incarnation}")[:32]
        self.door = Door(uses_keys=cluster.uses_keys)  # its listener for steps
        self.waits_at = ""  # a relay at which steps arrive, too
        self.memory_bytes = spec.memory_bytes
        self.executor = FakeExecutor(cluster.manifest, spec.capacity, put_off_every=cluster.put_off_every)
        self.core = StageCore(
            StageSettings(name, self.incarnation, cluster.manifest.num_layers, log_bytes=cluster.log_bytes)
        )
        self._machines = cluster.machines
        self.device = Device(cluster, self.executor, slowness_of(name, self._machines))
        self.alive = True
        # frozen: stopped as by SIGSTOP; hung: only the compute thread stands still
        self.frozen = self.hung = self._leaves = False
        self._frozen_until = self._hung_until = 0.0
        self.garbles = 0  # tensors still to be sent with a flipped bit
        self.loses_orders = self.loses_answers = 0  # orders, and answers that a plan waits for, still to be lost
        self.is_busy = False
        self._lineage = self.came_with = NOBODYS  # of the broker that welcomed it last, and of the one before
        self._fence = 0  # the control thread's fence flag, which a computation reads
        self._stop_standby = False
        self._inbox: deque[stage_event.Event] = deque()
        self._held_back: list[Callable[[], None]] = []  # received while frozen
        self._held_end: Callable[[], None] | None = None  # end of a computation, held back while frozen or hung
        self._control = cluster.network.link(name, "broker", "control", self._world.pace.control)
        self._beats = Beats(cluster, self)
        self._edge: Link | None = None
        self._edge_to = self._edge_name = ""
        self._tick()
        self._come_in()

    def _come_in(self) -> None:
        """Connect for the first time; retry while the broker's listener is closed."""
        if "worker" in self._cluster.broker.shut_doors:
            self._world.at(self._world.draw(KNOCK_S), self._come_in)
        else:
            self.post(stage_event.BrokerConnected())

    def take_order(self, order: Order) -> None:
        """Receive an order, unless it is to be lost."""
        if self.loses_orders and isinstance(order, Prepare | Activate):
            self.loses_orders -= 1
            return
        self._when_thawed(lambda: self._take_order(order))

    def _take_order(self, order: Order) -> None:
        if isinstance(order, Welcome) and order.lineage != self._lineage:
            self.came_with, self._lineage, self._fence = self._lineage, order.lineage, order.epoch
        if isinstance(order, Fence | Activate) and order.lineage == self._lineage:
            self._fence = max(self._fence, order.epoch)
        self.post(stage_event.OrderArrived(order))

    def post(self, event: stage_event.Event) -> None:
        """Queue an event, which the compute thread handles when it is free."""
        if self.alive:
            self._inbox.append(event)
            self._drain()

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process as by SIGKILL: its connections break."""
        if not self.alive:
            return
        self.alive = False
        self._control.cut()
        self._close_edge()
        self._beats.cut()
        self._cluster.worker_gone(self)

    def terminate(self) -> None:
        """Send SIGTERM: the worker asks to leave, and ends when it is released, or after a while."""
        self._leaves = True
        self._say(Leaving(incarnation=self.incarnation, reason="SIGTERM"))
        if self._control.is_cut or not self._cluster.broker.alive:  # the broker does not receive it
            self._cluster.worker_exits(self)
        self._world.at(LEAVE_S, lambda: self._cluster.worker_exits(self) if self.alive else None)

    def freeze(self, for_s: float) -> None:
        self.frozen = True
        self._frozen_until = max(self._frozen_until, self._world.now + for_s)
        self._world.at(for_s, self.thaw)

    def thaw(self, *, at_once: bool = False) -> None:
        """Continue all threads, in a random order."""
        if self.frozen and (at_once or self._world.now >= self._frozen_until):
            self.frozen = False
            self._go_on()

    def hang(self, for_s: float) -> None:
        self.hung = True
        self._hung_until = max(self._hung_until, self._world.now + for_s)
        self._world.at(for_s, self.wake)

    def wake(self, *, at_once: bool = False) -> None:
        """Continue the compute thread."""
        if self.hung and (at_once or self._world.now >= self._hung_until):
            self.hung = False
            self._go_on()

    def drop_control(self, for_s: float) -> None:
        """Break the connection to the broker for a while; messages sent meanwhile are lost."""
        self._control.drop(for_s, keeps=False)
        self._world.at(for_s, lambda: self._when_thawed(lambda: self.post(stage_event.BrokerConnected())))

    def lose_broker(self) -> None:
        """Handle the broker's death: messages in flight are lost. Finished steps are kept for it, as for any next
        stage."""
        self._control.break_off()
        self._beats.break_off()
        if self._edge is not None and self._edge_name == "broker":
            self._edge.go_down()
        if self._leaves:  # no broker is left to release the worker
            self._cluster.worker_exits(self)

    def find_broker(self) -> None:
        """Reconnect to the restarted broker and send Hello. Its listener for steps may be at the same address."""
        self._control.break_off()
        if self._edge is not None and self._edge_name == "broker" and self._world.random.random() < 0.5:
            self._edge.come_back()
        life = self._cluster.broker.life

        def knock() -> None:
            if self.alive and self._cluster.broker.alive and self._cluster.broker.life == life:
                self._control.reconnect()
                self._when_thawed(lambda: self.post(stage_event.BrokerConnected()))

        self._world.at(self._world.draw(KNOCK_S), knock)

    def drop_edge(self, for_s: float) -> None:
        """Break the connection to the next stage for a while."""
        if self._edge is not None:
            self._edge.drop(for_s, keeps=True)

    def _go_on(self) -> None:
        """Handle what was held back: orders in their order, the computation's end before or after them."""
        held, self._held_back = self._held_back, []
        end, self._held_end = self._held_end, None
        if end is not None:
            held.insert(0 if self._world.random.random() < 0.5 else len(held), end)
        for what in held:
            what()
        self._drain()

    def _when_thawed(self, what: Callable[[], None]) -> None:
        if self.frozen:
            self._held_back.append(what)
        else:
            what()

    # --- the compute thread ------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._inbox and self.alive and not (self.is_busy or self.frozen or self.hung):
            self._handle(self._inbox.popleft())

    def _handle(self, event: stage_event.Event) -> None:
        order = type(event.order).__name__ if isinstance(event, stage_event.OrderArrived) else ""
        if order and self._cluster.springs(self, "before", order):
            return
        self._world.tell(self.incarnation, event)
        held = guard.held_before(event, self)
        actions = self.core.handle(event, self._world.now)
        for action in actions:
            if self.alive:
                self._perform(action)
        if not self.alive:
            return
        if actions or not isinstance(event, stage_event.Tick):
            self._cluster.after_stage(self, held)
        if order:
            self._cluster.springs(self, "after", order)

    def _tick(self) -> None:
        if self.alive:
            if not self._inbox:  # otherwise the timer's event follows later
                self.post(stage_event.Tick())
            self._world.at(STAGE_TICK_S * self._cluster.stride, self._tick)

    def _perform(self, action: stage_act.Action) -> None:
        if not isinstance(action, stage_act.Note | stage_act.Compute):
            self._world.tell(f"{self.incarnation} ->", action)
        match action:
            case stage_act.Compute():
                guard.computes(action, self)
                self._compute(action)
            case stage_act.SendStep(step, hidden):
                self._send_step(step, hidden)
            case stage_act.SendDone(done):
                if not self._cluster.springs(self, "before", "StepDone"):
                    self._send(lambda: self._cluster.to_broker_done(done, self.incarnation))
                    self._cluster.springs(self, "after", "StepDone")
            case stage_act.OpenSequence() | stage_act.ForkSequence() | stage_act.ShrinkSequence():
                stage_act.arrange(self.executor, action)
            case stage_act.TruncateSequence() | stage_act.ReleaseSequence():
                stage_act.arrange(self.executor, action)
            case stage_act.UseLayers(layers, kept):
                self.executor.activate(layers, kept)
            case stage_act.OpenEdge(_, edge):
                self._close_edge()
                self._edge = self._cluster.ways.link(self.name, edge.endpoint, self.key)
                self._edge_to = edge.endpoint
                self._edge_name = edge.to
            case stage_act.Load():
                self._world.at(self._world.draw(self._world.pace.load), lambda: self._load(action))
            case stage_act.Note():
                self._world.tell(f"{self.incarnation} ##", action)
            case _:
                self._perform_control(action)

    def _perform_control(self, action: stage_act.Action) -> None:
        match action:
            case stage_act.TestDevice():
                self._compute(action)
            case stage_act.DropSpare():
                self.executor.drop_spare()
            case stage_act.Introduce():
                self._say(introduction(self, self.executor.manifest, self._machines))
            case stage_act.Tell(message):
                self._say(message)
            case stage_act.StartBeats():
                self._beats.start()
            case stage_act.Admit(keys, relay):
                self.door.admit(keys)
                self.waits_at = relay
            case stage_act.CutOff(key):
                if key in self._edge_to:
                    self._close_edge()
            case stage_act.Exit():
                self._cluster.worker_exits(self)
            case stage_act.LoadStandby(layers):
                self._stop_standby = False
                self._world.at(self._world.draw(self._world.pace.load), lambda: self._load_standby(layers))
            case stage_act.StopStandby():
                self._stop_standby = True
            case _:
                pass  # there are no tokenizer files here

    def _say(self, message: WorkerMessage) -> None:
        kind = type(message).__name__
        if self.loses_answers and isinstance(message, Hello | Prepared | Activated):
            self.loses_answers -= 1
            return
        if not self._cluster.springs(self, "before", kind):
            life = self._cluster.broker.life
            self._control.carry(lambda: self._cluster.to_broker(self, message, life))
            self._cluster.springs(self, "after", kind)

    def _send_step(self, step: Step, hidden: NDArray[np.float32] | None) -> None:
        endpoint = self._edge_to
        if self.garbles and hidden is not None:
            self.garbles -= 1
            self._send(lambda: self._cluster.to_stage_garbled(endpoint, step, hidden))
        else:
            self._send(lambda: self._cluster.to_stage(endpoint, step, hidden, self.incarnation))

    def _send(self, deliver: Callable[[], None]) -> None:
        if self._edge is not None:
            self._edge.carry(deliver)

    @property
    def stuck_to(self) -> str:
        """The next stage's name if nothing reaches it now; otherwise empty."""
        return self._edge_name if self._edge is not None and self._edge.is_stuck else ""

    def _close_edge(self) -> None:
        if self._edge is not None:
            self._edge.cut()
            self._edge = None

    def _compute(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        self.is_busy = True
        self._beats.computes()
        self._world.at(self.device.takes_s, lambda: self._end_when_awake(action))

    def _end_when_awake(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        if self.frozen or self.hung:
            self._held_end = lambda: self._end_when_awake(action)
        else:
            self._end(action)

    def _end(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        if not self.alive:
            return
        self.is_busy = False
        self._beats.rests()
        if isinstance(action, stage_act.TestDevice):
            self._handle(self.device.test())
        else:
            epoch = action.epoch
            self._handle(self.device.compute(action, lambda: self._fence > epoch))
        self._drain()

    def _load(self, action: stage_act.Load) -> None:
        edge = action.edge
        if not self._cluster.ways.reaches(self.name, edge.endpoint):
            self.post(stage_event.LoadFailed(action.epoch, "nothing answers", edge.to))
            return
        try:
            capacity = self.executor.prepare(action.layers, action.standby, action.max_sequences, lambda a, b: None)
        except ModelError as error:
            self.post(stage_event.LoadFailed(action.epoch, str(error)))
        else:
            self.post(stage_event.Loaded(action.epoch, capacity))

    def _load_standby(self, layers: tuple[LayerRange, ...]) -> None:
        """Load one more layer, and schedule the next one."""
        wanted = layers_of(layers)
        warm = wanted & self.executor.kept
        missing = () if self._stop_standby else sorted(wanted - warm)[:1]
        kept = self.executor.keep(ranges_of(warm.union(missing)), lambda a, b: None, lambda _: False)
        if not missing:
            self.post(stage_event.StandbyLoaded(kept, 0.01))
            return
        self.post(stage_event.StandbyProgressed(kept, 0.01))
        self._world.at(self._world.draw(self._world.pace.load), lambda: self._load_standby(layers))

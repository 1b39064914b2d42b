"""A worker's process: a stage's core and its executor, connected to the simulated network.

Simulated links replace the sockets of the production shell, and virtual time its threads; nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarm.errors import KvFull, ModelError
from swarm.sim.actors.device import SimDevice
from swarm.sim.actors.environment import Environment
from swarm.sim.actors.heartbeats import SimHeartbeats
from swarm.sim.actors.hello import build_hello
from swarm.sim.actors.kv_shell import KvAction, SimKvShell
from swarm.sim.actors.misreports import Misreporter
from swarm.sim.actors.spill_shell import CHUNK, SPILL_FROM, DiskAction, SimSpillShell
from swarm.sim.checks import effects
from swarm.sim.network import FakeListener, SimLink, fake_public_key
from swarm.sim.schedules.schedule import UNLIKE_SOURCE, WorkerSpec
from swarm.stage import actions as stage_act
from swarm.stage import events as stage_event
from swarm.stage.core import StageCore, StageSettings
from swarm.testing import FakeExecutor
from swarm.wire.messages import (
    NO_LINEAGE,
    Activate,
    Activated,
    AdaptersSet,
    Fence,
    Hello,
    KvHeld,
    KvRestored,
    LayerRange,
    Leaving,
    Order,
    Prepare,
    Prepared,
    ReceiveKv,
    SendKv,
    SetAdapters,
    Step,
    StepDone,
    Welcome,
    WorkerMessage,
    layers_of,
    to_ranges,
)

STAGE_TICK_S = 0.1  # interval of the worker's timer
RELEASE_TIMEOUT_S = 8.0  # how long a worker that wants to leave waits for its release
RECONNECT_S = (0.01, 0.8)  # until a worker notices that the broker is back


@dataclass(slots=True)
class WorkerTrap:
    """Point at which a worker dies: before or after it handles or sends a message of a kind."""

    when: str  # "before" or "after"
    kind: str


class WorkerNode:
    """Simulated process of a worker."""

    def __init__(self, cluster: Environment, spec: WorkerSpec, number: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name = spec.name
        self.incarnation = f"{name}.{number}"
        self.peer = self.incarnation.encode()
        self.key = fake_public_key(self.incarnation) if cluster.uses_keys else None
        self.ticket = "" if self.key is None else fake_public_key(f"ticket of {self.incarnation}")[:32]
        self.listener = FakeListener(uses_keys=cluster.uses_keys)  # its listener for steps
        self.relay = ""  # a relay at which steps arrive, too
        self.memory_bytes = spec.memory_bytes
        disk = cluster.spill_disk
        self.spill_from = 0 if disk is None else SPILL_FROM
        self.executor = FakeExecutor(
            cluster.manifest, spec.capacity, defer_every=cluster.put_off_every, share_unit=spec.share_unit
        )
        self.core = StageCore(
            StageSettings(
                name,
                self.incarnation,
                cluster.manifest.num_layers,
                log_bytes=cluster.log_bytes,
                spill_chunk=CHUNK,
                state_stride=cluster.manifest.state_stride,
            )
        )
        self._machines = cluster.machines
        if name in self._machines.unlike:
            self.executor.bits = "other bits"
        self.executor.images.room = cluster.image_room
        self.executor.adapter_files[UNLIKE_SOURCE] = name
        cluster.spill_check.record_worker(self.incarnation, self.executor.bits)
        self.misreporter = Misreporter(cluster.speculation, cluster.manifest.vocab_size, self._world.speculation_random)
        self.device = SimDevice(cluster, self.executor, self._machines.slowness.get(name, 1.0))
        self.is_alive = True
        # frozen: stopped as by SIGSTOP; hung: only the compute thread has stopped
        self.is_frozen = self.is_hung = self._is_leaving = False
        self._frozen_until = self._hung_until = 0.0
        self.num_garbled = 0  # tensors still to be sent with a flipped bit
        self.num_lost_orders = self.num_lost_answers = 0  # orders, and answers that a plan waits for, still to be lost
        self.is_busy = False
        self._lineage = self.previous_lineage = NO_LINEAGE  # of the broker that welcomed it last, and of the one before
        self._fence = 0  # the control thread's fence flag, which a computation reads
        self._stop_standby = False
        self._unopened: list[int] = []  # sequences that found no memory in the current event
        self._inbox: deque[stage_event.Event] = deque()
        self._held_back: list[Callable[[], None]] = []  # received while frozen
        self._held_end: Callable[[], None] | None = None  # end of a computation, held back while frozen or hung
        self._control = cluster.network.link(name, "broker", "control", self._world.pace.control)
        self._heartbeats = SimHeartbeats(cluster, self)
        self.kv = SimKvShell(cluster, self, self.executor)
        self.kv_listener = self.kv.listener
        self.spill = None if disk is None else SimSpillShell(cluster, self, disk)
        self._next_link: SimLink | None = None
        self._next_endpoint = self._next_name = ""
        self._tick()
        self._connect()

    def _connect(self) -> None:
        """Connect for the first time; retry while the broker's listener is closed."""
        if "worker" in self._cluster.broker.closed_listeners:
            self._world.schedule(self._world.draw(RECONNECT_S), self._connect)
        else:
            self.post(stage_event.BrokerConnected())

    def receive_order(self, order: Order) -> None:
        """Deliver an order to the worker, unless the schedule loses it."""
        if self.num_lost_orders and isinstance(order, Prepare | Activate | SetAdapters):
            self.num_lost_orders -= 1
            return
        if self.spill is not None and self.spill.loses(order):
            return
        if self.kv.num_lost_orders and isinstance(order, SendKv | ReceiveKv):
            self.kv.num_lost_orders -= 1
            return
        self._when_thawed(lambda: self._handle_order(order))

    def _handle_order(self, order: Order) -> None:
        if isinstance(order, Welcome) and order.lineage != self._lineage:
            self.previous_lineage, self._lineage, self._fence = self._lineage, order.lineage, order.epoch
        if isinstance(order, Fence | Activate) and order.lineage == self._lineage:
            self._fence = max(self._fence, order.epoch)
        self.post(stage_event.OrderArrived(order))

    def post(self, event: stage_event.Event) -> None:
        """Queue an event, which the compute thread handles when it is free."""
        if self.is_alive:
            self._inbox.append(event)
            self._drain()

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process as by SIGKILL: its connections break."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._control.close()
        self._close_next_link()
        self._heartbeats.close()
        self.kv.close()
        self._cluster.on_worker_gone(self)

    def terminate(self) -> None:
        """Send SIGTERM: the worker asks to leave, and ends when it is released, or after a while."""
        self._is_leaving = True
        self._send_to_broker(Leaving(incarnation=self.incarnation, reason="SIGTERM"))
        if self._control.is_cut or not self._cluster.broker.is_alive:  # the broker does not receive it
            self._cluster.on_worker_exit(self)
        self._world.schedule(RELEASE_TIMEOUT_S, lambda: self._cluster.on_worker_exit(self) if self.is_alive else None)

    def freeze(self, for_s: float) -> None:
        self.is_frozen = True
        self._frozen_until = max(self._frozen_until, self._world.now + for_s)
        self._world.schedule(for_s, self.thaw)

    def thaw(self, *, immediately: bool = False) -> None:
        """Continue all threads, in a random order."""
        if self.is_frozen and (immediately or self._world.now >= self._frozen_until):
            self.is_frozen = False
            self._handle_held_back()

    def hang(self, for_s: float) -> None:
        self.is_hung = True
        self._hung_until = max(self._hung_until, self._world.now + for_s)
        self._world.schedule(for_s, self.wake)

    def wake(self, *, immediately: bool = False) -> None:
        """Continue the compute thread."""
        if self.is_hung and (immediately or self._world.now >= self._hung_until):
            self.is_hung = False
            self._handle_held_back()

    def drop_control_link(self, for_s: float) -> None:
        """Break the connection to the broker for a while; messages sent meanwhile are lost."""
        self._control.drop(for_s, keeps=False)
        self._world.schedule(for_s, lambda: self._when_thawed(lambda: self.post(stage_event.BrokerConnected())))

    def on_broker_gone(self) -> None:
        """Handle the broker's death: messages in flight are lost. Finished steps are kept for it, as for any next
        stage."""
        self._control.kill()
        self._heartbeats.kill()
        if self._next_link is not None and self._next_name == "broker":
            self._next_link.go_down()
        if self._is_leaving:  # no broker is left to release the worker
            self._cluster.on_worker_exit(self)

    def on_broker_back(self) -> None:
        """Reconnect to the restarted broker and send Hello. Its listener for steps may be at the same address."""
        self._control.kill()
        if self._next_link is not None and self._next_name == "broker" and self._world.random.random() < 0.5:
            self._next_link.restore()
        life = self._cluster.broker.life

        def knock() -> None:
            if self.is_alive and self._cluster.broker.is_alive and self._cluster.broker.life == life:
                self._control.reconnect()
                self._when_thawed(lambda: self.post(stage_event.BrokerConnected()))

        self._world.schedule(self._world.draw(RECONNECT_S), knock)

    def drop_next_link(self, for_s: float) -> None:
        """Break the connection to the next stage for a while."""
        if self._next_link is not None:
            self._next_link.drop(for_s, keeps=True)

    def _handle_held_back(self) -> None:
        """Handle what was held back: orders in their order, the computation's end before or after them."""
        callbacks, self._held_back = self._held_back, []
        computation_end, self._held_end = self._held_end, None
        if computation_end is not None:
            callbacks.insert(0 if self._world.random.random() < 0.5 else len(callbacks), computation_end)
        for callback in callbacks:
            callback()
        self._drain()

    def _when_thawed(self, what: Callable[[], None]) -> None:
        if self.is_frozen:
            self._held_back.append(what)
        else:
            what()

    # --- the compute thread ------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._inbox and self.is_alive and not (self.is_busy or self.is_frozen or self.is_hung):
            self._handle(self._inbox.popleft())

    @property
    def is_stopped(self) -> bool:
        """Whether the compute thread stands still."""
        return self.is_frozen or self.is_hung

    def make_kv_turn(self) -> stage_event.KvTurn | None:
        """Return a turn in which keys and values may be sent or written to disk; None while it computes."""
        if self.is_busy or self.is_stopped:
            return None
        return replace(self.kv.make_turn(is_idle=self.has_free_turn), may_spill=True)

    @property
    def has_free_turn(self) -> bool:
        """Whether no event waits for the compute thread."""
        return not self._inbox

    def _handle(self, event: stage_event.Event) -> None:
        order = type(event.order).__name__ if isinstance(event, stage_event.OrderArrived) else ""
        if isinstance(event, stage_event.KvArrived):
            order = "KvArrived"
        if order and self._cluster.spring_trap(self, "before", order):
            return
        self._world.tell(self.incarnation, event)
        snapshot = effects.snapshot_held(event, self)
        self._cluster.kv_check.before_event(event, self)
        actions = self.core.handle(event, self._world.now)
        if isinstance(event, stage_event.StepArrived):
            self.misreporter.on_step(event.step)
        elif isinstance(event, stage_event.OrderArrived) and isinstance(event.order, SendKv):
            self._cluster.speculation_check.on_order(event.order, self)
        for action in actions:
            if self.is_alive:
                self._check_speculation(action)
                self._perform(action)
        if not self.is_alive:
            return
        if self._unopened:
            unopened, self._unopened = tuple(self._unopened), []
            self._handle(stage_event.KvOverfull("no mapping", unopened))
            return
        has_failed = bool(self._inbox) and isinstance(self._inbox[0], stage_event.KvStoreFailed)
        if not has_failed and (actions or not isinstance(event, stage_event.StageTick | stage_event.KvTurn)):
            self._cluster.check_after_stage(self, snapshot)
            self._cluster.kv_check.after_event(event, self)
        if order:
            self._cluster.spring_trap(self, "after", order)

    def _check_speculation(self, action: stage_act.Action) -> None:
        if self._cluster.speculation is None:
            return
        check = self._cluster.speculation_check
        if isinstance(action, stage_act.SendHello):
            check.check_inventory(self.core.hello_inventory(), self)
        else:
            check.on_stage_action(action, self)

    def _tick(self) -> None:
        if self.is_alive:
            if not self._inbox:  # otherwise the timer's event follows later
                self.post(stage_event.StageTick(self.kv.free_bytes))
            self._world.schedule(STAGE_TICK_S * self._cluster.stride, self._tick)

    def _perform(self, action: stage_act.Action) -> None:
        if not isinstance(action, stage_act.WriteStageLog | stage_act.Compute):
            self._world.tell(f"{self.incarnation} ->", action)
        match action:
            case stage_act.Compute():
                effects.check_epoch(action, self)
                self._compute(action)
            case stage_act.SendStep(step, hidden):
                self._send_step(step, hidden)
            case stage_act.SendDone(done):
                self._send_done(self.misreporter.report(done))
            case (
                stage_act.OpenSequence()
                | stage_act.ForkSequence()
                | stage_act.SharePrefix()
                | stage_act.ShrinkSequence()
                | stage_act.TruncateSequence()
                | stage_act.ReleaseSequence()
                | stage_act.DropKv()
            ):
                self._apply_to_executor(action)
            case (
                stage_act.StoreKv()
                | stage_act.ConnectKvTargets()
                | stage_act.AllowKvSenders()
                | stage_act.SendKvParts()
                | stage_act.SpillChunk()
                | stage_act.ReadSpilled()
                | stage_act.StoreSpilled()
                | stage_act.StopReadingSpilled()
            ):
                self._inbox.extendleft(self._move_kv(action))  # the answer comes before everything else
            case stage_act.UseLayers(layers, kept, share_unit):
                self.executor.activate(layers, kept, share_unit)
            case stage_act.OpenEdge(_, edge):
                self._close_next_link()
                self._next_link = self._cluster.routes.open_link(self.name, edge.endpoint, self.key)
                self._next_endpoint = edge.endpoint
                self._next_name = edge.to
            case stage_act.LoadLayers():
                self._world.schedule(self._world.draw(self._world.pace.load), lambda: self._load(action))
            case stage_act.WriteStageLog():
                self._world.tell(f"{self.incarnation} ##", action)
            case _:
                self._perform_control(action)

    def _apply_to_executor(self, action: stage_act.SequenceAction) -> None:
        try:
            stage_act.apply_to_executor(self.executor, action)
        except KvFull:
            assert isinstance(action, stage_act.ForkSequence | stage_act.SharePrefix)
            self._unopened.append(action.sequence)

    def _move_kv(self, action: KvAction | DiskAction) -> tuple[stage_event.Event, ...]:
        if not isinstance(action, DiskAction):
            return self.kv.perform(action)
        assert self.spill is not None
        return self.spill.perform(action)

    def _perform_control(self, action: stage_act.Action) -> None:
        match action:
            case stage_act.TestDevice():
                self._compute(action)
            case stage_act.FreeSpareMemory():
                self.executor.drop_spare()
            case stage_act.SendHello():
                self._send_to_broker(build_hello(self, self.executor.manifest, self._machines))
            case stage_act.SendToBroker(message):
                self._send_to_broker(message)
            case stage_act.StartHeartbeats():
                self._heartbeats.start()
            case stage_act.AllowSenders(keys, relay):
                self.listener.set_allowed(keys)
                self.relay = relay
            case stage_act.DisconnectKey(key):
                if key in self._next_endpoint:
                    self._close_next_link()
                self.kv.disconnect_key(key)
            case stage_act.Exit():
                self._cluster.on_worker_exit(self)
            case _:
                self._perform_load(action)

    def _perform_load(self, action: stage_act.Action) -> None:
        match action:
            case stage_act.LoadStandby(layers):
                self._stop_standby = False
                self._world.schedule(self._world.draw(self._world.pace.load), lambda: self._load_standby(layers))
            case stage_act.StopStandby():
                self._stop_standby = True
            case stage_act.LoadAdapters():
                self._world.schedule(self._world.draw(self._world.pace.load), lambda: self._load_adapters(action))
            case stage_act.DropAdapters(keys):
                self.executor.drop_adapters(keys)
            case _:
                pass  # there are no tokenizer files here

    def _send_to_broker(self, message: WorkerMessage) -> None:
        if self.num_lost_answers and isinstance(message, Hello | Prepared | Activated | AdaptersSet):
            self.num_lost_answers -= 1
            return
        if self.spill is not None and isinstance(message, KvRestored):
            self.spill.report(message, self._send)
            return
        if self.kv.num_lost_reports and isinstance(message, KvHeld):
            self.kv.num_lost_reports -= 1
            return
        self._send(message)

    def _send(self, message: WorkerMessage) -> None:
        kind = type(message).__name__
        if not self._cluster.spring_trap(self, "before", kind):
            life = self._cluster.broker.life
            self._control.send(lambda: self._cluster.send_to_broker(self, message, life))
            self._cluster.spring_trap(self, "after", kind)

    def _send_step(self, step: Step, hidden: NDArray[np.float32] | None) -> None:
        if self._cluster.spring_trap(self, "before", "Step"):
            return
        endpoint = self._next_endpoint
        if self.num_garbled and hidden is not None:
            self.num_garbled -= 1
            self._send_to_next(lambda: self._cluster.send_garbled_to_stage(endpoint, step, hidden))
        else:
            self._send_to_next(lambda: self._cluster.send_to_stage(endpoint, step, hidden, self.incarnation))
        self._cluster.spring_trap(self, "after", "Step")

    def _send_done(self, done: StepDone) -> None:
        if not self._cluster.spring_trap(self, "before", "StepDone"):
            self._send_to_next(lambda: self._cluster.send_step_done(done, self.incarnation))
            self._cluster.spring_trap(self, "after", "StepDone")

    def _send_to_next(self, deliver: Callable[[], None]) -> None:
        if self._next_link is not None:
            self._next_link.send(deliver)

    @property
    def blocked_on(self) -> str:
        """The next stage's name if nothing reaches it now; otherwise empty."""
        return self._next_name if self._next_link is not None and self._next_link.is_stuck else ""

    def _close_next_link(self) -> None:
        if self._next_link is not None:
            self._next_link.close()
            self._next_link = None

    def _compute(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        if self._unopened:
            return  # nothing is computed if a sequence of the same step could not be opened
        self.is_busy = True
        self._heartbeats.on_compute_start()
        self._world.schedule(self.device.draw_duration_s, lambda: self._finish_when_awake(action))

    def _finish_when_awake(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        if self.is_frozen or self.is_hung:
            self._held_end = lambda: self._finish_when_awake(action)
        else:
            self._finish_computation(action)

    def _finish_computation(self, action: stage_act.Compute | stage_act.TestDevice) -> None:
        if not self.is_alive:
            return
        self.is_busy = False
        self._heartbeats.on_compute_end()
        if isinstance(action, stage_act.TestDevice):
            self._handle(self.device.test())
        else:
            epoch = action.epoch
            self._handle(self.device.compute(action, lambda: self._fence > epoch))
            if self.is_alive and not self.is_busy and (turn := self.kv.turn_after_step()) is not None:
                self._handle(turn)
        self._drain()

    def _load(self, action: stage_act.LoadLayers) -> None:
        edge = action.edge
        if not self._cluster.routes.can_reach(self.name, edge.endpoint):
            self.post(stage_event.LoadFailed(action.epoch, "nothing answers", edge.to))
            return
        try:
            capacity = self.executor.prepare(action.layers, action.standby, action.max_sequences, lambda a, b: None)
        except ModelError as error:
            self.post(stage_event.LoadFailed(action.epoch, str(error)))
        else:
            self.post(stage_event.Loaded(action.epoch, capacity))

    def _load_adapters(self, action: stage_act.LoadAdapters) -> None:
        if not self.is_alive:
            return
        try:
            self.post(stage_event.AdaptersLoaded(self.executor.load_adapters(action.adapters)))
        except ModelError as error:
            self.post(stage_event.AdaptersLoaded((), str(error)))

    def _load_standby(self, layers: tuple[LayerRange, ...]) -> None:
        """Load one more layer, and schedule the next one."""
        wanted = layers_of(layers)
        warm = wanted & self.executor.kept
        missing = () if self._stop_standby else sorted(wanted - warm)[:1]
        standby = self.executor.keep(to_ranges(warm.union(missing)), lambda a, b: None, lambda _: False)
        if not missing:
            self.post(stage_event.StandbyLoaded(standby, 0.01, bits=self.executor.loaded_bits()))
            return
        self.post(stage_event.StandbyProgressed(standby, 0.01, self.executor.loaded_bits()))
        self._world.schedule(self._world.draw(self._world.pace.load), lambda: self._load_standby(layers))

"""The nodes: the production cores, wired to virtual links. What a shell does with sockets, a node does with the world;
there is no decision here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm.broker import actions as broker_act
from swarm.broker import events as broker_event
from swarm.broker.core import BrokerCore, BrokerSettings
from swarm.broker.journal import MemoryJournal
from swarm.client import events as client_event
from swarm.client.session import Session
from swarm.errors import ModelError
from swarm.sim.world import Link
from swarm.stage import actions as stage_act
from swarm.stage import events as stage_event
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.executor import Fenced
from swarm.testing import FakeExecutor
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Activate,
    Beat,
    ClientMessage,
    Fence,
    Hello,
    LayerCost,
    Leaving,
    Order,
    Rejected,
    ServerMessage,
    Step,
    WorkerMessage,
)
from swarm.wire.schema import schema

if TYPE_CHECKING:
    from swarm.sim.cluster import Cluster

TICK_S = 0.05
BEAT_S = 0.1
LEAVE_S = 3.0  # how long a worker that wants to leave waits to be let go


class BrokerNode:
    """A broker's core with its timer, its journal and its links."""

    def __init__(self, cluster: Cluster, settings: BrokerSettings) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.core = BrokerCore(settings, self._world.now)
        self._journal = MemoryJournal()
        self._disk = Link(self._world, self._world.pace.journal)
        self._pipe: Link | None = None
        self._pipe_to = ""
        self._tick()

    def feed(self, event: broker_event.Event) -> None:
        self._world.tell("broker", event)
        for action in self.core.handle(event, self._world.now):
            self._perform(action)
        self._cluster.check()

    def _tick(self) -> None:
        self.feed(broker_event.Tick())
        self._world.at(TICK_S, self._tick)

    def _perform(self, action: broker_act.Action) -> None:
        if not isinstance(action, broker_act.Note):
            self._world.tell("broker ->", action)
        self._audit(action)
        match action:
            case broker_act.SayClient(client, message, _):
                self._cluster.to_client(client, message)
            case broker_act.OrderWorker(peer, message):
                self._cluster.to_worker(peer, message)
            case broker_act.Dispatch(step):
                self._dispatch(step)
            case broker_act.OpenPipe(_, endpoint):
                self._close_pipe()
                self._pipe, self._pipe_to = Link(self._world, self._world.pace.data), endpoint
            case broker_act.ClosePipe():
                self._close_pipe()
            case broker_act.Note():
                self._world.tell("broker ##", action)
            case _:
                written = self._journal.write(action)
                if written is not None:
                    self._disk.carry(lambda: self.feed(written))

    def _audit(self, action: broker_act.Action) -> None:
        """Requests that the broker says are too large must be so, at this moment."""
        audit, state = self._cluster.audit, self.core.state
        match action:
            case broker_act.SayClient(_, Rejected(code="too_large", request_id=request_id)):
                audit.refused_for_size(request_id, state)
            case broker_act.WriteEnd(sequence, "failed") if "the stages hold" in state.sequences[sequence].detail:
                audit.refused_for_size(state.sequences[sequence].request.id, state)
            case broker_act.WriteEnd(sequence, "failed") if "the deadline" in state.sequences[sequence].detail:
                audit.too_late(state.sequences[sequence].request, state, self._world.now)
            case _:
                pass

    def _dispatch(self, step: Step) -> None:
        endpoint = self._pipe_to
        if self._pipe is not None:
            self._pipe.carry(lambda: self._cluster.to_stage(endpoint, step, None))

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.cut()
            self._pipe = None


class WorkerNode:
    """A stage's core, its executor and its threads' worth of time. ``frozen``: stopped like by SIGSTOP."""

    def __init__(self, cluster: Cluster, name: str, number: int, executor: FakeExecutor, memory_bytes: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name
        self.incarnation = f"{name}.{number}"
        self.executor = executor
        self.memory_bytes = memory_bytes
        self.core = StageCore(StageSettings(name, self.incarnation, executor.manifest.num_layers, log_bytes=1 << 20))
        self._machines = cluster.machines
        self._slowness = self._machines.slowness.get(name, 1.0)
        self.alive = True
        self.frozen = False
        self._busy = False
        self._fence = 0  # what the control thread has seen; a computation looks at it
        self._inbox: deque[stage_event.Event] = deque()
        self._held_back: list[Callable[[], None]] = []
        self._control = Link(self._world, self._world.pace.control)
        self._beats: Link | None = None
        self._edge: Link | None = None
        self._edge_to = ""
        self._idle_since = self._world.now
        self._tick()
        self.post(stage_event.BrokerConnected())

    @property
    def peer(self) -> bytes:
        return self.incarnation.encode()

    def take_order(self, order: Order) -> None:
        if isinstance(order, Fence | Activate):
            self._fence = max(self._fence, order.epoch)
        self.post(stage_event.OrderArrived(order))

    def post(self, event: stage_event.Event) -> None:
        """Something happened; the compute thread sees it when it is free."""
        if self.alive:
            self._inbox.append(event)
            self._drain()

    def kill(self) -> None:
        """As by SIGKILL: nothing more comes of it, and its connections break."""
        self.alive = False
        self._control.cut()
        self._close_edge()
        if self._beats is not None:
            self._beats.cut()
        self._cluster.worker_gone(self)

    def terminate(self) -> None:
        """As by SIGTERM: it asks to leave, and goes when it is let go, or after a while."""
        self._say(Leaving(incarnation=self.incarnation, reason="SIGTERM"))
        self._world.at(LEAVE_S, lambda: self._cluster.worker_exits(self) if self.alive else None)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        held, self._held_back = self._held_back, []
        for what in held:
            what()
        self._drain()

    def _when_thawed(self, what: Callable[[], None]) -> None:
        if self.frozen:
            self._held_back.append(what)
        else:
            what()

    def _drain(self) -> None:
        while self._inbox and self.alive and not self._busy and not self.frozen:
            self._handle(self._inbox.popleft())

    def _handle(self, event: stage_event.Event) -> None:
        self._world.tell(self.incarnation, event)
        for action in self.core.handle(event, self._world.now):
            self._perform(action)
        self._cluster.check()

    def _tick(self) -> None:
        if self.alive:
            if not any(isinstance(event, stage_event.Tick) for event in self._inbox):
                self.post(stage_event.Tick())
            self._world.at(TICK_S, self._tick)

    def _perform(self, action: stage_act.Action) -> None:
        if not isinstance(action, stage_act.Note | stage_act.Compute):
            self._world.tell(f"{self.incarnation} ->", action)
        match action:
            case stage_act.Compute():
                self._compute(action)
            case stage_act.SendStep(step, hidden):
                endpoint = self._edge_to
                self._send(lambda: self._cluster.to_stage(endpoint, step, hidden))
            case stage_act.SendDone(done):
                self._send(lambda: self._cluster.to_broker_done(done))
            case stage_act.OpenSequence() | stage_act.ForkSequence() | stage_act.ShrinkSequence():
                stage_act.arrange(self.executor, action)
            case stage_act.TruncateSequence() | stage_act.ReleaseSequence():
                stage_act.arrange(self.executor, action)
            case stage_act.UseLayers(layers):
                self.executor.activate(layers)
            case stage_act.OpenEdge(_, edge):
                self._close_edge()
                self._edge, self._edge_to = Link(self._world, self._world.pace.data), edge.endpoint
            case stage_act.Load():
                self._world.at(self._world.draw(self._world.pace.load), lambda: self._load(action))
            case stage_act.Note():
                self._world.tell(f"{self.incarnation} ##", action)
            case _:
                self._perform_control(action)

    def _perform_control(self, action: stage_act.Action) -> None:
        match action:
            case stage_act.Introduce():
                self._say(self._hello())
            case stage_act.Tell(message):
                self._say(message)
            case stage_act.StartBeats():
                if self._beats is None:
                    self._beats = Link(self._world, self._world.pace.control)
                    self._beat()
            case stage_act.Exit():
                self._cluster.worker_exits(self)
            case _:
                pass  # there are no assets here

    def _say(self, message: WorkerMessage) -> None:
        self._control.carry(lambda: self._cluster.to_broker(self, message))

    def _send(self, deliver: Callable[[], None]) -> None:
        if self._edge is not None:
            self._edge.carry(deliver)

    def _close_edge(self) -> None:
        if self._edge is not None:
            self._edge.cut()
            self._edge = None

    def _compute(self, action: stage_act.Compute) -> None:
        self._busy = True
        self._idle_since = self._world.now
        took = self._slowness * self._world.draw(self._world.pace.compute)
        self._world.at(took, lambda: self._when_thawed(lambda: self._end(action)))

    def _end(self, action: stage_act.Compute) -> None:
        if not self.alive:
            return
        self._busy = False
        self._idle_since = self._world.now
        try:
            forwarded = self.executor.forward(action.batch, lambda: self._fence > action.epoch, lambda: None)
        except Fenced:
            self._handle(stage_event.ComputeFenced(action.epoch, action.step))
        else:
            self._handle(stage_event.Computed(action.epoch, action.step, forwarded))
        self._drain()

    def _load(self, action: stage_act.Load) -> None:
        try:
            capacity = self.executor.prepare(action.layers, action.standby, action.max_sequences, lambda a, b: None)
        except ModelError as error:
            self.post(stage_event.LoadFailed(action.epoch, str(error)))
        else:
            self.post(stage_event.Loaded(action.epoch, capacity))

    def _beat(self) -> None:
        if not self.alive or self._beats is None:
            return
        if not self.frozen:
            beat = Beat(
                epoch=self.core.active or 0,
                incarnation=self.incarnation,
                progress=int(self.core.counters.get("steps", 0)),
                state="computing" if self._busy else "idle",
                blocked_on="",
                since_s=self._world.now - self._idle_since,
                loop_lag_s=0.0,
                memory_bytes=0,
                kv_used=0,
                kv_capacity=0,
            )
            self._beats.carry(lambda: self._cluster.to_broker_beat(beat))
        self._world.at(BEAT_S, self._beat)

    def _costs(self) -> tuple[LayerCost, ...]:
        if not self._machines.measure:
            return ()
        return (
            LayerCost("decode", 1, 32, 0.001 * self._slowness, False),
            LayerCost("prefill", 256, 0, 0.01 * self._slowness, False),
            LayerCost("head", 1, 0, 0.0005 * self._slowness, False),
        )

    def _hello(self) -> Hello:
        return Hello(
            epoch=self.core.fence,
            name=self.name,
            incarnation=self.incarnation,
            pid=1,
            host="machine" if self._machines.together else self.name,
            wire_versions=(PROTOCOL_VERSION,),
            schema=schema(),
            device="cpu",
            dtype="float32",
            cores=1,
            endpoint=self.incarnation,
            memory_bytes=self.memory_bytes,
            kv_budget_bytes=1 << 20,
            costs=self._costs(),
            manifest=self.executor.manifest,
            held_layers=self.core.layers,
            held=self.core.inventory(),
            logs=tuple(self.core.log.ranges()),
        )


class ClientNode:
    """A client's session and a caller that takes tokens at its own pace."""

    def __init__(self, cluster: Cluster, name: str, consume_s: tuple[float, float]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.name = name
        self.session = Session(url="sim", reconnect_timeout_s=600.0)
        self._consume_s = consume_s
        self._link: Link | None = None
        self._taken_at: dict[tuple[str, int], float] = {}  # when all that was delivered will have been taken
        self.stop_at: dict[tuple[str, int], int] = {}
        self._connect()
        self._tick()

    @property
    def peer(self) -> bytes:
        return self.name.encode()

    def feed(self, event: client_event.Event) -> None:
        self._world.tell(self.name, event)
        for action in self.session.handle(event, self._world.now):
            self._perform(action)

    def hear(self, message: ServerMessage) -> None:
        if self._link is not None:
            self.feed(client_event.Received(message))

    def lose_connection(self, for_s: float) -> None:
        """What was on its way is lost, in both directions; then it comes back."""
        if self._link is None:
            return
        self._link.cut()
        self._link = None
        self._cluster.client_gone(self)
        self.feed(client_event.Disconnected())
        self._world.at(for_s, self._connect)

    def _connect(self) -> None:
        self._link = Link(self._world, self._world.pace.control)
        self._cluster.client_back(self)
        self.feed(client_event.Connected())

    def _tick(self) -> None:
        for action in self.session.handle(client_event.Tick(), self._world.now):
            self._perform(action)
        self._world.at(0.5, self._tick)

    def _perform(self, action: client_event.Action) -> None:
        self._world.tell(f"{self.name} ->", action)
        match action:
            case client_event.Send(message):
                self._send(message)
            case client_event.Deliver():
                self._cluster.audit.delivered(action)
                self._take_soon(action)
            case client_event.Ended(request_id, index, finished):
                self._cluster.audit.ended(request_id, index, finished)
            case client_event.Failed(request_id, error):
                self._cluster.audit.failed(request_id, str(error))
            case _:
                pass

    def _send(self, message: ClientMessage) -> None:
        if self._link is not None:
            self._link.carry(lambda: self._cluster.to_broker_from_client(self, message))

    def _take_soon(self, action: client_event.Deliver) -> None:
        """The caller takes what was delivered after a while, in order, and may find a stop string in it."""
        key = (action.request_id, action.index)
        upto = action.start + len(action.ids)

        def take() -> None:
            self.feed(client_event.Consumed(action.request_id, action.index, upto))
            stop_at = self.stop_at.get(key)
            if stop_at is not None and upto >= stop_at:
                self.feed(client_event.StopFound(action.request_id, action.index, stop_at))

        due = max(self._taken_at.get(key, 0.0), self._world.now + self._world.draw(self._consume_s))
        self._taken_at[key] = due
        self._world.at(due - self._world.now, take)

"""The stage's core: order of steps, duplicates, epochs, truncation, sequence memory and the sender's log.

``handle(event, now) -> actions``. The core lives in the compute thread. Nothing else changes the state of the stage;
the shell (``service``) moves bytes and calls the executor.

Rules
-----
* *Lineage, epochs, senders* (``epochs``). A message with another lineage of the broker, or with an epoch below the
  fence, is dropped and counted. Steps are accepted only while an epoch is in force, and only from the sender that its
  plan names.
* *Order.* The steps of an epoch are numbered without a gap (``step_order``). If a step is missing although later ones
  have arrived, the stage reports it to the broker (``DataPathError``).
* *States* of recurrent layers can't be rolled back: a cut sequence falls back to a position at which they are held.
* *Positions.* A row must begin exactly where its sequence ends in *every* layer of the stage. Anything else is a
  violation of the protocol by some process: the stage reports it and never guesses.
* *Numbers.* Hidden states that are not finite are refused on arrival, and the report to the broker names their
  sender. The sender itself received finite ones, because they passed the same check.
* *Faults.* A step that raises is reported to the broker (``faults``); the worker tests its device before its next
  Hello.
* *Copies* (``kv_exchange``). The stage sends its keys and values to workers that keep its layers warm, and stores those
  of others for layers that it keeps warm itself. The next plan begins with them. No step waits for more than one part.
* *One step at a time.* Before a step is computed, its releases, opens and truncations are applied. Then its rows are
  computed, and its output is logged and sent.
* The stored sequences (``sequences``) and their positions change in this order only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from swarm.stage.actions import CHUNK, Action, Compute, SendToBroker, WriteStageLog
from swarm.stage.adapters import StageAdapters
from swarm.stage.epochs import AllowedSenders, EpochManager
from swarm.stage.events import (
    AdaptersLoaded,
    BrokerConnected,
    ChunkLost,
    ChunkSpilled,
    Computed,
    ComputeFailed,
    ComputeFenced,
    DeviceTested,
    Event,
    Idle,
    KvArrived,
    KvOverfull,
    KvPartsTaken,
    KvStoreFailed,
    KvTurn,
    Loaded,
    LoadFailed,
    OrderArrived,
    RecheckComputed,
    RecheckFailed,
    SpilledRead,
    SpilledStored,
    StageTick,
    StandbyLoaded,
    StandbyProgressed,
    StepArrived,
    StepRefused,
)
from swarm.stage.executor import ForwardResult
from swarm.stage.faults import FaultHandler
from swarm.stage.kv_arrivals import KvArrivals
from swarm.stage.kv_exchange import KvExchange
from swarm.stage.kv_restore import KvRestorer
from swarm.stage.kv_sender import KvSender
from swarm.stage.kv_spill import KvSpiller
from swarm.stage.log import ActivationLog
from swarm.stage.membership import BrokerMembership
from swarm.stage.pending_plan import PendingPlan
from swarm.stage.proposals import certain_rows
from swarm.stage.recheck import RecheckQueue
from swarm.stage.replay import ReplayQueue
from swarm.stage.sequences import SequenceStore, StoredSequence
from swarm.stage.statistics import StageStatistics
from swarm.stage.step_order import StepOrder, StepRunner
from swarm.wire.messages import (
    REPLAY_STEP,
    HeldSequence,
    LayerRange,
    Lineage,
    Order,
    SetAdapters,
    Welcome,
)
from swarm.wire.tensors import find_not_finite

# events of keys and values on their way to or from other workers or the disk
KvEvent = KvArrived | KvStoreFailed | KvTurn | KvPartsTaken | ChunkSpilled | ChunkLost | SpilledRead | SpilledStored


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings of a stage's core."""

    name: str
    incarnation: str  # a random name of this process's life
    num_layers: int  # of the whole model
    log_bytes: int = 256 << 20  # limit of the activation log
    profile_every: int = 0  # log a profile after this number of steps; 0: never
    dtypes: tuple[str, ...] = ()  # types of weights that this worker could compute with, as its settings allow
    spill_chunk: int = CHUNK  # positions of a chunk on disk
    state_stride: int = 0  # positions between states that are kept (``Manifest``); 0: layers keep none
    state_bytes: tuple[int, ...] = ()  # size of a state, by layer (``Manifest``)


@dataclass(slots=True)
class StageCore:
    """Deciding part of a stage; the rules are in the module's docstring."""

    settings: StageSettings
    adapters: StageAdapters = field(init=False)
    epochs: EpochManager = field(init=False)
    pending_plan: PendingPlan = field(init=False)
    store: SequenceStore = field(init=False)
    replays: ReplayQueue = field(init=False)
    rechecks: RecheckQueue = field(init=False)
    exchange: KvExchange = field(init=False)
    steps: StepOrder = field(default_factory=StepOrder)
    runner: StepRunner = field(init=False)
    membership: BrokerMembership = field(init=False)
    faults: FaultHandler = field(init=False)
    counters: dict[str, float] = field(default_factory=dict)
    _cause: str = ""  # the broker's event that caused the current order or step; for logs
    # actions of the current ``handle`` call; shared with the parts below
    _actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = self.settings
        self.pending_plan = PendingPlan(own.incarnation)
        self.faults = FaultHandler(own.incarnation, self.pending_plan, self._actions, self._write_log, self._count)
        self.membership = BrokerMembership(self._actions, self._write_log, self.faults.defer_hello, own.dtypes)
        self.store = SequenceStore(ActivationLog(own.log_bytes), self._actions, own.state_stride, own.state_bytes)
        self.runner = StepRunner(own.name, own.num_layers, own.profile_every, self.store, self._actions, self._count)
        self.replays = ReplayQueue(own.name, own.incarnation, own.num_layers, self.store, self._count)
        self.rechecks = RecheckQueue(own.incarnation, own.num_layers, self.log, self._count)
        arrivals = KvArrivals(own.incarnation, self.store, self._actions, self._write_log, self._count)
        spiller = KvSpiller(self.store, self._count, own.spill_chunk)
        restorer = KvRestorer(own.incarnation, self.store, spiller, self._actions, self._write_log, self._count)
        self.exchange = KvExchange(KvSender(self.store, self._count), arrivals, spiller, restorer, self._actions)
        self.adapters = StageAdapters(own.incarnation, self.store.sequences, self._actions)
        self.epochs = EpochManager(
            own.incarnation,
            self.pending_plan,
            self.store,
            self.steps,
            self.runner,
            self.replays,
            self.rechecks,
            self.exchange,
            self._actions,
            self._write_log,
            self._count,
        )

    @property
    def lineage(self) -> Lineage:
        return self.epochs.lineage

    @property
    def fence(self) -> int:
        return self.epochs.fence

    @property
    def active(self) -> int | None:
        return self.epochs.active

    @property
    def layers(self) -> LayerRange | None:
        return self.epochs.layers

    @property
    def allowed(self) -> AllowedSenders:
        return self.epochs.allowed

    @property
    def statistics(self) -> StageStatistics:
        return self.runner.statistics

    @property
    def welcome(self) -> Welcome | None:
        return self.membership.welcome

    @property
    def is_parked(self) -> bool:
        return self.membership.is_parked

    @property
    def sequences(self) -> dict[int, StoredSequence]:
        return self.store.sequences

    @property
    def log(self) -> ActivationLog:
        return self.store.log

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event and return the actions to carry out, in order."""
        match event:
            case StepArrived():
                self._on_step(event, now)
            case StepRefused():
                self._on_step_refused(event)
            case Computed(epoch, step, forwarded):
                self._on_computed(epoch, step, forwarded, now)
            case ComputeFenced(epoch, step):
                self._abandon_work("fenced", now)
            case ComputeFailed() | KvOverfull():
                self._on_compute_failed(event, now)
            case DeviceTested():
                self._on_device_tested(event, now)
            case Idle() | RecheckComputed() | RecheckFailed():
                self._actions.extend(self.rechecks.handle_event(event, is_idle=self._is_idle))
            case OrderArrived(order):
                self._cause = order.cause
                self.membership.on_order_received(now)
                self._handle_order(order, now)
                self.epochs.publish_allowed()
            case Loaded() | LoadFailed() | StandbyProgressed() | StandbyLoaded() | AdaptersLoaded():
                self._on_loaded(event, now)
            case (
                KvArrived()
                | KvStoreFailed()
                | KvTurn()
                | KvPartsTaken()
                | ChunkSpilled()
                | ChunkLost()
                | SpilledRead()
                | SpilledStored()
            ):
                self._on_kv_event(event, now)
            case BrokerConnected():
                self.membership.on_connected(now)
            case StageTick(kv_free_bytes):
                self._tick(kv_free_bytes, now)
        self.epochs.share_prefixes()
        self._start_work(now)
        self.adapters.drop_unused()
        actions = [self._stamp_lineage(action) for action in self._actions]
        self._actions.clear()
        return actions

    def _stamp_lineage(self, action: Action) -> Action:
        """Add the broker's current lineage to a message."""
        if isinstance(action, SendToBroker):
            return SendToBroker(msgspec.structs.replace(action.message, lineage=self.lineage))
        return action

    # --- orders ------------------------------------------------------------------------------------------------------

    def _handle_order(self, order: Order, now: float) -> None:
        if isinstance(order, Welcome):
            self._on_welcome(order)
            return
        if self.membership.handle_order(order):
            return
        if isinstance(order, SetAdapters):  # of the broker that this worker introduces itself to, too
            self.adapters.follow(order)
            return
        if order.lineage != self.lineage:
            self._count("stale_orders")
            return
        if not self.epochs.handle_order(order, now):
            self._count("unexpected_orders")

    def _on_welcome(self, order: Welcome) -> None:
        self.epochs.on_welcome(order)
        self.membership.on_welcome(order)

    def _on_loaded(
        self, event: Loaded | LoadFailed | StandbyProgressed | StandbyLoaded | AdaptersLoaded, now: float
    ) -> None:
        if not isinstance(event, AdaptersLoaded):
            self._actions.extend(self.pending_plan.handle_event(event))
            self.epochs.publish_allowed()
        elif self.adapters.on_loaded(event) and self.membership.hello_sent_at is not None:
            self.membership.send_hello(now)  # the broker has been waiting for these

    def inventory(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences, for Activated."""
        return self.store.inventory()

    def hello_inventory(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences with their digests, for Hello."""
        return self.store.hello_inventory()

    def _on_device_tested(self, event: DeviceTested, now: float) -> None:
        if self.faults.on_device_tested(event, now):
            self.membership.send_hello(now)

    # --- steps in --------------------------------------------------------------------------------------------------

    def _on_step(self, event: StepArrived, now: float) -> None:
        step = event.step
        if step.lineage != self.lineage:
            self._count("stale_steps")
            return
        if step.trial is not None and step.epoch >= self.fence:  # workers without a part in the plan take rechecks, too
            self._actions.extend(self.rechecks.add(step, event.hidden))
            return
        if step.epoch < self.fence or step.epoch != self.active:
            self._count("stale_steps")
            return
        if not self.allowed.may_send_steps(event.sender):
            self._count("foreign_steps")
            return
        rows = find_not_finite(step, event.hidden)
        if rows:
            self.faults.refuse_not_finite(step.epoch, step, rows)
            return
        if step.replay:
            problem = self.replays.add(step, event.hidden)
            if problem is not None:
                self._report_error(problem, misplaced=True)
            return
        dropped = self.steps.add(event, now)
        if dropped is not None:
            self._count(dropped)

    def _on_step_refused(self, event: StepRefused) -> None:
        """Report a step that was damaged on its way. It may have been the only one, with no later step to reveal the
        gap."""
        self._count("refused_frames")
        if self.active is not None and self.allowed.may_send_steps(event.sender):
            self._report_error(f"a step was damaged on its way: {event.reason}", damaged=True)

    def _start_work(self, now: float) -> None:
        """Start the next step if the stage is idle; if no step is due, the next replay."""
        while self.runner.running is None and self.replays.current is None and self.steps.ready and not self.is_parked:
            assert self.layers is not None
            step = self.runner.take_next(self.steps, now)
            self._cause = step.cause
            self.replays.drop_released(step.release)
            self.replays.mark_resumed(step.rows)
            self.exchange.on_step_started(step)
            problem = self.runner.start(self.layers, now)
            if problem is not None:
                self._abandon_work("refused", now)
                self._report_error(f"step {step.step} of epoch {step.epoch}: {problem}", misplaced=True, step=step.step)
                return
        if self.runner.running is None and self.layers is not None and not self.is_parked:
            result = self.replays.start(self.layers)
            if isinstance(result, Compute):
                self._actions.append(result)
            elif result is not None:
                self._report_error(result, misplaced=True)

    @property
    def has_idle_work(self) -> bool:
        """Whether a recheck waits for idle time. If so, the shell feeds ``Idle`` events."""
        return self.rechecks.has_work and not self.is_parked

    @property
    def next_deadline(self) -> float:
        """Return the time at which a tick is due, whenever the last one was; infinite if there is none."""
        return self.exchange.restorer.next_deadline

    @property
    def next_kv_turn_at(self) -> float:
        """Time from which on a turn may send parts of the keys and values. Cheap, so that the shell may ask after every
        step."""
        return inf if self.is_parked else self.exchange.next_turn_at

    def wants_kv_turn(self, turn: KvTurn, now: float) -> bool:
        """Return whether this turn would send a part of the keys and values. If so, the shell feeds it."""
        return not self.is_parked and self.exchange.wants_turn(self._with_own_work(turn), now)

    def _on_kv_event(self, event: KvEvent, now: float) -> None:
        match event:
            case KvArrived():
                layers = None if self.active is None and not self.sequences else self.layers
                self.exchange.arrivals.on_arrived(event, self.lineage, layers, now)
            case KvStoreFailed(sequence, reason):
                self.exchange.arrivals.on_store_failed(sequence, reason)
            case KvTurn():
                if not self.is_parked:
                    self.exchange.take_turn(self._with_own_work(event), now)
            case KvPartsTaken():
                self.exchange.sender.on_taken(event, now)
            case ChunkSpilled():
                self.exchange.spiller.on_spilled(event)
            case ChunkLost(sequence, start):
                self.exchange.spiller.on_lost(sequence, start)
            case SpilledRead():
                self.exchange.restorer.on_read(event, now)
            case SpilledStored():
                self.exchange.restorer.on_stored(event, now)

    def _with_own_work(self, turn: KvTurn) -> KvTurn:
        """Return the turn; it is not idle while the stage itself has work."""
        return turn if self._is_idle else replace(turn, is_idle=False)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing runs, nothing is due, and the worker is not parked."""
        return (
            self.runner.running is None and self.replays.current is None and not self.steps.ready and not self.is_parked
        )

    # --- steps out -------------------------------------------------------------------------------------------------

    def _on_computed(self, epoch: int, step: int, forwarded: ForwardResult, now: float) -> None:
        self.faults.record_success(epoch)
        replayed = self.replays.current
        if replayed is not None and step == REPLAY_STEP and epoch == replayed.epoch == self.active:
            assert self.layers is not None
            self._actions.extend(self.replays.on_computed(forwarded, self.layers))
            self.exchange.on_computed(replayed.rows)
            return
        if self.runner.running is not None and self.runner.is_running(step) and epoch == self.active:
            assert self.layers is not None
            self.exchange.on_computed(certain_rows(self.runner.running.arrived.step))
            self.runner.on_computed(forwarded, self.layers, now)
        else:
            self._abandon_work("fenced", now)

    def _on_compute_failed(self, event: ComputeFailed | KvOverfull, now: float) -> None:
        if isinstance(event, KvOverfull):
            self._on_kv_overfull(event, now)
            return
        compute = event.compute
        is_current = compute.epoch == self.active and self.layers is not None
        if event.is_memory:
            self.store.copies.clear()
        if is_current and self.faults.retry_in_pieces(event, self.fence):
            assert self.layers is not None
            self.store.fall_back(compute.batch, self.layers)
            return
        self._abandon_work("failed", now)
        reason = f"step {compute.step} of epoch {compute.epoch} failed: {event.reason}"
        if self.layers is not None:
            failed = self.faults.record_failure(event, self.layers)
            self.faults.report_error(compute.epoch, reason, failed=failed, step=compute.step)

    def _on_kv_overfull(self, event: KvOverfull, now: float) -> None:
        """End the epoch: the next plan counts what this stage holds. The unopened sequences hold nothing here."""
        for sequence in event.unopened:
            self.store.release(sequence)
        self._abandon_work("failed", now)
        self._report_error(event.reason, kv_overfull=True)

    def _abandon_work(self, outcome: str, now: float) -> None:
        self.runner.abandon(outcome, now)
        self.replays.current = None

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, kv_free_bytes: int, now: float) -> None:
        self.membership.tick(now)
        self.exchange.arrivals.tick(kv_free_bytes, now, may_report=not self.is_parked)
        self.exchange.restorer.tick(now)
        self.faults.tick(now)
        missing = self.steps.report_gap(now)
        if missing is not None:
            self._report_error(missing, damaged=True)

    def _report_error(
        self,
        reason: str,
        *,
        damaged: bool = False,
        kv_overfull: bool = False,
        misplaced: bool = False,
        step: int | None = None,
    ) -> None:
        epoch = self.active if self.active is not None else self.fence
        self.faults.report_error(
            epoch, reason, damaged=damaged, kv_overfull=kv_overfull, misplaced=misplaced, step=step
        )

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def _write_log(self, event: str, level: str = "info", **fields: object) -> None:
        self._actions.append(WriteStageLog(event, level, fields | ({"cause": self._cause} if self._cause else {})))

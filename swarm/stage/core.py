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
* *Positions.* A row must begin exactly where its sequence ends in *every* layer of the stage. Anything else is a
  violation of the protocol by some process: the stage reports it and never guesses.
* *Numbers.* Hidden states that are not finite are refused on arrival, and the report to the broker names their
  sender. The sender itself received finite ones, because they passed the same check.
* *Faults.* A step that raises is reported to the broker (``faults``); the worker tests its device before its next
  Hello.
* *One step at a time.* When a step's turn comes, its releases, opens and truncations are applied, then its rows are
  computed, then its output is logged and sent.
* The stored sequences (``sequences``) and their positions change in this order only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.stage.actions import (
    Action,
    Compute,
    Note,
    Tell,
)
from swarm.stage.epochs import Epochs, Heard
from swarm.stage.events import (
    AsideComputed,
    AsideFailed,
    BrokerConnected,
    Computed,
    ComputeFailed,
    ComputeFenced,
    DeviceTested,
    Event,
    Leisure,
    Loaded,
    LoadFailed,
    OrderArrived,
    StandbyLoaded,
    StandbyProgressed,
    StepArrived,
    StepRefused,
    Tick,
)
from swarm.stage.executor import Forwarded
from swarm.stage.faults import Faults
from swarm.stage.log import ActivationLog
from swarm.stage.membership import Membership
from swarm.stage.order import StepOrder, Turn
from swarm.stage.preparation import Preparation
from swarm.stage.recheck import Rechecks
from swarm.stage.replay import Replays
from swarm.stage.sequences import HeldTokens, Holdings
from swarm.stage.statistics import StageStatistics
from swarm.wire.messages import (
    REPLAY_STEP,
    Activate,
    Dismiss,
    Expect,
    Fence,
    HeldSequence,
    Keep,
    LayerRange,
    Lineage,
    Order,
    Prepare,
    Recheck,
    Replay,
    Shun,
    TellDigest,
    Welcome,
)
from swarm.wire.tensors import not_finite


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings of a stage's core."""

    name: str
    incarnation: str  # a random name of this process's life
    num_layers: int  # of the whole model
    log_bytes: int = 256 << 20  # limit of the activation log
    profile_every: int = 0  # log a profile after this number of steps; 0: never
    dtypes: tuple[str, ...] = ()  # types of weights that this worker could compute with, as its settings allow


@dataclass(slots=True)
class StageCore:
    """Deciding part of a stage; the rules are in the module's docstring."""

    settings: StageSettings
    epochs: Epochs = field(init=False)
    preparation: Preparation = field(init=False)
    holdings: Holdings = field(init=False)
    replays: Replays = field(init=False)
    rechecks: Rechecks = field(init=False)
    steps: StepOrder = field(default_factory=StepOrder)
    turn: Turn = field(init=False)
    membership: Membership = field(init=False)
    faults: Faults = field(init=False)
    counters: dict[str, float] = field(default_factory=dict)
    _cause: str = ""  # the broker's event that caused the current order or step; for logs
    # actions of the current ``handle`` call; shared with the parts below
    _out: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = self.settings
        self.preparation = Preparation(own.incarnation)
        self.faults = Faults(own.incarnation, self.preparation, self._out, self._note, self._count)
        self.membership = Membership(self._out, self._note, self.faults.holds_back, own.dtypes)
        self.holdings = Holdings(ActivationLog(own.log_bytes), self._out)
        self.turn = Turn(own.name, own.num_layers, own.profile_every, self.holdings, self._out, self._count)
        self.replays = Replays(own.name, own.incarnation, own.num_layers, self.holdings, self._count)
        self.rechecks = Rechecks(own.incarnation, own.num_layers, self.log, self._count)
        self.epochs = Epochs(
            own.incarnation,
            self.preparation,
            self.holdings,
            self.steps,
            self.turn,
            self.replays,
            self.rechecks,
            self._out,
            self._note,
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
    def heard(self) -> Heard:
        return self.epochs.heard

    @property
    def statistics(self) -> StageStatistics:
        return self.turn.statistics

    @property
    def welcome(self) -> Welcome | None:
        return self.membership.welcome

    @property
    def parked(self) -> bool:
        return self.membership.parked

    @property
    def sequences(self) -> dict[int, HeldTokens]:
        return self.holdings.sequences

    @property
    def log(self) -> ActivationLog:
        return self.holdings.log

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event and return the actions to carry out, in order."""
        match event:
            case StepArrived():
                self._step_arrived(event, now)
            case StepRefused():
                self._step_refused(event)
            case Computed(epoch, step, forwarded):
                self._computed(epoch, step, forwarded, now)
            case ComputeFenced(epoch, step):
                self._stop_work("fenced", now)
            case ComputeFailed():
                self._compute_failed(event, now)
            case DeviceTested():
                if self.faults.tested(event, now):
                    self.membership.introduce(now)
            case Leisure() | AsideComputed() | AsideFailed():
                self._out.extend(self.rechecks.handle(event, is_idle=self._is_idle))
            case OrderArrived(order):
                self._cause = order.cause
                self.membership.heard(now)
                self._take_order(order, now)
                self.epochs.tell_door()
            case Loaded() | LoadFailed() | StandbyProgressed() | StandbyLoaded():
                self._loaded(event)
            case BrokerConnected():
                self.membership.connected(now)
            case Tick():
                self._tick(now)
        self._start_work(now)
        actions = [self._of_this_life(action) for action in self._out]
        self._out.clear()
        return actions

    def _loaded(self, event: Loaded | LoadFailed | StandbyProgressed | StandbyLoaded) -> None:
        match event:
            case Loaded(epoch, capacity):
                self._out.extend(self.preparation.loaded(epoch, capacity))
            case LoadFailed(epoch, reason, cant_reach):
                self._out.extend(self.preparation.failed(epoch, reason, cant_reach))
            case StandbyProgressed(layers, load_s):
                self._out.extend(self.preparation.standby_progressed(layers, load_s))
            case StandbyLoaded(layers, load_s, problem):
                self._out.extend(self.preparation.standby_loaded(layers, load_s, problem))
        self.epochs.tell_door()

    def _of_this_life(self, action: Action) -> Action:
        """Add the broker's current lineage to a message."""
        if isinstance(action, Tell):
            return Tell(msgspec.structs.replace(action.message, lineage=self.lineage))
        return action

    # --- orders ------------------------------------------------------------------------------------------------------

    def _take_order(self, order: Order, now: float) -> None:
        if isinstance(order, Welcome):
            self._welcome(order)
            return
        if self.membership.take(order):
            return
        if order.lineage != self.lineage:
            self._count("stale_orders")
            return
        match order:
            case Prepare():
                self.epochs.prepare(order)
            case Keep():
                self._out.extend(self.preparation.keep(order))
            case Expect() | Shun():
                self.epochs.whom_to_hear(order)
            case Fence(epoch=epoch):
                self.epochs.raise_fence(epoch)
            case Activate():
                self.epochs.activate(order, now)
            case Dismiss(epoch=epoch):
                self.epochs.dismiss(epoch)
            case Replay():
                self._replay(order)
            case Recheck() | TellDigest():
                self._recheck(order)
            case _:
                self._count("unexpected_orders")

    def _welcome(self, order: Welcome) -> None:
        self.epochs.welcome(order)
        self.membership.begin(order)

    def _replay(self, order: Replay) -> None:
        if order.epoch != self.active or self.layers is None:
            self._count("stale_orders")
        else:
            self._out.extend(self.replays.take_order(order, self.layers))

    def _recheck(self, order: Recheck | TellDigest) -> None:
        if order.epoch < self.fence:
            self._count("stale_orders")
        else:
            self._out.extend(self.rechecks.obey(order))

    def inventory(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences, for Activated."""
        return self.holdings.inventory()

    def introduction(self) -> tuple[HeldSequence, ...]:
        """Return the stored sequences with their digests, for Hello."""
        return self.holdings.introduction()

    # --- steps in --------------------------------------------------------------------------------------------------

    def _step_arrived(self, event: StepArrived, now: float) -> None:
        step = event.step
        if step.lineage != self.lineage:
            self._count("stale_steps")
            return
        if step.trial is not None and step.epoch >= self.fence:  # workers without a part in the plan take rechecks, too
            self._out.extend(self.rechecks.arrived(step, event.hidden))
            return
        if step.epoch < self.fence or step.epoch != self.active:
            self._count("stale_steps")
            return
        if not self.heard.sends_steps(event.sender):
            self._count("foreign_steps")
            return
        rows = not_finite(step, event.hidden)
        if rows:
            self.faults.not_finite(step.epoch, step, rows)
            return
        if step.replay:
            problem = self.replays.arrived(step, event.hidden)
            if problem is not None:
                self._trouble(problem)
            return
        dropped = self.steps.take(event, now)
        if dropped is not None:
            self._count(dropped)

    def _step_refused(self, event: StepRefused) -> None:
        """Report a step that was damaged on its way. It may have been the only one, with no later step to reveal the
        gap."""
        self._count("refused_frames")
        if self.active is not None and self.heard.sends_steps(event.sender):
            self._trouble(f"a step was damaged on its way: {event.reason}", damaged=True)

    def _start_work(self, now: float) -> None:
        """Start the next step if none is running, or the next replay if no step is due."""
        while self.turn.work is None and self.replays.current is None and self.steps.ready and not self.parked:
            assert self.layers is not None
            step = self.turn.begin(self.steps, now)
            self._cause = step.cause
            self.replays.forget(step.release)
            self.replays.resumed(step.rows)
            problem = self.turn.go_on(self.layers, now)
            if problem is not None:
                self._stop_work("refused", now)
                self._trouble(f"step {step.step} of epoch {step.epoch}: {problem}", step=step.step)
                return
        if self.turn.work is None and self.layers is not None and not self.parked:
            found = self.replays.start(self.layers)
            if isinstance(found, Compute):
                self._out.append(found)
            elif found is not None:
                self._trouble(found)

    @property
    def wants_time(self) -> bool:
        """Whether a recheck waits for idle time. If so, the shell feeds ``Idle`` events."""
        return self.rechecks.wants_time and not self.parked

    @property
    def _is_idle(self) -> bool:
        """Whether nothing runs, nothing is due, and the worker is not parked."""
        return self.turn.work is None and self.replays.current is None and not self.steps.ready and not self.parked

    # --- steps out -------------------------------------------------------------------------------------------------

    def _computed(self, epoch: int, step: int, forwarded: Forwarded, now: float) -> None:
        self.faults.computed()
        replayed = self.replays.current
        if replayed is not None and step == REPLAY_STEP and epoch == replayed.epoch == self.active:
            assert self.layers is not None
            self._out.extend(self.replays.computed(forwarded, self.layers))
            return
        if self.turn.is_of(step) and epoch == self.active:
            assert self.layers is not None
            self.turn.computed(forwarded, self.layers, now)
        else:
            self._stop_work("fenced", now)

    def _compute_failed(self, event: ComputeFailed, now: float) -> None:
        compute = event.compute
        counts = compute.epoch == self.active and self.layers is not None
        if counts and self.faults.tries_again(event, self.fence):
            return
        self._stop_work("failed", now)
        reason = f"step {compute.step} of epoch {compute.epoch} failed: {event.reason}"
        if self.layers is not None:
            failed = self.faults.failed(event, self.layers)
            self.faults.trouble(compute.epoch, reason, failed=failed, step=compute.step)

    def _stop_work(self, why: str, now: float) -> None:
        self.turn.stop(why, now)
        self.replays.current = None

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self.membership.tick(now)
        self.faults.tick(now)
        missing = self.steps.missing(now)
        if missing is not None:
            self._trouble(missing, damaged=True)

    def _trouble(self, reason: str, *, damaged: bool = False, step: int | None = None) -> None:
        epoch = self.active if self.active is not None else self.fence
        self.faults.trouble(epoch, reason, damaged=damaged, step=step)

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields | ({"cause": self._cause} if self._cause else {})))

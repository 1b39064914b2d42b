"""The stage's core: ordering, duplicates, epochs, truncation, rooms and the sender's log.

``handle(event, now) -> actions``. It lives in the compute thread and is the only one who changes what the stage holds;
the shell (``service``) moves bytes and calls the executor.

Rules
-----
* *Epochs.* ``fence`` is the highest epoch heard of; what is older is dropped and counted. Steps are taken only while
  ``active`` is the epoch in force, which an ``Activate`` starts and a higher ``Fence`` ends.
* *Order.* Steps of an epoch are numbered without a gap. An earlier number is a duplicate, a later one waits in
  ``early`` for those before it; if they don't come, the broker is told (``Trouble``).
* *Positions.* A row must begin exactly where its sequence ends in *every* layer held. Anything else means that somebody
  broke the protocol: Trouble, never a guess.
* *One step at a time.* A step's releases, opens and truncations are done when its turn comes, then its rows are
  computed, then its output is logged and sent.
* A sequence's positions are kept per range of layers: layers just taken over have none until they are rebuilt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from swarm.stage.actions import (
    Action,
    Compute,
    Exit,
    ForkSequence,
    Introduce,
    Load,
    Note,
    OpenEdge,
    OpenSequence,
    ReleaseSequence,
    SendAssets,
    SendDone,
    SendStep,
    ShrinkSequence,
    StartBeats,
    Tell,
    TruncateSequence,
    UseLayers,
)
from swarm.stage.checkpoints import ActivationLog
from swarm.stage.events import (
    BrokerConnected,
    Computed,
    ComputeFailed,
    ComputeFenced,
    Event,
    Loaded,
    LoadFailed,
    OrderArrived,
    StepArrived,
    Tick,
)
from swarm.stage.executor import Batch, Capacity, Forwarded, SampleJob
from swarm.wire.messages import (
    Activate,
    Activated,
    Alive,
    Denied,
    Dismiss,
    Fence,
    HeldSequence,
    Hop,
    LayerRange,
    Open,
    Order,
    Park,
    Prepare,
    Prepared,
    RangePosition,
    Refused,
    Rejoin,
    Release,
    Replay,
    ReplayMissing,
    Row,
    SequencePosition,
    Step,
    StepDone,
    Trouble,
    Welcome,
)

EX_CONFIG = 78  # the exit code that means: starting again will not help
MAX_EARLY = 64  # steps that may wait for an earlier one; more are never in flight
GAP_PATIENCE_S = 1.0
DEFAULT_LEASE_S = 10.0


@dataclass(slots=True)
class HeldTokens:
    """One sequence in this stage."""

    open: Open
    history: list[int]
    kv: list[RangePosition]  # in layer order; one entry when all layers are level

    def position(self) -> int | None:
        """How many positions every layer holds; None while they differ."""
        first = self.kv[0].position
        return first if all(r.position == first for r in self.kv) else None

    def set_position(self, layers: LayerRange, position: int) -> None:
        self.kv = [RangePosition(layers, position)]

    def truncate(self, position: int) -> None:
        cut = [RangePosition(r.layers, min(r.position, position)) for r in self.kv]
        self.kv = _merge(cut)

    def take_over(self, layers: LayerRange) -> None:
        """The stage's range changes: layers that stay keep their positions, new ones have none."""
        kept: list[RangePosition] = []
        at = layers.first
        for held in self.kv:
            first, stop = max(held.layers.first, layers.first), min(held.layers.stop, layers.stop)
            if first >= stop:
                continue
            if first > at:
                kept.append(RangePosition(LayerRange(at, first), 0))
            kept.append(RangePosition(LayerRange(first, stop), held.position))
            at = stop
        if at < layers.stop:
            kept.append(RangePosition(LayerRange(at, layers.stop), 0))
        self.kv = _merge(kept)


def _merge(ranges: list[RangePosition]) -> list[RangePosition]:
    merged: list[RangePosition] = []
    for item in ranges:
        if merged and merged[-1].position == item.position:
            merged[-1] = RangePosition(LayerRange(merged[-1].layers.first, item.layers.stop), item.position)
        else:
            merged.append(item)
    return merged


@dataclass(slots=True)
class Work:
    """The step whose turn it is."""

    arrived: StepArrived
    arrived_at: float
    started_at: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class StageSettings:
    name: str
    incarnation: str
    num_layers: int
    log_bytes: int = 256 << 20


@dataclass(slots=True)
class StageCore:
    """See the module's text."""

    settings: StageSettings
    log: ActivationLog = field(init=False)
    fence: int = 0
    active: int | None = None
    layers: LayerRange | None = None
    coming: Prepare | None = None
    capacity: Capacity | None = None
    sequences: dict[int, HeldTokens] = field(default_factory=dict)
    next_step: int = 0
    early: dict[int, tuple[StepArrived, float]] = field(default_factory=dict)
    ready: deque[tuple[StepArrived, float]] = field(default_factory=deque)
    work: Work | None = None
    welcome: Welcome | None = None
    parked: bool = False
    heard_at: float = 0.0
    idle_since: float = 0.0
    gap_since: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    _out: list[Action] = field(default_factory=list)
    _loading: Prepare | None = None

    def __post_init__(self) -> None:
        self.log = ActivationLog(self.settings.log_bytes)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one fact, return what is to be done, in order."""
        match event:
            case StepArrived():
                self._step_arrived(event, now)
            case Computed(epoch, step, forwarded):
                self._computed(epoch, step, forwarded, now)
            case ComputeFenced(epoch, step):
                self._stop_work("fenced", now)
            case ComputeFailed(epoch, step, reason):
                self._stop_work("failed", now)
                self._trouble(f"step {step} of epoch {epoch} failed: {reason}")
            case OrderArrived(order):
                self.heard_at = now
                self._take_order(order, now)
            case Loaded(epoch, capacity):
                self._loaded(epoch, capacity)
            case LoadFailed(epoch, reason):
                self._load_failed(epoch, reason)
            case BrokerConnected():
                self.heard_at = now
                self._out.append(Introduce())
            case Tick():
                self._tick(now)
        self._start_work(now)
        actions = self._out[:]
        self._out.clear()
        return actions

    # --- orders ------------------------------------------------------------------------------------------------------

    def _take_order(self, order: Order, now: float) -> None:
        if self.parked:
            self.parked = False
            self._note("unparked")
        match order:
            case Prepare():
                self._prepare(order)
            case Fence(epoch=epoch):
                self._raise_fence(epoch)
            case Activate():
                self._activate(order, now)
            case Dismiss(epoch=epoch):
                self._dismiss(epoch)
            case Replay():
                self._replay(order)
            case Park():
                self._park("the broker said so")
            case _:
                self._take_membership_order(order)

    def _take_membership_order(self, order: Order) -> None:
        match order:
            case Welcome():
                self._welcome(order)
            case Denied(reason=reason):
                self._out.append(Exit(EX_CONFIG, f"the broker does not take this worker: {reason}"))
            case Rejoin(reason=reason):
                self._note("rejoining", "warning", reason=reason)
                self._out.append(Introduce())
            case Release(reason=reason):
                self._out.append(Exit(0, reason))
            case Alive():
                pass  # hearing it is all it is for
            case _:
                self._count("unexpected_orders")

    def _welcome(self, order: Welcome) -> None:
        self.welcome = order
        self.fence = max(self.fence, order.epoch)
        self._out.append(StartBeats(order.beat_endpoint, order.beat_interval_s))
        if order.wants:
            self._out.append(SendAssets(order.wants))

    def _prepare(self, order: Prepare) -> None:
        if order.epoch < self.fence or (self.coming is not None and order.epoch < self.coming.epoch):
            self._count("stale_orders")
            return
        self.coming = order
        self.capacity = None
        if self._loading is None:  # else the load under way ends first; its result is judged by what is wanted then
            self._load(order)

    def _load(self, order: Prepare) -> None:
        self._loading = order
        self._out.append(Load(order.epoch, order.layers, order.standby, order.max_sequences))

    def _loaded(self, epoch: int, capacity: Capacity) -> None:
        self._loading = None
        if self.coming is None:
            return
        if self.coming.epoch != epoch:
            self._load(self.coming)
            return
        self.capacity = capacity
        message = Prepared(
            epoch=epoch,
            incarnation=self.settings.incarnation,
            kv_capacity=capacity.kv_tokens,
            max_sequences=capacity.max_sequences,
            load_s=capacity.load_s,
            warm_up_s=capacity.warm_up_s,
            resident_bytes=capacity.resident_bytes,
        )
        self._out.append(Tell(message))

    def _load_failed(self, epoch: int, reason: str) -> None:
        self._loading = None
        if self.coming is None:
            return
        if self.coming.epoch != epoch:
            self._load(self.coming)
            return
        self.coming = None
        self._note("load_failed", "error", epoch=epoch, reason=reason)
        self._out.append(Tell(Refused(epoch=epoch, incarnation=self.settings.incarnation, reason=reason[:4000])))

    def _raise_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            self._count("stale_orders")
            return
        self.fence = epoch
        if self.active is not None and self.active < epoch:
            self._leave_epoch()

    def _leave_epoch(self) -> None:
        self.active = None
        self.ready.clear()
        self.early.clear()
        self.gap_since = None

    def _activate(self, order: Activate, now: float) -> None:
        prepared = self.coming
        if order.epoch < self.fence or prepared is None or prepared.epoch != order.epoch or self.capacity is None:
            self._count("stale_orders")
            return
        self._leave_epoch()
        self.fence = self.active = order.epoch
        self.next_step = order.first_step
        self.idle_since = now
        self.coming = None
        self.layers = prepared.layers
        self._out.append(UseLayers(prepared.layers))
        self._keep_only(order.live, prepared.layers)
        self._out.append(OpenEdge(order.epoch, prepared.edge))
        activated = Activated(
            epoch=order.epoch,
            incarnation=self.settings.incarnation,
            held=self.inventory(),
            logs=tuple(self.log.ranges()),
        )
        self._out.append(Tell(activated))

    def _dismiss(self, epoch: int) -> None:
        if epoch < self.fence:
            self._count("stale_orders")
            return
        self.fence = epoch
        self._leave_epoch()
        for sequence in list(self.sequences):
            self._release(sequence)
        self.log.clear()

    def _keep_only(self, live: tuple[SequencePosition, ...], layers: LayerRange) -> None:
        positions = {item.sequence: item.position for item in live}
        for sequence in [s for s in self.sequences if s not in positions]:
            self._release(sequence)
        for sequence, held in self.sequences.items():
            held.take_over(layers)
            self._truncate(sequence, positions[sequence])

    def _replay(self, order: Replay) -> None:
        """Nobody asks for replays yet; the answer is honest: the next tier has to serve."""
        self._out.append(
            Tell(
                ReplayMissing(
                    epoch=order.epoch,
                    incarnation=self.settings.incarnation,
                    sequence=order.sequence,
                    boundary=order.boundary,
                    has_from=order.stop,
                )
            )
        )

    def inventory(self) -> tuple[HeldSequence, ...]:
        """What is held, for Hello and Activated."""
        return tuple(HeldSequence(sequence, tuple(held.kv)) for sequence, held in self.sequences.items())

    # --- steps in --------------------------------------------------------------------------------------------------

    def _step_arrived(self, event: StepArrived, now: float) -> None:
        step = event.step
        if step.epoch < self.fence or step.epoch != self.active:
            self._count("stale_steps")
            return
        if step.step < self.next_step or step.step in self.early:
            self._count("duplicate_steps")
            return
        if len(self.early) >= MAX_EARLY and step.step != self.next_step:
            self._count("dropped_steps")
            return
        self.early[step.step] = (event, now)
        while (found := self.early.pop(self.next_step, None)) is not None:
            self.ready.append(found)
            self.next_step += 1
            self.gap_since = None  # if steps are still missing, these are others
        if self.early and self.gap_since is None:
            self.gap_since = now

    def _start_work(self, now: float) -> None:
        """Begin the next step if none is under way."""
        while self.work is None and self.ready and not self.parked:
            arrived, arrived_at = self.ready.popleft()
            self.work = Work(arrived, arrived_at, now, max(0.0, arrived_at - self.idle_since))
            step = arrived.step
            problem = self._apply_header(step) or self._wrong_row(step.rows)
            if problem is not None:
                self._stop_work("refused", now)
                self._trouble(f"step {step.step} of epoch {step.epoch}: {problem}")
                return
            if step.rows:
                self._out.append(Compute(step.epoch, step.step, self._batch(arrived)))
                return
            self._pass_on(Forwarded(None, (), (), 0.0, 0.0), now)

    def _apply_header(self, step: Step) -> str | None:
        """Retire, release, open, truncate, in this order."""
        for cut in step.retire:
            self._retire(cut)
        for sequence in step.release:
            self._release(sequence)
        for item in step.open:
            problem = self._open(item)
            if problem is not None:
                return problem
        for cut in step.truncate:
            held = self.sequences.get(cut.sequence)
            if held is None:
                return f"sequence {cut.sequence} is to be cut, but it is not open here"
            self._truncate(cut.sequence, cut.position)
        return None

    def _open(self, item: Open) -> str | None:
        assert self.layers is not None
        held = self.sequences.get(item.sequence)
        if held is not None:  # told again in a new epoch: what it holds stays
            held.open = item
            held.history = list(item.tokens)
            return None
        position = item.shared if item.source is not None else 0
        if item.source is None:
            self._out.append(OpenSequence(item.sequence, item.limit))
        else:
            source = self.sequences.get(item.source)
            if source is None or (source.position() or 0) < position:
                return (
                    f"sequence {item.sequence} is to begin as {item.source}, which does not hold {position} positions"
                )
            self._out.append(ForkSequence(item.sequence, item.source, position, item.limit))
            self.log.fork(item.sequence, item.source, position)
        self.sequences[item.sequence] = HeldTokens(item, list(item.tokens), [RangePosition(self.layers, position)])
        return None

    def _retire(self, cut: SequencePosition) -> None:
        """It has ended, its beginning stays for others to copy."""
        if cut.sequence in self.sequences:
            self._truncate(cut.sequence, cut.position)
            self._out.append(ShrinkSequence(cut.sequence, cut.position))

    def _truncate(self, sequence: int, position: int) -> None:
        held = self.sequences[sequence]
        held.truncate(position)
        del held.history[position:]
        self.log.truncate(sequence, position)
        self._out.append(TruncateSequence(sequence, position))

    def _release(self, sequence: int) -> None:
        if self.sequences.pop(sequence, None) is not None:
            self._out.append(ReleaseSequence(sequence))
        self.log.release(sequence)

    def _wrong_row(self, rows: tuple[Row, ...]) -> str | None:
        for row in rows:
            held = self.sequences.get(row.sequence)
            if held is None:
                return f"sequence {row.sequence} is not open here"
            if held.position() != row.start:
                return f"sequence {row.sequence} stands at {held.kv}, the row begins at {row.start}"
            if row.start + row.count > held.open.limit:
                return f"sequence {row.sequence} would outgrow its limit of {held.open.limit}"
        return None

    def _batch(self, arrived: StepArrived) -> Batch:
        step = arrived.step
        is_last = self.layers is not None and self.layers.stop == self.settings.num_layers
        samples = []
        taken = 0
        for index, row in enumerate(step.rows):
            held = self.sequences[row.sequence]
            held.history[row.start : row.start + row.count] = step.tokens[taken : taken + row.count]
            taken += row.count
            if is_last and row.sample:
                samples.append(SampleJob(index, held.open.params, held.open.seed, held.history, held.open.num_prompt))
        tokens = np.asarray(step.tokens, dtype=np.int64)
        return Batch(step.rows, tokens, arrived.hidden, tuple(samples))

    # --- steps out -------------------------------------------------------------------------------------------------

    def _computed(self, epoch: int, step: int, forwarded: Forwarded, now: float) -> None:
        if self.work is None or self.work.arrived.step.step != step or epoch != self.active:
            self._stop_work("fenced", now)
            return
        assert self.layers is not None
        for row in self.work.arrived.step.rows:
            self.sequences[row.sequence].set_position(self.layers, row.start + row.count)
        if forwarded.hidden is not None:
            self._log_output(self.work.arrived.step, forwarded)
        self._pass_on(forwarded, now)

    def _log_output(self, step: Step, forwarded: Forwarded) -> None:
        assert self.layers is not None
        assert forwarded.hidden is not None
        taken = 0
        for row in step.rows:
            self.log.append(row.sequence, self.layers.stop, row.start, forwarded.hidden[taken : taken + row.count])
            taken += row.count

    def _pass_on(self, forwarded: Forwarded, now: float) -> None:
        work, self.work = self.work, None
        assert work is not None
        assert self.layers is not None
        step = work.arrived.step
        hops = (*step.hops, self._hop(work, forwarded))
        if self.layers.stop == self.settings.num_layers:
            done = StepDone(
                epoch=step.epoch,
                step=step.step,
                kv=tuple(SequencePosition(row.sequence, row.start + row.count) for row in step.rows),
                sampled=forwarded.sampled,
                failed=forwarded.failed,
                hops=hops,
            )
            self._out.append(SendDone(done))
        else:
            self._out.append(SendStep(msgspec.structs.replace(step, hops=hops, tensor=None), forwarded.hidden))
        self._count("steps")
        self._count("rows", len(step.rows))
        self._count("positions", len(step.tokens))
        self._count("wire_bytes_in", work.arrived.num_bytes)
        self._count("compute_s", forwarded.compute_s)
        self._count("sample_s", forwarded.sample_s)
        self._count("idle_s", work.idle_s)
        self.idle_since = now

    def _hop(self, work: Work, forwarded: Forwarded) -> Hop:
        assert self.layers is not None
        wait_s = max(0.0, work.started_at - work.arrived_at)
        return Hop(
            self.settings.name,
            self.layers,
            wait_s,
            forwarded.compute_s,
            forwarded.sample_s,
            work.idle_s,
            work.arrived.num_bytes,
        )

    def _stop_work(self, why: str, now: float) -> None:
        self._count(f"steps_{why}")
        self.work = None
        self.idle_since = now

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        lease_s = self.welcome.lease_s if self.welcome is not None else DEFAULT_LEASE_S
        if not self.parked and self.welcome is not None and now - self.heard_at > lease_s:
            self._park(f"nothing heard from the broker for {lease_s:.0f} s")
        if self.gap_since is not None and now - self.gap_since > GAP_PATIENCE_S:
            self.gap_since = None
            self._trouble(f"step {self.next_step} is missing, later ones are here: {sorted(self.early)}")

    def _park(self, reason: str) -> None:
        self.parked = True
        self._note("parked", "warning", reason=reason)

    def _trouble(self, reason: str) -> None:
        self._note("trouble", "error", reason=reason)
        epoch = self.active if self.active is not None else self.fence
        self._out.append(Tell(Trouble(epoch=epoch, incarnation=self.settings.incarnation, reason=reason[:4000])))

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields))

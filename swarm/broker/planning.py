"""Changing the plan: one procedure for a first plan, a newcomer, a departure and a death.

::

    wanted ── WriteEpoch ──► PREPARING ── all Prepared ──► ACTIVATING ── all Activated ──► SERVING
       ▲                        │                              │                              │
       └──── a member lost, a refusal, a deadline: the same again, with a higher epoch ───────┘

* The epoch is journalled before anybody hears of it.
* While layers load (PREPARING) an old plan that is whole runs on. If it has lost a member, everybody is fenced first.
* ``Activate`` lists the sequences that stay, with the positions that count; everything else is dropped by the stages.
  Their answers say what they really hold. A sequence resumes from the position that *every* layer holds; the rest is
  computed again from its tokens, which the broker knows.
* A plan that serves is changed when it must be (a member leaves), when a newcomer on the same machine shall get its
  part, and when another one is quicker by more than the margin. Among equally good ones the one that moves least is
  taken (``plan.solve``).
* A worker that doesn't answer by the deadline is out, and the plan is made again without it. While it says that it
  loads more and more bytes, the deadline moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from swarm.broker.actions import Action, ClosePipe, Note, OpenPipe, OrderWorker, WriteEpoch
from swarm.broker.inventory import keep_what_fits
from swarm.broker.partition import check_stages, planned_stage, weight_bytes
from swarm.broker.plan.explain import sentences
from swarm.broker.plan.gauge import StageGauge
from swarm.broker.plan.load import Speeds
from swarm.broker.plan.problem import Model, Shortage
from swarm.broker.rebuild import Rebuilder, RebuildSettings
from swarm.broker.state import (
    Plan,
    PlanPhase,
    StagePlan,
    State,
    Worker,
    WorkerState,
)
from swarm.broker.wanted import PlanRules, Proposal, propose
from swarm.wire.messages import (
    Activate,
    Activated,
    Dismiss,
    Edge,
    Fence,
    Hello,
    LoadProgress,
    Order,
    Prepare,
    Prepared,
    Refused,
    Release,
    SequencePosition,
    Suppose,
)

# How often the workers' pace is compared with what was predicted, and how much it must differ to be believed: a plan
# made anew for every whim of a machine would move layers for nothing.
LOOK_AGAIN_S = 30.0
PACE_DIFFERS = 0.15
PACE_LEAST, PACE_MOST = 0.2, 20.0
QUARANTINE_AFTER = 3  # worker deaths at which a request was in flight, until it is suspected of causing them


@dataclass(frozen=True, slots=True)
class PlanSettings:
    rules: PlanRules = field(default_factory=PlanRules)
    min_workers: int = 0
    gather_s: float = 30.0  # how long the first plan waits for ``min_workers`` once one has joined
    settle_s: float = 0.5
    prepare_timeout_s: float = 600.0
    activate_timeout_s: float = 5.0
    max_sequences: int = 64
    rebuild: RebuildSettings = field(default_factory=RebuildSettings)


class Planner:
    """Keeps ``state.book``. Methods append what is to be done to ``out``."""

    def __init__(self, state: State, settings: PlanSettings, data_endpoint: str, out: list[Action]) -> None:
        self._state = state
        self._settings = settings
        self._data_endpoint = data_endpoint
        self._out = out
        self.rebuilder = Rebuilder(state, settings.rebuild, out)
        self._looked_at = 0.0
        self._remembered: tuple[object, Proposal | Shortage] | None = None

    # --- what moves the plan -----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Make a plan if one is wanted, and give up on whoever is late."""
        book = self._state.book
        for worker in self._state.workers.values():
            if worker.refusals and now >= worker.retry_at:
                worker.forget_refusals()
        if book.awaited and now >= book.deadline:
            self._blame_the_late(now)
        if book.phase in (PlanPhase.PREPARING, PlanPhase.ACTIVATING):
            return
        self._release_the_leaving(now)
        self._take_paces(now)
        if book.phase is PlanPhase.SERVING and not self._wants_change():
            return
        if now - book.changed_at >= self._settings.settle_s:
            self._start(now)

    def changed(self, now: float) -> None:
        """The set of workers changed; plan once it has been quiet for a moment."""
        self._state.book.changed_at = now

    def lost(self, worker: Worker, now: float, *, blame: bool) -> None:
        """A worker is out. If a plan relies on it, that plan is void. ``blame``: what it computed may be the cause."""
        book = self._state.book
        was_under_way = book.coming is not None and worker.incarnation in book.coming.members
        if was_under_way:
            self._abandon()
        if book.current is not None and worker.incarnation in book.current.members:
            if blame:
                self._blame_sequences()
            self._stop_serving()
            self._start(now)
        elif was_under_way and book.current is None:
            self._start(now)  # nobody is served until there is a plan
        else:
            self.changed(now)

    def leaving(self, worker: Worker, now: float) -> None:
        """A worker wants to go. A plan under way that counts on it is not worth finishing."""
        if self._state.book.coming is not None and worker.incarnation in self._state.book.coming.members:
            self._abandon()
        self.changed(now)

    def trouble(self, now: float, *, blame: bool) -> None:
        """The data path is broken though all live: the same workers, a new epoch."""
        if self._state.book.serving:
            if blame:
                self._blame_sequences()
            self._stop_serving()
            self._start(now)

    def epoch_written(self, epoch: int, now: float) -> None:
        book = self._state.book
        book.written = max(book.written, epoch)
        if book.coming is None or book.coming.epoch != epoch:
            return
        if book.current is None:
            self._fence_all(epoch)
        book.awaited = set(book.coming.members)
        book.deadline = now + self._settings.prepare_timeout_s
        for index, stage in enumerate(book.coming.stages):
            prepare = Prepare(
                epoch=epoch,
                layers=stage.layers,
                standby=(),
                edge=self._edge_after(book.coming, index),
                max_sequences=self._settings.max_sequences,
            )
            self._order(stage.incarnation, prepare)

    def load_progressed(self, worker: Worker, message: LoadProgress, now: float) -> None:
        """While bytes move, a load is waited for, however long it takes: weights may come over a slow network."""
        book = self._state.book
        moved = message.loaded_bytes != worker.loaded_bytes
        worker.loaded_bytes, worker.total_bytes = message.loaded_bytes, message.total_bytes
        if moved and book.phase is PlanPhase.PREPARING and self._is_awaited(worker.incarnation, message.epoch):
            book.deadline = now + self._settings.prepare_timeout_s

    def prepared(self, message: Prepared, now: float) -> None:
        book = self._state.book
        if book.phase is not PlanPhase.PREPARING or not self._is_awaited(message.incarnation, message.epoch):
            self._state.count("stale_control")
            return
        self._state.workers[message.incarnation].comply()
        book.prepared[message.incarnation] = message
        book.awaited.discard(message.incarnation)
        if not book.awaited:
            self._activate(now)

    def refused(self, worker: Worker, message: Refused, now: float) -> None:
        coming = self._state.book.coming
        stage = coming.stage_of(worker.incarnation) if coming is not None and message.epoch == coming.epoch else None
        if stage is None:
            self._state.count("stale_control")
            return
        worker.refuse(stage.layers, message.reason[:500], now)
        self._note("plan_refused", "error", worker=worker.name, reason=message.reason)
        self._abandon()
        if self._state.book.current is None:
            self._start(now)
        else:
            self.changed(now)

    def activated(self, message: Activated, now: float) -> None:
        book = self._state.book
        if book.phase is not PlanPhase.ACTIVATING or not self._is_awaited(message.incarnation, message.epoch):
            self._state.count("stale_control")
            return
        book.awaited.discard(message.incarnation)
        self.rebuilder.heard(message)
        if not book.awaited:
            self._serve(now)

    def shortage_without(self, worker: Worker) -> str | None:
        """What the swarm would wait for without this worker; None if it could do without."""
        found = propose(self._state, self._settings.rules, without=worker)
        return found.text if isinstance(found, Shortage) else None

    def why_not(self, hello: Hello) -> str | None:
        """Why this worker is not taken: too little memory, too slow; None if it is welcome."""
        return self._settings.rules.why_not(hello)

    def suppose(self, suppose: Suppose) -> Proposal | Shortage:
        """The plan that would be made if things were so. Nothing is changed."""
        return propose(self._state, self._settings.rules, suppose=suppose)

    def look_again(self, now: float) -> None:
        """Somebody asks what the swarm waits for: the answer is that of this moment."""
        if self._state.book.phase is not PlanPhase.NONE or self._still_gathers(now):
            return
        found = self._wanted()
        if isinstance(found, Shortage):
            self._wait_for(found)
        else:
            self._state.book.waits_for = "a moment of quiet: workers have just come or gone"

    def forgive(self, pause_s: float) -> None:
        self._state.book.deadline += pause_s
        self._state.book.changed_at += pause_s
        self.rebuilder.forgive(pause_s)

    # --- making a plan ---------------------------------------------------------------------------------------------

    def _wanted(self) -> Proposal | Shortage:
        """The plan that would be made now; worked out again only when something that it depends on has changed."""
        state = self._state
        seen = tuple(
            (w.incarnation, w.state, tuple(w.refusals), w.pace, w.planned)
            for w in state.workers.values()
            if not w.is_gone
        )
        key = (seen, state.book.current and state.book.current.epoch, state.manifest is None)
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = key, propose(state, self._settings.rules)
        return self._remembered[1]

    def _wants_change(self) -> bool:
        """A serving plan is changed if it can't stay, or if it is worth it."""
        current = self._state.book.current
        if current is None:
            return False
        found = self._wanted()
        if isinstance(found, Shortage):
            return False
        now = [(s.incarnation, s.layers) for s in current.stages]
        if list(found.shares) == now:
            return False
        if found.now_s is None:
            return True
        newcomers = {incarnation for incarnation, _ in found.shares} - current.members
        if newcomers and found.forecast.takes_turns and current.members <= {i for i, _ in found.shares}:
            return True
        return found.now_s > found.forecast.step_s * (1 + self._settings.rules.margin)

    def _take_paces(self, now: float) -> None:
        """Believe what is measured, where it differs much from what was predicted."""
        if now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        current = self._state.book.current
        for stage in current.stages if current is not None else ():
            worker, gauge = self._state.workers[stage.incarnation], self._state.book.gauge.stages.get(stage.name)
            pace = None if gauge is None else gauge.pace
            if pace is not None and not 1 - PACE_DIFFERS < pace / worker.pace < 1 + PACE_DIFFERS:
                worker.pace = min(PACE_MOST, max(PACE_LEAST, pace))
                self._note("worker_pace", worker=worker.name, pace=round(worker.pace, 3))

    def _start(self, now: float) -> None:
        book = self._state.book
        if self._still_gathers(now):
            return
        found = self._wanted()
        if isinstance(found, Shortage):
            self._wait_for(found)
            return
        book.epoch += 1
        book.coming = self._make_plan(found, book.epoch)
        book.phase = PlanPhase.PREPARING
        book.prepared = {}
        book.awaited = set()
        book.waits_for = "the workers to load their layers"
        self._out.append(WriteEpoch(book.epoch))

    def _still_gathers(self, now: float) -> bool:
        """A swarm that starts with several workers makes its first plan with all of them."""
        joined = [w.joined_at for w in self._state.workers.values() if w.state is WorkerState.MEMBER]
        wanted = self._settings.min_workers
        if self._state.book.epoch or len(joined) >= wanted or (joined and now - min(joined) > self._settings.gather_s):
            return False
        self._state.book.waits_for = f"{wanted - len(joined)} more of {wanted} workers"
        return True

    def _wait_for(self, shortage: Shortage) -> None:
        book = self._state.book
        if book.waits_for != shortage.text:
            self._note("swarm_waits", "warning", waits_for=shortage.text)
        book.waits_for = shortage.text
        if book.current is None:
            book.phase = PlanPhase.NONE

    def _make_plan(self, proposal: Proposal, epoch: int) -> Plan:
        manifest = self._state.manifest
        assert manifest is not None
        stages, specs = [], []
        for incarnation, layers in proposal.shares:
            hello = self._state.workers[incarnation].hello
            weight = weight_bytes(manifest, layers)
            stages.append(StagePlan(incarnation, hello.name, layers, hello.endpoint, weight, hello.host, hello.device))
            specs.append(planned_stage(manifest, layers, hello.device))
        check_stages(
            specs, manifest, "auto", len(proposal.shares)
        )  # a plan that breaks a rule is a bug, and goes nowhere
        why = tuple(
            f"{s.name} holds layers {s.layers}: {len(s.layers)} of {stages[-1].layers.stop}, "
            f"{s.weight_bytes / 2**20:.1f} MiB of its {self._memory(s) / 2**20:.0f} MiB"
            for s in stages
        )
        why += sentences(proposal.forecast)
        plan = Plan(epoch, tuple(stages), proposal.forecast.objective, why, proposal.forecast)
        if len(stages) > 1 and plan.shares_cores:
            together = f"all stages share the cores of {stages[0].host}: in mode auto one step is in flight at a time, "
            plan = replace(plan, why=(*why, together + "and each stage uses all of them in turn"))
        return plan

    def _memory(self, stage: StagePlan) -> int:
        return self._state.workers[stage.incarnation].hello.memory_bytes

    def _edge_after(self, plan: Plan, index: int) -> Edge:
        if index + 1 < len(plan.stages):
            after = plan.stages[index + 1]
            return Edge(after.incarnation, after.endpoint)
        return Edge("broker", self._data_endpoint)

    # --- cutting over ------------------------------------------------------------------------------------------------

    def _activate(self, now: float) -> None:
        """Everybody is ready: raise the fence, say what stays, and wait for what is really there."""
        book = self._state.book
        plan = book.coming
        assert plan is not None
        book.current, book.coming = plan, None
        book.phase = PlanPhase.ACTIVATING
        book.capacity = dict(book.prepared)
        book.awaited = set(plan.members)
        book.deadline = now + self._settings.activate_timeout_s
        self.rebuilder.clear()
        self._state.empty_stages()
        live = tuple(SequencePosition(s.id, s.kv) for s in keep_what_fits(self._state))
        self._fence_all(plan.epoch)
        for stage in plan.stages:
            self._order(stage.incarnation, Activate(epoch=plan.epoch, first_step=self._state.next_step, live=live))
        self._out.append(OpenPipe(plan.epoch, plan.stages[0].endpoint))

    def _serve(self, now: float) -> None:
        book = self._state.book
        assert book.current is not None
        book.phase = PlanPhase.SERVING
        book.waits_for = ""
        book.gauge.begin(self._gauges(book.current))
        for stage in book.current.stages:
            self._state.workers[stage.incarnation].planned = stage.layers
        self._state.count("plans")
        stages = [f"{s.name} {s.layers}" for s in book.current.stages]
        capacity = book.kv_blocks * 32
        for worker in self._state.workers.values():
            if not worker.is_gone and worker.incarnation not in book.current.members:
                self._out.append(OrderWorker(worker.peer, Dismiss(epoch=book.written)))
        self._note("plan_serving", epoch=book.current.epoch, stages=stages, kv_capacity=capacity)
        self.rebuilder.begin(now)
        self._release_the_leaving(now)

    def _gauges(self, plan: Plan) -> Iterable[StageGauge]:
        manifest, mode = self._state.manifest, self._settings.rules.mode
        assert manifest is not None
        alone = mode == "batch" or (mode == "auto" and plan.shares_cores) or len(plan.stages) == 1
        weights = Model.of(manifest).layer_weights
        for stage in plan.stages:
            layers = stage.layers
            yield StageGauge(
                worker=stage.name,
                speeds=Speeds.of(self._state.workers[stage.incarnation].hello.costs, alone=alone),
                weight=sum(weights[layers.first : layers.stop]),
                has_embedding=layers.first == 0,
                has_head=layers.stop == manifest.num_layers,
            )

    # --- undoing -----------------------------------------------------------------------------------------------------

    def release(self, worker: Worker, reason: str, now: float) -> None:
        """Let a worker go in good order."""
        self._order(worker.incarnation, Release(epoch=self._state.book.written, reason=reason))
        worker.state = WorkerState.LEFT
        worker.called_at = now
        worker.reason = reason
        self._note("worker_released", worker=worker.name, reason=reason)

    def _release_the_leaving(self, now: float) -> None:
        current = self._state.book.current
        for worker in self._state.workers.values():
            if worker.state is WorkerState.LEAVING and (current is None or worker.incarnation not in current.members):
                self.release(worker, "it was asked to leave, and no plan needs it", now)

    def _abandon(self) -> None:
        """The plan under way is void; the one in force, if whole, stays."""
        book = self._state.book
        book.coming = None
        book.awaited = set()
        if book.phase is PlanPhase.PREPARING:
            book.phase = PlanPhase.SERVING if book.current is not None else PlanPhase.NONE
            book.waits_for = "" if book.current is not None else "a new plan"

    def _stop_serving(self) -> None:
        """Nothing is dispatched any more, and what is in the pipe no longer counts."""
        book = self._state.book
        book.current = book.coming = None
        book.phase = PlanPhase.NONE
        book.awaited = set()
        book.waits_for = "a new plan"
        self.rebuilder.clear()
        self._state.empty_stages()
        self._out.append(ClosePipe())
        for sequence in self._state.running:
            sequence.cut_to(sequence.kv)

    def _blame_sequences(self) -> None:
        """Whoever was in the pipe was present at the death; the core ends those present too often."""
        in_steps = {s for flight in self._state.flights.values() for s, _ in flight.sequences}
        for sequence in in_steps | set(self.rebuilder.under_way):
            sequence.num_deaths += 1
            self._state.count("sequences_at_deaths")

    def _blame_the_late(self, now: float) -> None:
        book = self._state.book
        late = [w for w in self._state.workers.values() if w.incarnation in book.awaited]
        what = "prepare" if book.phase is PlanPhase.PREPARING else "activate"
        for worker in late:
            worker.state = WorkerState.OUT
            worker.reason = f"did not {what} epoch {book.epoch} in time"
            self._note("worker_out", "warning", worker=worker.name, evidence=worker.reason)
        for worker in late:
            self.lost(worker, now, blame=False)

    # --- small things ------------------------------------------------------------------------------------------------

    def _is_awaited(self, incarnation: str, epoch: int) -> bool:
        plan = self._state.book.coming or self._state.book.current
        return plan is not None and plan.epoch == epoch and incarnation in self._state.book.awaited

    def _fence_all(self, epoch: int) -> None:
        for worker in self._state.workers.values():
            if not worker.is_gone:
                self._out.append(OrderWorker(worker.peer, Fence(epoch=epoch)))

    def _order(self, incarnation: str, message: Order) -> None:
        self._out.append(OrderWorker(self._state.workers[incarnation].peer, message))

    def _note(self, event: str, level: str = "info", **fields: object) -> None:
        self._out.append(Note(event, level, fields))

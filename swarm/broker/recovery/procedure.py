"""Reconfiguration: one procedure for a first plan, a join, a leave and a loss.

::

    wanted ── WriteEpoch ──► PREPARING ── all Prepared ──► ACTIVATING ── all Activated ──► SERVING
       ▲                        │                              │                              │
       └──── a member lost, a refusal, a deadline: the same again, with a higher epoch ───────┘

* The epoch is journalled before any worker receives it.
* While layers load (PREPARING) an old plan that is whole runs on. If it has lost a member, a fence comes first.
* ``Activate`` lists the sequences that stay, with the positions that count; the stages drop everything else. Their
  answers report what they really hold. A sequence resumes from the position that *every* layer holds; the rest is
  computed again from its tokens, which the broker has.
* An active plan is changed when it must be (a member leaves), when a new worker on the same machine is to get its part,
  and when another plan is quicker by more than the margin. Among equally good plans, ``planner`` takes the one that
  moves least.
* An unanswered order is resent every second: it, or the answer, may have been lost. Workers answer an order again that
  they have already carried out.
* A worker that doesn't answer by the deadline is out, and the plan is made again without it. While it reports progress
  of its load, the deadline moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.actions import ClosePipe, OpenPipe, OrderWorker, Outbox, TryDoor, WriteEpoch
from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.proposals import Wanted, draft
from swarm.broker.drafts.rules import PlanRules
from swarm.broker.planner.problem import Shortage
from swarm.broker.recovery.detours import Detours
from swarm.broker.recovery.orders import OWN_NAME, Neighbour, Orders, Standby
from swarm.broker.recovery.rebuild import Rebuilder, RebuildSettings, keep_what_fits
from swarm.broker.recovery.restart import Gathering, Restart
from swarm.broker.recovery.speeds import Paces, gauges
from swarm.broker.state import Plan, PlanPhase, State, Worker, WorkerState
from swarm.broker.state.recoveries import Predicted, Recovery
from swarm.broker.state.workers import BROKER, failed_in_words
from swarm.wire.messages import BLOCK, Activated, Dismiss, Kept, LoadProgress, Prepared, Refused


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of plans and of the procedure that changes them."""

    rules: PlanRules = field(default_factory=PlanRules)
    min_workers: int = 0  # workers for which the first plan waits
    gather_s: float = 30.0  # how long the first plan waits for ``min_workers`` once one has joined
    settle_s: float = 0.5  # after a change of members, time without another change before a plan is made
    prepare_timeout_s: float = 600.0  # without progress of the load
    activate_timeout_s: float = 5.0
    max_sequences: int = 64  # sequences that stages may hold at a time
    rebuild: RebuildSettings = field(default_factory=RebuildSettings)


class Procedure:
    """State machine that replaces one plan by the next. Owns ``state.plans``; appends actions to ``out``."""

    def __init__(
        self, state: State, settings: PlanSettings, data_endpoint: str, out: Outbox, key: str | None = None
    ) -> None:
        self._state = state
        self._settings = settings
        self._neighbour = Neighbour(data_endpoint, key)
        self._out = out
        self.rebuilder = Rebuilder(state, settings.rebuild, out)
        self.standby = Standby(state, out)
        self.restart = Restart(state, settings.min_workers)
        self.wanted = Wanted(state, settings.rules)
        self._paces = Paces(state)
        self._detours = Detours(state, out)
        self._orders = Orders(state, out)
        self._gathering = Gathering(state, self.restart, settings.min_workers, settings.gather_s)

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Make a plan if one is wanted, and resend orders that were not answered."""
        book = self._state.book
        if self.wanted.look_at_demand(now):
            self._out.note("demand_changed", is_quiet=self.wanted.demand.is_quiet)
        for worker in self._state.workers.values():
            if worker.refusals and now >= worker.retry_at:
                worker.forget_refusals()
        if book.awaited:
            self._orders.tick(now)
        if book.phase in (PlanPhase.PREPARING, PlanPhase.ACTIVATING):
            return
        self._release_the_leaving(now)
        for worker in self._paces.take(now, self.wanted.rules.cooldown_s):
            self._out.note("worker_pace", worker=worker.name, pace=round(worker.pace, 3))
        if book.phase is PlanPhase.SERVING and not self.wanted.is_change:
            self._state.steer(self._state.steering.calm())
            if self._state.rebuilding.is_idle:
                found = self.wanted.now()
                self.standby.ask(None if isinstance(found, Shortage) else found)
            if (direct := self._detours.due(now)) is not None:
                self._prepare(direct)
            return
        if now - book.changed_at >= self._settings.settle_s:
            self._start(now)

    def changed(self, now: float) -> None:
        """Handle a change of members: plan once the set has been stable for a moment. Plan immediately when all awaited
        workers are there, at the first start or after a restart of the broker."""
        self._state.book.changed_at = now
        if self._gathering.is_complete:
            self._start(now)

    def ruled(self, rules: PlanRules, now: float) -> None:
        """Apply changed settings for plans. The active plan is replaced if it is no longer allowed, or if another one
        is worth it by these rules. If they allow no plan, it stays until a member is lost, and a warning is logged."""
        self.wanted.rule(rules)
        found = self.wanted.now()
        if self._state.book.current is not None and isinstance(found, Shortage):
            self._out.note("plan_rules_unmet", "warning", waits_for=found.text)
        self.changed(now)

    def lost(self, worker: Worker, now: float, *, blame: bool) -> None:
        """Handle a worker that is out. A plan that contains it is void. ``blame``: sequences in its steps may be the
        cause."""
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
            self._start(now)  # no request is served until there is a plan
        else:
            self.changed(now)

    def late(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that missed the deadline, with the evidence: to be put out, and reported as ``lost``."""
        book = self._state.book
        if now < book.deadline:
            return []
        what = "prepare" if book.phase is PlanPhase.PREPARING else "activate"
        evidence = f"did not {what} epoch {book.epoch} in time"
        return [(w, evidence) for w in self._state.workers.values() if w.incarnation in book.awaited]

    def leaving(self, worker: Worker, now: float) -> None:
        """Handle a worker that wants to leave. A plan in preparation that contains it is not worth finishing."""
        if self._state.book.coming is not None and worker.incarnation in self._state.book.coming.members:
            self._abandon()
        self.changed(now)

    def trouble(self, now: float, *, blame: bool, cause: str = "the data path broke") -> None:
        """Handle a break of the data path while all members live: the same workers, a new epoch."""
        if self._state.book.serving:
            self._state.recoveries.begin(cause, now)
            if blame:
                self._blame_sequences()
            self._stop_serving()
            self._start(now)

    @property
    def awaits_steps(self) -> bool:
        """Whether steps or replays are in flight."""
        return bool(self._state.flights) or self._state.rebuilding.under_way != []

    def epoch_written(self, epoch: int, now: float) -> None:
        book = self._state.book
        book.written = max(book.written, epoch)
        if book.coming is None or book.coming.epoch != epoch:
            return
        if book.current is None:
            self._orders.fence(epoch)
        book.load(book.coming, now + self._settings.prepare_timeout_s)
        self._orders.prepare(book.coming, self._neighbour, self._settings.max_sequences, now)
        if not book.coming.stages[0].relay:
            self._out.append(TryDoor(epoch, book.coming.stages[0].endpoint))

    def loads(self, worker: Worker, message: LoadProgress | Kept, now: float) -> None:
        """Handle a worker's report on the progress of a load."""
        if isinstance(message, Kept):
            self.standby.told(worker, message)
        else:
            self._load_progressed(worker, message, now)

    def _load_progressed(self, worker: Worker, message: LoadProgress, now: float) -> None:
        """Extend the deadline while bytes arrive, however long the load takes: weights may come over a slow network."""
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
        worker = self._state.workers[message.incarnation]
        worker.comply()
        stage = book.coming.stage_of(message.incarnation) if book.coming is not None else None
        if stage is not None and book.current is None:  # while steps run, workers load more slowly than they can
            self.standby.loaded(worker, stage.load_bytes, message.load_s + message.warm_up_s)
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
        if message.cant_reach == OWN_NAME or message.cant_reach in self._state.workers:
            target = BROKER if message.cant_reach == OWN_NAME else message.cant_reach
            self._detours.found_shut(worker.incarnation, target, message.reason[:500], now)
        else:
            worker.refuse(stage.layers, message.reason[:500], now)
        self._out.note("plan_refused", "error", worker=worker.name, reason=message.reason)
        self._abandon()
        if self._state.book.current is None:
            self._start(now)
        else:
            self.changed(now)

    def tried(self, epoch: int, problem: str, now: float) -> None:
        """Handle the broker's test of the route to the first stage. If it failed, another order of stages is needed."""
        book = self._state.book
        plan = next((p for p in (book.coming, book.current) if p is not None and p.epoch == epoch), None)
        if plan is None:
            return
        if plan.stages[0].relay:
            if (direct := self._detours.tried(plan, problem)) is not None:
                self._prepare(direct)
            return
        if not problem:
            return
        self._detours.found_shut(BROKER, plan.stages[0].incarnation, problem[:500], now)
        if plan is book.current:
            self.trouble(now, blame=False)
        else:
            self._abandon()
            if book.current is None:
                self._start(now)
            else:
                self.changed(now)

    def activated(self, message: Activated, now: float) -> None:
        book = self._state.book
        if book.phase is not PlanPhase.ACTIVATING or not self._is_awaited(message.incarnation, message.epoch):
            self._state.count("stale_control")
            return
        book.awaited.discard(message.incarnation)
        worker = self._state.workers[message.incarnation]
        worker.hold(message.kept, None)
        self._state.rebuilding.said[message.incarnation] = message
        if not book.awaited:
            self._serve(now)

    def look_again(self, now: float) -> None:
        """Update the reason why the swarm waits, for a report about to be sent."""
        if self._state.book.phase is not PlanPhase.NONE or self._gathering.goes_on(now):
            return
        found = self.wanted.now()
        if isinstance(found, Shortage):
            self._wait_for(found)
        else:
            self._state.book.waits_for = "a quiet moment: workers have just joined or left"

    # --- making a plan ---------------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        book = self._state.book
        if self._gathering.goes_on(now):
            return
        book.find(self.restart.end())  # after a restart of the broker, the plan that its workers still hold
        found = self.wanted.way_back(book.fallen, self._settings.rebuild.chunk) or self.wanted.now()
        if isinstance(found, Shortage):
            self._wait_for(found)
            return
        self._prepare(draft(self._state, found, book.epoch + 1))
        if book.current is None:
            self._note_way_back(found, now)

    def _prepare(self, plan: Plan) -> None:
        """Have this plan, of the next epoch, prepared as soon as the journal has the epoch."""
        book = self._state.book
        book.epoch = plan.epoch
        book.prepare(plan)
        book.waits_for = f"the journal to write epoch {book.epoch}"
        if self._state.journal_problem:
            book.waits_for += f", which it can't: {self._state.journal_problem}"
        self._out.append(self.as_written())

    def as_written(self) -> WriteEpoch:
        """Return the record that the next broker needs, to be journalled."""
        book = self._state.book
        unended = (*self._state.running, *self._state.waiting)
        blames = tuple((sequence.id, sequence.num_deaths) for sequence in unended if sequence.num_deaths)
        return WriteEpoch(book.epoch, self.restart.holders, self._state.manifest, blames)

    def _note_way_back(self, found: Proposal, now: float) -> None:
        """Record for the report on the recovery which way was chosen, and its predicted time."""
        back = found.back
        choice = "a plan from scratch" if back is None else back.choice
        predicted = None if back is None else Predicted(back.load_s, back.replay_s, back.is_warm)
        self._state.recoveries.planned(self._state.book.epoch, choice, predicted, now)

    def _wait_for(self, shortage: Shortage) -> None:
        book = self._state.book
        text = "; ".join([shortage.text, *failed_in_words(self._state.workers.values())])
        if book.waits_for != text:
            self._out.note("swarm_waits", "warning", waits_for=text)
        book.waits_for = text
        if book.current is None:
            book.phase = PlanPhase.NONE
            self._state.ways.hurry(self._state.now)

    # --- cutting over ------------------------------------------------------------------------------------------------

    def _activate(self, now: float) -> None:
        """Fence all workers, order the stages to activate, and wait for their reports of what they hold."""
        book = self._state.book
        plan = book.activate(now + self._settings.activate_timeout_s)
        self._state.ways.end_trials(are_open=True)
        self._state.rebuilding.clear()
        self.standby.forget()
        self._state.recoveries.prepared(now)
        self._state.empty_stages()
        kept = keep_what_fits(self._state)
        self._orders.fence(plan.epoch)
        self._orders.activate(plan, kept, now)
        self._out.append(OpenPipe(plan.epoch, plan.stages[0].endpoint))

    def _serve(self, now: float) -> None:
        book = self._state.book
        plan = book.serve()
        book.gauge.begin(gauges(self._state, self.wanted.rules.mode, plan))
        for stage in plan.stages:
            self._state.workers[stage.incarnation].planned = stage.layers
        self._state.count("plans")
        stages = [f"{s.name} {s.layers}" for s in plan.stages]
        capacity = book.kv_blocks * BLOCK
        for worker in self._state.workers.values():
            if not worker.is_gone and worker.incarnation not in plan.members:
                self._out.append(OrderWorker(worker.peer, Dismiss(epoch=book.written)))
        self._out.note("plan_serving", epoch=plan.epoch, stages=stages, kv_capacity=capacity)
        if recovery := self._state.recoveries.activated(len(self._state.running), now):
            self.recovered(recovery)
        self.rebuilder.begin(now)
        self._release_the_leaving(now)

    def recovered(self, recovery: Recovery) -> None:
        """Log the end of a recovery: the predicted times and the measured ones."""
        told = recovery.as_json()
        names = ("epoch", "cause", "evidence", "choice", "predicted", "measured", "sequences", "layer_positions")
        self._out.note("recovered", "info", **{name: told[name] for name in names})

    # --- releasing and abandoning ------------------------------------------------------------------------------------

    def release(self, worker: Worker, reason: str, now: float) -> None:
        """Release a worker gracefully."""
        worker.leave(reason)
        self._orders.tell(worker.incarnation, worker.told_to_go(self._state.book.written))
        worker.be_called(now)
        self._out.note("worker_released", worker=worker.name, reason=reason)

    def _release_the_leaving(self, now: float) -> None:
        current = self._state.book.current
        for worker in self._state.workers.values():
            if worker.state is WorkerState.LEAVING and (current is None or worker.incarnation not in current.members):
                self.release(worker, "it was asked to leave, and no plan needs it", now)

    def _abandon(self) -> None:
        """Drop the plan in preparation; the active one, if whole, stays."""
        self.standby.forget()
        self._state.ways.end_trials(are_open=False)
        self._state.book.abandon()

    def _stop_serving(self) -> None:
        """Stop dispatching, and discard all steps in flight."""
        self._state.book.fall()
        self._state.rebuilding.clear()
        self._state.empty_stages()
        self._out.append(ClosePipe())
        for sequence in self._state.running:
            sequence.cut_to(sequence.kv)

    def _blame_sequences(self) -> None:
        """Count this death for every sequence in flight; ``members`` ends sequences with too many."""
        in_steps = {s for flight in self._state.flights.values() for s, _ in flight.sequences}
        for sequence in in_steps | set(self._state.rebuilding.under_way):
            sequence.be_present_at_death()
            self._state.count("sequences_at_deaths")

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _is_awaited(self, incarnation: str, epoch: int) -> bool:
        plan = self._state.book.coming or self._state.book.current
        return plan is not None and plan.epoch == epoch and incarnation in self._state.book.awaited

"""Reconfiguration: one procedure for a first plan, a join, a leave and a loss.

::

    wanted ── WriteEpoch ──► PREPARING ── all Prepared ──► COPYING ──► ACTIVATING ── all Activated ──► SERVING
       ▲                        │                             │             │                             │
       └────────── a member lost, a refusal, a deadline: the same again, with a higher epoch ─────────────┘

* The epoch is journalled before any worker receives it.
* While layers load (PREPARING), an old plan that has lost no member continues, and the keys and values of moved layers
  are copied (``migration``). Only in COPYING, for the last of them, it pauses. Without such a plan, a fence is sent
  first, and there is no COPYING.
* ``Activate`` lists the sequences that stay, with the positions that count; the stages drop everything else. Their
  answers report what they really hold. A sequence resumes from the position that *every* layer holds; the rest is
  computed again from its tokens, which the broker has.
* An active plan is changed when it must be (a member leaves), when a new worker on the same machine is to get its part,
  and when another plan is quicker by more than the margin. Among equally good plans, ``planner`` takes the plan
  that loads the fewest bytes.
* An unanswered order is resent every second: it, or the answer, may have been lost. Workers answer an order again that
  they have already carried out.
* A worker that doesn't answer by the deadline is out, and the plan is made again without it. While it reports progress
  of its load, the deadline moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.actions import DisconnectPipeline, Outbox, ProbeRoute, WriteEpoch
from swarm.broker.planner.problem import Shortage
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.growth import describe_cause
from swarm.broker.planning.proposals import TargetPlan, draft
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.activation import Activation, log_recovery
from swarm.broker.recovery.kv_copies import KvCopies
from swarm.broker.recovery.migration import Migration
from swarm.broker.recovery.rebuild import Rebuilder, RebuildSettings
from swarm.broker.recovery.restart import Restart, StartupWait
from swarm.broker.recovery.route_retries import RouteRetries
from swarm.broker.recovery.speeds import SpeedTracker
from swarm.broker.recovery.worker_orders import BROKER_NAME, BrokerPeer, StandbyOrders, WorkerOrders
from swarm.broker.state import Plan, PlanPhase, State, Worker
from swarm.broker.state.recoveries import PredictedRecovery, Recovery
from swarm.broker.state.workers import BROKER, describe_failed
from swarm.broker.steps.restoring import Restorer
from swarm.wire.messages import Activated, KeptWarm, KvHeld, LoadProgress, Prepared, Refused


@dataclass(frozen=True, slots=True)
class ReconfigurationSettings:
    """Settings of plans and of the procedure that changes them."""

    rules: PlanRules = field(default_factory=PlanRules)
    min_workers: int = 0  # workers for which the first plan waits
    gather_s: float = 30.0  # how long the first plan waits for ``min_workers`` once one has joined
    settle_s: float = 0.5  # after a change of members, time without another change before a plan is made
    prepare_timeout_s: float = 600.0  # without progress of the load
    activate_timeout_s: float = 5.0
    max_sequences: int = 64  # sequences that stages may hold at a time
    rebuild: RebuildSettings = field(default_factory=RebuildSettings)


class Reconfiguration:
    """State machine that replaces one plan by the next. Owns ``state.plans``; appends actions to ``out``."""

    def __init__(
        self, state: State, settings: ReconfigurationSettings, data_endpoint: str, out: Outbox, key: str | None = None
    ) -> None:
        self._state = state
        self._settings = settings
        self._peer = BrokerPeer(data_endpoint, key)
        self._out = out
        self.rebuilder = Rebuilder(state, settings.rebuild, out)
        self.standby = StandbyOrders(state, out)
        self.copies = KvCopies(state, out)
        self.restart = Restart(state, settings.min_workers)
        self.target = TargetPlan(state, settings.rules)
        self._speed_tracker = SpeedTracker(state)
        self._route_retries = RouteRetries(state, out)
        self._orders = WorkerOrders(state, out)
        self._migration = Migration(state, out)
        self.restorer = Restorer(state, out)
        self._activation = Activation(
            state,
            out,
            self._orders,
            self.rebuilder,
            self.standby,
            self.copies,
            self.restorer,
            settings.activate_timeout_s,
        )
        self._startup_wait = StartupWait(state, self.restart, settings.min_workers, settings.gather_s)

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Make a plan if one is wanted, and resend orders that were not answered."""
        plans = self._state.plans
        if self.target.update_demand(now):
            self._out.note("demand_changed", is_quiet=self.target.demand.is_quiet)
        for worker in self._state.workers.values():
            if worker.refusals and now >= worker.retry_at:
                worker.forget_refusals()
        if plans.awaited:
            self._orders.tick(now)
        if plans.phase in (PlanPhase.PREPARING, PlanPhase.COPYING):
            self._migration.tick(now)
        if plans.phase is PlanPhase.PREPARING and plans.current is not None:  # the load may take long
            self.copies.refresh(self.target.rules.standby_kv, now, self._migration.order)
        if plans.phase not in (PlanPhase.NONE, PlanPhase.SERVING):
            return
        self._orders.release_leaving(now)
        for worker in self._speed_tracker.update(now, self.target.rules.cooldown_s):
            self._out.note("worker_pace", worker=worker.name, pace=round(worker.pace, 3))
        if plans.phase is PlanPhase.SERVING and not self.target.should_change:
            self._state.set_constraints(self._state.constraints.clear_margin())
            if self._state.rebuilding.is_idle:
                proposal = self.target.propose()
                self.standby.order(None if isinstance(proposal, Shortage) else proposal)
            self.copies.refresh(self.target.rules.standby_kv, now, self._migration.order)
            if (direct := self._route_retries.next_retry(now)) is not None:
                self._prepare(direct)
            return
        if now - plans.members_changed_at >= self._settings.settle_s:
            self._start_plan(now)

    def advance(self, now: float) -> None:
        """Continue a change of plan that waits for copies, or for the steps in flight to end. Called after every
        event."""
        plans = self._state.plans
        if plans.phase is PlanPhase.PREPARING and plans.is_loaded:
            if plans.current is None:
                self._activation.start(now)
            elif self._migration.is_near(now):
                self._migration.stop(now)
                self._state.moves.record_stopped(now)
        if plans.phase is PlanPhase.COPYING and self._migration.finish(now):
            self._activation.start(now)

    def on_members_changed(self, now: float) -> None:
        """Handle a change of members: plan once the set has been stable for a moment. Plan immediately when all awaited
        workers are there, at the first start or after a restart of the broker."""
        self._state.plans.members_changed_at = now
        if self._startup_wait.is_complete:
            self._start_plan(now)

    def on_rules_changed(self, rules: PlanRules, now: float) -> None:
        """Apply changed settings for plans. The active plan is replaced if it is no longer allowed, or if another one
        is worth it by these rules. If they allow no plan, it stays until a member is lost, and a warning is logged."""
        self.target.set_rules(rules)
        proposal = self.target.propose()
        if self._state.plans.current is not None and isinstance(proposal, Shortage):
            self._out.note("plan_rules_unmet", "warning", waits_for=proposal.text)
        self.on_members_changed(now)

    def on_worker_lost(self, worker: Worker, now: float, *, blame: bool) -> None:
        """Handle a worker that is out. A plan that contains it is void. ``blame``: sequences in its steps may be the
        cause."""
        plans = self._state.plans
        self.copies.on_worker_lost(worker)
        was_under_way = plans.upcoming is not None and worker.incarnation in plans.upcoming.members
        if was_under_way:
            self._abandon_plan()
        if plans.current is not None and worker.incarnation in plans.current.members:
            if blame:
                self._count_deaths()
            self._stop_serving()
            self._start_plan(now)
        elif was_under_way and plans.current is None:
            self._start_plan(now)  # no request is served until there is a plan
        else:
            self.on_members_changed(now)

    def overdue_workers(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that missed the deadline, which must be put out, with the evidence."""
        plans = self._state.plans
        if now < plans.deadline:
            return []
        what = "prepare" if plans.phase is PlanPhase.PREPARING else "activate"
        evidence = f"did not {what} epoch {plans.epoch} in time"
        return [(w, evidence) for w in self._state.workers.values() if w.incarnation in plans.awaited]

    def on_worker_leaving(self, worker: Worker, now: float) -> None:
        """Handle a worker that wants to leave. A plan in preparation that contains it is not worth finishing."""
        if self._state.plans.upcoming is not None and worker.incarnation in self._state.plans.upcoming.members:
            self._abandon_plan()
        self.on_members_changed(now)

    def on_data_path_broken(self, now: float, *, blame: bool, cause: str = "the data path broke") -> None:
        """Handle a break of the data path while all members live: the same workers, a new epoch."""
        if self._state.plans.is_whole or self._state.plans.phase is PlanPhase.ACTIVATING:
            self._state.recoveries.begin(cause, now)
            if blame:
                self._count_deaths()
            self._stop_serving()
            self._start_plan(now)

    def on_epoch_written(self, epoch: int, now: float) -> None:
        plans = self._state.plans
        plans.journaled_epoch = max(plans.journaled_epoch, epoch)
        if plans.upcoming is None or plans.upcoming.epoch != epoch:
            return
        if plans.current is None:
            self._orders.fence(epoch)
        plans.await_loading(plans.upcoming, now + self._settings.prepare_timeout_s)
        self._orders.prepare(plans.upcoming, self._peer, self._settings.max_sequences, now)
        if not plans.upcoming.stages[0].relay:
            self._out.append(ProbeRoute(epoch, plans.upcoming.stages[0].endpoint))
        if plans.current is not None:
            self._migration.begin(plans.upcoming, now)

    def on_load_progress(self, worker: Worker, message: LoadProgress | KeptWarm, now: float) -> None:
        """Handle a worker's report on the progress of a load."""
        if isinstance(message, KeptWarm):
            self.standby.on_report(worker, message)
        else:
            self._extend_deadline(worker, message, now)

    def _extend_deadline(self, worker: Worker, message: LoadProgress, now: float) -> None:
        """Extend the deadline while bytes arrive, however long the load takes: weights may come over a slow network."""
        plans = self._state.plans
        moved = message.loaded_bytes != worker.loaded_bytes
        worker.loaded_bytes, worker.total_bytes = message.loaded_bytes, message.total_bytes
        if moved and plans.phase is PlanPhase.PREPARING and plans.is_awaited(worker.incarnation, message.epoch):
            plans.deadline = now + self._settings.prepare_timeout_s

    def on_prepared(self, message: Prepared, now: float) -> None:
        plans = self._state.plans
        if plans.phase is not PlanPhase.PREPARING or not plans.is_awaited(message.incarnation, message.epoch):
            self._state.count("stale_control")
            return
        worker = self._state.workers[message.incarnation]
        worker.record_acceptance()
        worker.record_bits(message.bits)
        stage = plans.upcoming.stage_of(message.incarnation) if plans.upcoming is not None else None
        if stage is not None:
            is_alone = plans.current is None
            self.standby.record_load(worker, stage.load_bytes, message.load_s + message.warm_up_s, is_alone=is_alone)
        plans.prepared[message.incarnation] = message
        plans.awaited.discard(message.incarnation)
        self.copies.drop_unlike(worker, message.bits)
        if plans.current is not None:
            self._migration.on_prepared(message.incarnation)

    def on_kv_held(self, worker: Worker, message: KvHeld, now: float) -> None:
        """Handle a worker's report of the copies of keys and values that it holds."""
        if self.copies.on_held(worker, message):
            self._migration.on_held(worker, now)

    def on_refused(self, worker: Worker, message: Refused, now: float) -> None:
        coming = self._state.plans.upcoming
        stage = coming.stage_of(worker.incarnation) if coming is not None and message.epoch == coming.epoch else None
        if stage is None:
            self._state.count("stale_control")
            return
        if message.cant_reach == BROKER_NAME or message.cant_reach in self._state.workers:
            target = BROKER if message.cant_reach == BROKER_NAME else message.cant_reach
            self._route_retries.record_blocked(worker.incarnation, target, message.reason[:500], now)
        else:
            worker.record_refusal(stage.layers, message.reason[:500], now)
        self._out.note("plan_refused", "error", worker=worker.name, reason=message.reason)
        self._abandon_plan()
        if self._state.plans.current is None:
            self._start_plan(now)
        else:
            self.on_members_changed(now)

    def on_route_tested(self, epoch: int, problem: str, now: float) -> None:
        """Handle the broker's test of the route to the first stage. If it failed, another order of stages is needed."""
        plans = self._state.plans
        plan = next((p for p in (plans.upcoming, plans.current) if p is not None and p.epoch == epoch), None)
        if plan is None:
            return
        if plan.stages[0].relay:
            if (direct := self._route_retries.on_route_tested(plan, problem)) is not None:
                self._prepare(direct)
            return
        if not problem:
            return
        self._route_retries.record_blocked(BROKER, plan.stages[0].incarnation, problem[:500], now)
        if plan is plans.current:
            self.on_data_path_broken(now, blame=False)
        else:
            self._abandon_plan()
            if plans.current is None:
                self._start_plan(now)
            else:
                self.on_members_changed(now)

    def on_activated(self, message: Activated, now: float) -> None:
        self._activation.on_activated(message, self.target.rules, now)

    def refresh_wait_reason(self, now: float) -> None:
        """Update the reason why the swarm waits, for a report about to be sent."""
        if self._state.plans.phase is not PlanPhase.NONE or self._startup_wait.keep_waiting(now):
            return
        proposal = self.target.propose()
        if isinstance(proposal, Shortage):
            self._wait_for(proposal)
        else:
            self._state.plans.waits_for = "a quiet moment: workers have just joined or left"

    # --- making a plan ---------------------------------------------------------------------------------------------

    def _start_plan(self, now: float) -> None:
        plans = self._state.plans
        if self._startup_wait.keep_waiting(now):
            return
        # after a restart of the broker, the plan that its workers still hold
        plans.restore_failed(self.restart.finish())
        proposal = self.target.propose_recovery(plans.failed, self._settings.rebuild.chunk) or self.target.propose()
        if isinstance(proposal, Shortage):
            self._wait_for(proposal)
            return
        self._prepare(draft(self._state, proposal, plans.epoch + 1))
        if plans.current is None:
            self._record_recovery(proposal, now)
        else:
            cause, since = describe_cause(self._state, plans.current, proposal, self.target.rules.cooldown_s)
            self._state.moves.begin(cause, self.target.predict_move(proposal), since, plans.epoch)

    def _prepare(self, plan: Plan) -> None:
        """Have this plan, of the next epoch, prepared as soon as the journal has the epoch."""
        plans = self._state.plans
        plans.epoch = plan.epoch
        plans.prepare(plan)
        plans.waits_for = f"the journal to write epoch {plans.epoch}"
        if self._state.journal_problem:
            plans.waits_for += f", which it can't: {self._state.journal_problem}"
        self._out.append(self.make_epoch_record())

    def make_epoch_record(self) -> WriteEpoch:
        """Return the record that the next broker needs, to be journalled."""
        plans = self._state.plans
        unended = (*self._state.running, *self._state.waiting)
        blames = tuple((sequence.id, sequence.num_deaths) for sequence in unended if sequence.num_deaths)
        return WriteEpoch(plans.epoch, self.restart.holders, self._state.base_manifest, blames)

    def _record_recovery(self, proposal: Proposal, now: float) -> None:
        """Record for the report on the recovery which way was chosen, and its predicted time."""
        back = proposal.back
        choice = "a plan from scratch" if back is None else back.choice
        predicted = None if back is None else PredictedRecovery(back.load_s, back.replay_s, back.is_warm)
        self._state.recoveries.record_plan(self._state.plans.epoch, choice, predicted, now)

    def _wait_for(self, shortage: Shortage) -> None:
        plans = self._state.plans
        text = "; ".join([shortage.text, *describe_failed(self._state.workers.values())])
        if plans.waits_for != text:
            self._out.note("swarm_waits", "warning", waits_for=text)
        plans.waits_for = text
        if plans.current is None:
            plans.phase = PlanPhase.NONE
            self._state.routes.retry_soon(self._state.now)

    # --- releasing and abandoning ------------------------------------------------------------------------------------

    def release(self, worker: Worker, reason: str, now: float) -> None:
        """Release a worker gracefully."""
        self._orders.release(worker, reason, now)

    def log_recovery(self, recovery: Recovery) -> None:
        """Log the end of a recovery."""
        log_recovery(self._out, recovery)

    def _abandon_plan(self) -> None:
        """Drop the plan in preparation; the active one, if whole, stays."""
        self._migration.cancel()
        self._state.moves.give_up()
        self.standby.reset()
        self._state.routes.end_tests(are_open=False)
        self._state.plans.abandon()

    def _stop_serving(self) -> None:
        """Stop dispatching, and discard all steps in flight."""
        self._state.migration.end()
        self._state.moves.give_up()
        self._state.moves.end_plan()
        self._state.moves.lift_quiet(self._state.now + self.target.rules.cooldown_s)
        self._state.plans.fail()
        self._state.recoveries.drop_replays(*self._state.rebuilding.work_left())
        self._state.rebuilding.clear()
        self._state.clear_stages()
        self._out.append(DisconnectPipeline())
        for sequence in self._state.running:
            sequence.truncate_to(sequence.kv)

    def _count_deaths(self) -> None:
        """Count this death for every sequence in flight. ``members.integrity`` quarantines a sequence with too many."""
        in_steps = {s for flight in self._state.in_flight.values() for s, _ in flight.sequences}
        seen = {s for flight in self._state.in_flight.values() for s in flight.seen}
        in_steps |= {s for s in self._state.running if s.id in seen}
        for sequence in in_steps | set(self._state.rebuilding.in_progress):
            sequence.count_deaths()
            self._state.count("sequences_at_deaths")

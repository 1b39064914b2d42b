"""Activation of a prepared plan: the fence, the stages' reports of what they hold, and the start of serving."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import ConnectPipeline, Outbox
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.kept_sequences import evict_overflow
from swarm.broker.recovery.kv_copies import KvCopies
from swarm.broker.recovery.rebuild import Rebuilder, trust_copied
from swarm.broker.recovery.speeds import make_gauges
from swarm.broker.recovery.worker_orders import StandbyOrders, WorkerOrders
from swarm.broker.state import PlanPhase, State
from swarm.broker.state.recoveries import Recovery
from swarm.broker.steps.restoring import Restorer
from swarm.wire.messages import BLOCK, Activated


@dataclass(slots=True)
class Activation:
    """Replaces the active plan by the prepared one. Appends actions to ``out``."""

    state: State
    out: Outbox
    orders: WorkerOrders
    rebuilder: Rebuilder
    standby: StandbyOrders
    copies: KvCopies
    restorer: Restorer
    timeout_s: float  # until a stage must have reported what it holds

    def start(self, now: float) -> None:
        """Fence all workers, order the stages to activate, and wait for their reports of what they hold."""
        plan = self.state.plans.activate(now + self.timeout_s)
        self.state.routes.end_tests(are_open=True)
        self.state.rebuilding.clear()
        self.standby.reset()
        self.copies.reset()
        self.state.moves.end_plan()
        self.state.recoveries.record_prepared(now)
        self.state.clear_stages()
        sequences = evict_overflow(self.state)
        self.orders.fence(plan.epoch)
        self.orders.activate(plan, sequences, now)
        self.out.append(ConnectPipeline(plan.epoch, plan.stages[0].endpoint))

    def on_activated(self, message: Activated, rules: PlanRules, now: float) -> None:
        """Handle a stage's report of what it holds."""
        plans = self.state.plans
        if plans.phase is not PlanPhase.ACTIVATING or not plans.is_awaited(message.incarnation, message.epoch):
            self.state.count("stale_control")
            return
        plans.awaited.discard(message.incarnation)
        worker = self.state.workers[message.incarnation]
        worker.record_held(message.kept, None)
        message = trust_copied(message, self.state)
        self.state.rebuilding.reports[message.incarnation] = message
        self.copies.on_activated(worker, message)
        if not plans.awaited:
            self._serve(rules, now)

    def _serve(self, rules: PlanRules, now: float) -> None:
        plans = self.state.plans
        plan = plans.serve()
        plans.gauge.reset(make_gauges(self.state, rules.mode, plan))
        for stage in plan.stages:
            worker = self.state.workers[stage.incarnation]
            worker.planned_layers = stage.layers
        is_busy = bool(self.state.running or len(self.state.waiting))
        self.state.moves.record_serving(now, rules.cooldown_s if is_busy else 0.0)
        self.state.count("plans")
        stages = [f"{s.name} {s.layers}" for s in plan.stages]
        self.orders.unassign_others(plan)
        self.out.note("plan_serving", epoch=plan.epoch, stages=stages, kv_capacity=plans.kv_blocks * BLOCK)
        if recovery := self.state.recoveries.record_activated(len(self.state.running), now):
            log_recovery(self.out, recovery)
        self.copies.on_serving()
        self.restorer.on_serving()
        self.rebuilder.begin(now)
        self.orders.release_leaving(now)


def log_recovery(out: Outbox, recovery: Recovery) -> None:
    """Log the end of a recovery: the predicted times and the measured ones."""
    report = recovery.as_json()
    positions = ("layer_positions", "copied_layer_positions", "restored_layer_positions")
    names = ("epoch", "cause", "evidence", "choice", "predicted", "measured", "sequences", *positions)
    out.note("recovered", "info", **{name: report[name] for name in names})

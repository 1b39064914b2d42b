"""Blocked routes: recorded, and retried directly where the relay replaces them.

A firewall may be open by now, and the relay is a detour for every step. No request waits for a retry. A retry is made
while a plan serves and nothing is rebuilt. A worker tests the connection to another one when it prepares a plan, while
the active plan runs on: so the active plan is prepared once more, with that route direct. If the connection fails, the
prepared plan is abandoned, and the next retry is later (``state.workers``). The broker tests its own connection to the
first stage before it makes such a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import Outbox, ProbeRoute
from swarm.broker.planning.proposals import redraft
from swarm.broker.state import Plan, PlanPhase, State
from swarm.broker.state.workers import BROKER, RouteState


@dataclass(slots=True)
class RouteRetries:
    """Records blocked routes, and schedules retries (see the module)."""

    state: State
    out: Outbox

    def record_blocked(self, source: str, target: str, reason: str, now: float) -> None:
        """Record that this worker (or the broker) can't connect to that worker."""
        workers, ways = self.state.workers, self.state.routes
        ways.retain([incarnation for incarnation, worker in workers.items() if not worker.is_gone])
        route_state = ways.block(source, workers.get(target), reason, now)
        fields = {"source": self._name_of(source), "target": self._name_of(target), "reason": reason}
        if route_state is RouteState.RELAYED:
            self.out.note("way_relayed", "warning", **fields)
            self.state.count("ways_relayed")
        else:
            self.out.note("way_shut", "error", **fields)
            self.state.count("ways_shut")

    def next_retry(self, now: float) -> Plan | None:
        """Return the plan to prepare for a retry that is due; None if there is none, or the broker tests the route
        first."""
        plan = self.state.plans.current
        if plan is None or not self.state.rebuilding.is_idle:
            return None
        senders = (BROKER, *(stage.incarnation for stage in plan.stages))
        for sender, stage in zip(senders, plan.stages, strict=False):
            if not stage.relay or not self.state.routes.take_due(sender, stage.incarnation, now):
                continue
            if sender != BROKER:
                return self._plan_direct(plan, sender, stage.incarnation)
            self.out.append(ProbeRoute(plan.epoch, self.state.workers[stage.incarnation].hello.endpoint))
        return None

    def on_route_tested(self, plan: Plan, problem: str) -> Plan | None:
        """Handle the broker's test of the route to the first stage. Returns the plan to prepare if the connection
        succeeded."""
        plans, first = self.state.plans, plan.stages[0].incarnation
        if problem or plan is not plans.current or plans.phase is not PlanPhase.SERVING:
            return None
        return self._plan_direct(plan, BROKER, first)

    def _plan_direct(self, plan: Plan, source: str, target: str) -> Plan:
        self.state.routes.test_directly(source, target)
        self.out.note("way_tried_directly", source=self._name_of(source), target=self._name_of(target))
        return redraft(self.state, plan, self.state.plans.epoch + 1)

    def _name_of(self, end: str) -> str:
        return "the broker" if end == BROKER else self.state.workers[end].name

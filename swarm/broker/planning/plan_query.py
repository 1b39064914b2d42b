"""Plan queries that take a search to answer: plain values, so that another process can answer them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.problem import Shortage
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.proposals import compare_with_active, explain_plan, propose
from swarm.broker.planning.rules import PlanRules
from swarm.broker.state import Plan, PlanState, State, Worker
from swarm.broker.state.constraints import PlanConstraints
from swarm.broker.state.workers import Routes
from swarm.wire.messages import Manifest, PlanWhatIf

PlanAnswer = Proposal | Shortage | Forecast | None


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Query with all that its answer depends on. ``suppose`` None: why is the active plan as it is, and what would one
    more worker change? ``without``: the plan that would be made if this worker (its incarnation) had gone."""

    manifest: Manifest | None
    workers: tuple[Worker, ...]
    current: Plan | None
    rules: PlanRules
    suppose: PlanWhatIf | None
    without: str = ""
    ways: Routes = field(default_factory=Routes)
    steering: PlanConstraints = field(default_factory=PlanConstraints)
    is_order: bool = False  # preview of an operator's command: the plan that it would make
    now: float = 0.0


def answer_query(query: PlanQuery) -> PlanAnswer:
    """Return the answer to a query. Slow; changes nothing."""
    workers = {worker.incarnation: worker for worker in query.workers}
    plans = PlanState(current=query.current)
    state = State(
        manifest=query.manifest,
        workers=workers,
        plans=plans,
        routes=query.ways,
        constraints=query.steering,
        now=query.now,
    )
    without = workers.get(query.without)
    if query.is_order:
        return compare_with_active(state, query.rules, propose(state, query.rules, without=without))
    if without is not None:
        return propose(state, query.rules, without=without)
    if query.suppose is not None:
        proposal = propose(state, query.rules, suppose=query.suppose, thorough=True)
        return compare_with_active(state, query.rules, proposal)
    return None if query.current is None else explain_plan(state, query.rules, query.current)

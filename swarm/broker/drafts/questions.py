"""Plan queries that take a search to answer: plain values, so that another process can answer them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.proposals import compared, explained, propose
from swarm.broker.drafts.rules import PlanRules
from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.problem import Shortage
from swarm.broker.state import Plan, PlanBook, State, Worker
from swarm.broker.state.plans import Steering
from swarm.broker.state.workers import Ways
from swarm.wire.messages import Manifest, Suppose

Found = Proposal | Shortage | Forecast | None


@dataclass(frozen=True, slots=True)
class Question:
    """Query with all that its answer depends on. ``suppose`` None: why is the active plan as it is, and what would one
    more worker change? ``without``: the plan that would be made if this worker (its incarnation) had gone."""

    manifest: Manifest | None
    workers: tuple[Worker, ...]
    current: Plan | None
    rules: PlanRules
    suppose: Suppose | None
    without: str = ""
    ways: Ways = field(default_factory=Ways)
    steering: Steering = field(default_factory=Steering)
    is_order: bool = False  # preview of an operator's command: the plan that it would make
    now: float = 0.0


def answered(question: Question) -> Found:
    """Return the answer to a query. Slow; changes nothing."""
    workers = {worker.incarnation: worker for worker in question.workers}
    book = PlanBook(current=question.current)
    state = State(
        manifest=question.manifest,
        workers=workers,
        book=book,
        ways=question.ways,
        steering=question.steering,
        now=question.now,
    )
    without = workers.get(question.without)
    if question.is_order:
        return compared(state, question.rules, propose(state, question.rules, without=without))
    if without is not None:
        return propose(state, question.rules, without=without)
    if question.suppose is not None:
        found = propose(state, question.rules, suppose=question.suppose, thorough=True)
        return compared(state, question.rules, found)
    return None if question.current is None else explained(state, question.rules, question.current)

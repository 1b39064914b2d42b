"""Plan previews: the plan that would be made under given assumptions, and the effect of one more worker.

Solving takes as long as making a plan, up to seconds with many workers, and only the client that asks waits for it.
Therefore it is done outside of the event loop (``solver``), one question at a time. Clients that ask the same question
share the answer, and it is cached as long as nothing that it depends on has changed. Excess questions are rejected.

Whether the swarm can do without a worker is such a question too, followed by an action: see ``WorkerDeparture``. If
other workers have joined or left by the time of the answer, it is asked again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.broker.actions import Outbox, SendToClient, Solve
from swarm.broker.admin import plan_report
from swarm.broker.events import Solved
from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.problem import Shortage
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.plan_query import PlanAnswer, PlanQuery
from swarm.broker.planning.proposals import TargetPlan
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.constraints import PlanConstraints
from swarm.wire.messages import Json, PlanWhatIf, Query, Report

MAX_OPEN = 8  # questions that wait or are being solved
MAX_ASKERS = 64  # clients per question
MAX_CACHED = 64  # cached answers
MAX_WORKERS = 1024  # maximum number of workers in a question
MAX_REPEATS = 3  # repetitions of a question about a departure
TOO_MANY = "too many plan previews are under way: try again in a moment"


@dataclass(frozen=True, slots=True)
class WorkerDeparture:
    """A question whether the swarm can do without a worker. The callback gets (what the swarm would wait for, or "" if
    it can do without it; why that is unknown)."""

    worker: Worker
    on_answer: Callable[[str, str], None]
    num_repeats: int = 0  # repetitions so far


@dataclass(frozen=True, slots=True)
class ConstrainedPlan:
    """A question for the plan that would be made under an operator's constraints. The callback gets (the answer; why
    there is none). ``drained``: incarnation of the worker that the order would drain."""

    steering: PlanConstraints
    on_answer: Callable[[PlanAnswer, str], None]
    drained: str = ""


@dataclass(slots=True)
class _OpenQuestion:
    """A question that waits or is being solved, and its askers."""

    key: object  # everything that the answer depends on; equal keys share an answer
    epoch: int | None  # of the active plan when it was asked
    askers: list[tuple[bytes, Query] | WorkerDeparture | ConstrainedPlan]


@dataclass(slots=True)
class PlanPreviews:
    """Answers questions about plans that would be made; appends answers and questions for the solver to ``out``."""

    state: State
    wanted: TargetPlan
    out: Outbox
    _open: dict[int, _OpenQuestion] = field(default_factory=dict)  # by the number under which the solver answers
    # by everything that an answer depends on; the newest last
    _cached: OrderedDict[object, PlanAnswer] = field(default_factory=OrderedDict)
    _num_asked: int = 0

    def preview(self, client: bytes, query: Query) -> None:
        """Send the active plan with its full explanation, or the preview of a plan."""
        problem = None if query.suppose is None else plan_report.unknown_worker_error(self.state, query.suppose)
        if problem is not None:
            self._send(client, query, {"error": problem})
            return
        key = (*self.wanted.cache_key, query.suppose)  # the first part changes with everything that plans depend on
        if key in self._cached or not self._needs_solver(query):
            self._answer(client, query, self._cached.get(key))
        else:
            self._ask(key, client, query)

    def on_solved(self, solved: Solved) -> None:
        """Send the answer, or why there is none, to all askers."""
        question = self._open.pop(solved.number, None)
        if question is None:
            return
        # an answer to a departure or an order is not cached: it is acted upon
        if not solved.problem and not isinstance(question.askers[0], WorkerDeparture | ConstrainedPlan):
            self._cached[question.key] = solved.answer
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        for asker in question.askers:
            if isinstance(asker, WorkerDeparture):
                self._answer_departure(asker, question.key, solved)
                continue
            if isinstance(asker, ConstrainedPlan):
                asker.on_answer(solved.answer, solved.problem)
                continue
            client, query = asker
            if query.suppose is None:
                self._answer(client, query, solved.answer if question.epoch == self._epoch else None)
            elif solved.problem:
                self._send(client, query, {"error": solved.problem})
            else:
                self._answer(client, query, solved.answer)

    def ask_departure(self, asker: WorkerDeparture) -> None:
        """Ask whether the swarm can do without a member."""
        question = replace(self._build_question(None), without=asker.worker.incarnation)
        if len(question.workers) > MAX_WORKERS:
            # allow the attempt: a leaving worker is only released once there is a plan without it
            asker.on_answer("", "")
        elif not self._join((*self._members_key(), asker.worker.incarnation), asker, question):
            asker.on_answer("", TOO_MANY)

    def ask_constrained(self, asker: ConstrainedPlan) -> None:
        """Ask for the plan that would be made under these constraints."""
        question = replace(self._build_question(None), steering=asker.steering, without=asker.drained, is_order=True)
        key = ("order", *self.wanted.cache_key, asker.steering.cache_key, asker.drained)
        if len(question.workers) > MAX_WORKERS or not self._join(key, asker, question):
            asker.on_answer(None, TOO_MANY)

    def _answer_departure(self, asker: WorkerDeparture, key: object, solved: Solved) -> None:
        is_leaving = asker.worker.is_gone or asker.worker.state is WorkerState.LEAVING
        if solved.problem:
            asker.on_answer("", solved.problem)
        elif is_leaving or key == (*self._members_key(), asker.worker.incarnation):
            asker.on_answer(solved.answer.text if isinstance(solved.answer, Shortage) else "", "")
        elif asker.num_repeats < MAX_REPEATS:
            self.ask_departure(replace(asker, num_repeats=asker.num_repeats + 1))
        else:
            asker.on_answer("", "workers keep joining and leaving: try again in a moment")

    def _ask(self, key: object, client: bytes, query: Query) -> None:
        too_large = len(self.state.workers) > MAX_WORKERS
        if too_large or not self._join(key, (client, query), self._build_question(query.suppose)):
            self._reject(client, query)

    def _join(
        self, key: object, asker: tuple[bytes, Query] | WorkerDeparture | ConstrainedPlan, question: PlanQuery
    ) -> bool:
        """Add a client to an open question, or open it. Return False if there are too many."""
        question_open = next((each for each in self._open.values() if each.key == key), None)
        if question_open is not None:
            if len(question_open.askers) < MAX_ASKERS:
                question_open.askers.append(asker)
                return True
            return False
        if len(self._open) >= MAX_OPEN:
            return False
        self._num_asked += 1
        self._open[self._num_asked] = _OpenQuestion(key, self._epoch, [asker])
        self.out.append(Solve(self._num_asked, question))
        return True

    def _reject(self, client: bytes, query: Query) -> None:
        """Reject a question. The active plan is sent without the part that takes long."""
        if query.suppose is None:
            self._answer(client, query, None)
        else:
            self._send(client, query, {"error": TOO_MANY})

    def _needs_solver(self, query: Query) -> bool:
        current = self.state.plans.current
        return query.suppose is not None or (current is not None and current.forecast is not None)

    def _build_question(self, suppose: PlanWhatIf | None) -> PlanQuery:
        workers = tuple(self.state.present_workers)
        state = self.state
        return PlanQuery(
            state.manifest,
            workers,
            state.plans.current,
            self.wanted.rules,
            suppose,
            ways=state.routes,
            steering=state.constraints,
            now=state.now,
        )

    def _members_key(self) -> tuple[object, ...]:
        """Return a key of the workers that could take over layers; their current speed doesn't matter."""
        workers = tuple(
            (w.incarnation, w.state, tuple(w.refusals)) for w in self.state.workers.values() if not w.is_gone
        )
        ways, by_hand = self.state.routes.list_not_open(self.state.now), self.state.constraints.cache_key
        return ("without", workers, ways, self._epoch, by_hand, self.wanted.rules_version)

    @property
    def _epoch(self) -> int | None:
        return None if self.state.plans.current is None else self.state.plans.current.epoch

    def _answer(self, client: bytes, query: Query, answer: PlanAnswer) -> None:
        if query.suppose is not None:
            assert isinstance(answer, Proposal | Shortage)
            self._send(client, query, plan_report.report_preview(self.state, answer, self.state.constraints))
            return
        plans = self.state.plans
        if isinstance(answer, Forecast) and plans.current is not None:
            plans.add_forecast(answer)
        self._send(client, query, plan_report.report_plan(self.state) | self.wanted.demand.report(self.state.now))

    def _send(self, client: bytes, query: Query, body: Json) -> None:
        self.out.append(SendToClient(client, Report(what=query.what, ok="error" not in body, body=body)))

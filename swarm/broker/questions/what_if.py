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

from swarm.broker.actions import Outbox, SayClient, Solve
from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.proposals import Wanted
from swarm.broker.drafts.questions import Found, Question
from swarm.broker.events import Solved
from swarm.broker.planner.explain import Forecast
from swarm.broker.planner.problem import Shortage
from swarm.broker.questions import plan_report
from swarm.broker.state import State, Worker, WorkerState
from swarm.broker.state.plans import Steering
from swarm.wire.messages import Json, Query, Report, Suppose

MAX_OPEN = 8  # questions that wait or are being solved
MAX_ASKERS = 64  # clients per question
MAX_REMEMBERED = 64  # cached answers
MAX_WHOLE = 1024  # maximum number of workers in a question
MAX_AGAIN = 3  # repetitions of a question about a departure
TOO_MANY = "too many plan previews are under way: try again in a moment"


@dataclass(frozen=True, slots=True)
class Departure:
    """A question whether the swarm can do without a worker. The callback gets (what the swarm would wait for, or "" if
    it can do without it; why that is unknown)."""

    worker: Worker
    told: Callable[[str, str], None]
    times_asked: int = 0  # repetitions so far


@dataclass(frozen=True, slots=True)
class Order:
    """A question for the plan that would be made under an operator's constraints. The callback gets (the answer; why
    there is none). ``drained``: incarnation of the worker that the order would drain."""

    steering: Steering
    told: Callable[[Found, str], None]
    drained: str = ""


@dataclass(slots=True)
class _Open:
    """A question that waits or is being solved, and its askers."""

    key: object  # everything that the answer depends on; equal keys share an answer
    epoch: int | None  # of the active plan when it was asked
    askers: list[tuple[bytes, Query] | Departure | Order]


@dataclass(slots=True)
class Suppositions:
    """Answers questions about plans that would be made; appends answers and questions for the solver to ``out``."""

    state: State
    wanted: Wanted
    out: Outbox
    _open: dict[int, _Open] = field(default_factory=dict)  # by the number under which the solver answers
    # by everything that an answer depends on; the newest last
    _known: OrderedDict[object, Found] = field(default_factory=OrderedDict)
    _num_asked: int = 0

    def plan(self, client: bytes, query: Query) -> None:
        """Send the active plan with its full explanation, or the preview of a plan."""
        problem = None if query.suppose is None else plan_report.unknown_worker(self.state, query.suppose)
        if problem is not None:
            self._say(client, query, {"error": problem})
            return
        key = (*self.wanted.rests_on, query.suppose)  # the first part changes with everything that plans depend on
        if key in self._known or not self._is_question(query):
            self._answer(client, query, self._known.get(key))
        else:
            self._ask(key, client, query)

    def solved(self, solved: Solved) -> None:
        """Send the answer, or why there is none, to all askers."""
        question = self._open.pop(solved.number, None)
        if question is None:
            return
        # an answer to a departure or an order is not cached: it is acted upon
        if not solved.problem and not isinstance(question.askers[0], Departure | Order):
            self._known[question.key] = solved.found
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        for asker in question.askers:
            if isinstance(asker, Departure):
                self._departure(asker, question.key, solved)
                continue
            if isinstance(asker, Order):
                asker.told(solved.found, solved.problem)
                continue
            client, query = asker
            if query.suppose is None:
                self._answer(client, query, solved.found if question.epoch == self._epoch else None)
            elif solved.problem:
                self._say(client, query, {"error": solved.problem})
            else:
                self._answer(client, query, solved.found)

    def departure(self, asker: Departure) -> None:
        """Ask whether the swarm can do without a member."""
        question = replace(self._question(None), without=asker.worker.incarnation)
        if len(question.workers) > MAX_WHOLE:
            asker.told("", "")  # allow the attempt: a leaving worker is only released once there is a plan without it
        elif not self._join((*self._members(), asker.worker.incarnation), asker, question):
            asker.told("", TOO_MANY)

    def order(self, asker: Order) -> None:
        """Ask for the plan that would be made under these constraints."""
        question = replace(self._question(None), steering=asker.steering, without=asker.drained, is_order=True)
        key = ("order", *self.wanted.rests_on, asker.steering.key, asker.drained)
        if len(question.workers) > MAX_WHOLE or not self._join(key, asker, question):
            asker.told(None, TOO_MANY)

    def _departure(self, asker: Departure, key: object, solved: Solved) -> None:
        goes_already = asker.worker.is_gone or asker.worker.state is WorkerState.LEAVING
        if solved.problem:
            asker.told("", solved.problem)
        elif goes_already or key == (*self._members(), asker.worker.incarnation):
            asker.told(solved.found.text if isinstance(solved.found, Shortage) else "", "")
        elif asker.times_asked < MAX_AGAIN:
            self.departure(replace(asker, times_asked=asker.times_asked + 1))
        else:
            asker.told("", "workers keep joining and leaving: try again in a moment")

    def _ask(self, key: object, client: bytes, query: Query) -> None:
        too_large = len(self.state.workers) > MAX_WHOLE
        if too_large or not self._join(key, (client, query), self._question(query.suppose)):
            self._turn_away(client, query)

    def _join(self, key: object, asker: tuple[bytes, Query] | Departure | Order, question: Question) -> bool:
        """Add a client to an open question, or open it. Return False if there are too many."""
        same = next((each for each in self._open.values() if each.key == key), None)
        if same is not None:
            if len(same.askers) < MAX_ASKERS:
                same.askers.append(asker)
                return True
            return False
        if len(self._open) >= MAX_OPEN:
            return False
        self._num_asked += 1
        self._open[self._num_asked] = _Open(key, self._epoch, [asker])
        self.out.append(Solve(self._num_asked, question))
        return True

    def _turn_away(self, client: bytes, query: Query) -> None:
        """Reject a question. The active plan is sent without the part that takes long."""
        if query.suppose is None:
            self._answer(client, query, None)
        else:
            self._say(client, query, {"error": TOO_MANY})

    def _is_question(self, query: Query) -> bool:
        current = self.state.book.current
        return query.suppose is not None or (current is not None and current.forecast is not None)

    def _question(self, suppose: Suppose | None) -> Question:
        workers = tuple(worker for worker in self.state.workers.values() if not worker.is_gone)
        state = self.state
        return Question(
            state.manifest,
            workers,
            state.book.current,
            self.wanted.rules,
            suppose,
            ways=state.ways,
            steering=state.steering,
            now=state.now,
        )

    def _members(self) -> tuple[object, ...]:
        """Return a key of the workers that could take over layers; their current speed doesn't matter."""
        workers = tuple(
            (w.incarnation, w.state, tuple(w.refusals)) for w in self.state.workers.values() if not w.is_gone
        )
        ways, by_hand = self.state.ways.at(self.state.now), self.state.steering.key
        return ("without", workers, ways, self._epoch, by_hand, self.wanted.times_ruled)

    @property
    def _epoch(self) -> int | None:
        return None if self.state.book.current is None else self.state.book.current.epoch

    def _answer(self, client: bytes, query: Query, found: Found) -> None:
        if query.suppose is not None:
            assert isinstance(found, Proposal | Shortage)
            self._say(client, query, plan_report.supposed(self.state, found, self.state.steering))
            return
        book = self.state.book
        if isinstance(found, Forecast) and book.current is not None:
            book.explain(found)
        self._say(client, query, plan_report.plan(self.state) | self.wanted.demand.report(self.state.now))

    def _say(self, client: bytes, query: Query, body: Json) -> None:
        self.out.append(SayClient(client, Report(what=query.what, ok="error" not in body, body=body)))

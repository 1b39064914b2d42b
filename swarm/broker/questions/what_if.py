"""Questions "what if": plans that would be made if things were so, and what one more worker would change.

Solving takes as long as making a plan, up to seconds with many workers, and nobody waits for it but who asks. So it is
done beside the loop (``solver``), one question at a time. Whoever asks what is being solved shares the answer, and it
is remembered as long as nothing that it depends on has changed. Too many questions are turned away.

Whether the swarm can do without a worker is such a question, too. Who asks it wants something done, and told what was:
see ``Departure``. By the time of the answer other workers may have come or gone; then it is asked again.
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
MAX_ASKERS = 64  # clients that wait for one of them
MAX_REMEMBERED = 64
MAX_WHOLE = 1024  # workers of which a question can be made
MAX_AGAIN = 3  # times that one about a departure is asked again
TOO_MANY = "too many ask what the plan would be: try again in a moment"


@dataclass(frozen=True, slots=True)
class Departure:
    """A question whether the swarm can do without a worker. ``told`` gets what it would wait for, "" if it can; or, as
    the second, why that could not be found out."""

    worker: Worker
    told: Callable[[str, str], None]
    times_asked: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """A question what plan would be made if an operator's word counted. ``told`` gets it, or why it is not known.
    ``drained``: whom (its incarnation) the word is about to drain."""

    steering: Steering
    told: Callable[[Found, str], None]
    drained: str = ""


@dataclass(slots=True)
class _Open:
    key: object
    epoch: int | None  # of the plan in force
    askers: list[tuple[bytes, Query] | Departure | Order]


@dataclass(slots=True)
class Suppositions:
    """Answers questions "what if": appends what is to be said or solved to ``out``."""

    state: State
    wanted: Wanted
    out: Outbox
    _open: dict[int, _Open] = field(default_factory=dict)
    _known: OrderedDict[object, Found] = field(default_factory=OrderedDict)
    _num_asked: int = 0

    def plan(self, client: bytes, query: Query) -> None:
        """Tell the plan in force with all reasons for it; or the one that is supposed."""
        problem = None if query.suppose is None else plan_report.unknown_worker(self.state, query.suppose)
        if problem is not None:
            self._say(client, query, {"error": problem})
            return
        key = (*self.wanted.rests_on, query.suppose)
        if key in self._known or not self._is_question(query):
            self._answer(client, query, self._known.get(key))
        else:
            self._ask(key, client, query)

    def solved(self, solved: Solved) -> None:
        """Give whoever waited the answer, or why there is none, as things were when they asked."""
        question = self._open.pop(solved.number, None)
        if question is None:
            return
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
        """Ask whether the swarm can do without a worker that is here."""
        question = replace(self._question(None), without=asker.worker.incarnation)
        if len(question.workers) > MAX_WHOLE:
            asker.told("", "")  # it can try: a worker that asked to leave is let go once there is a plan without it
        elif not self._join((*self._members(), asker.worker.incarnation), asker, question):
            asker.told("", TOO_MANY)

    def order(self, asker: Order) -> None:
        """Ask what plan would be made if this counted."""
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
            asker.told("", "workers come and go: try again in a moment")

    def _ask(self, key: object, client: bytes, query: Query) -> None:
        too_large = len(self.state.workers) > MAX_WHOLE
        if too_large or not self._join(key, (client, query), self._question(query.suppose)):
            self._turn_away(client, query)

    def _join(self, key: object, asker: tuple[bytes, Query] | Departure | Order, question: Question) -> bool:
        """Join those who wait for this answer, perhaps as the first. False: there are too many."""
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
        """Turn a question away; the plan in force is told without what would take long to find out."""
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
        """List who could take over layers; how quick they are at present doesn't matter for that."""
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

"""Questions "what if": plans that would be made if things were so, and what one more worker would change.

Solving takes as long as making a plan, up to seconds with many workers, and nobody waits for it but who asks. So it is
done beside the loop (``solver``), one question at a time. Whoever asks what is being solved shares the answer, and it
is remembered as long as nothing that it depends on has changed. Too many questions are turned away.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from swarm.broker import plan_report
from swarm.broker.actions import Action, SayClient, Solve
from swarm.broker.events import Solved
from swarm.broker.plan.explain import Forecast
from swarm.broker.plan.problem import Shortage
from swarm.broker.rules import PlanRules
from swarm.broker.state import Plan, PlanBook, State, Worker
from swarm.broker.table import Proposal
from swarm.broker.wanted import propose, with_one_more
from swarm.wire.messages import Json, Manifest, Query, Report, Suppose

MAX_OPEN = 8  # questions that wait or are being solved
MAX_ASKERS = 64  # clients that wait for one of them
MAX_REMEMBERED = 64
MAX_WHOLE = 1024  # workers of which a question can be made

Found = Proposal | Shortage | Forecast | None


@dataclass(frozen=True, slots=True)
class Question:
    """All that an answer depends on. ``suppose`` None: what would one more worker change?"""

    manifest: Manifest | None
    workers: tuple[Worker, ...]
    current: Plan | None
    rules: PlanRules
    suppose: Suppose | None


def answered(question: Question) -> Found:
    """Takes its time. Changes nothing."""
    workers = {worker.incarnation: worker for worker in question.workers}
    state = State(manifest=question.manifest, workers=workers, book=PlanBook(current=question.current))
    if question.suppose is not None:
        return propose(state, question.rules, suppose=question.suppose)
    return None if question.current is None else with_one_more(state, question.rules, question.current)


@dataclass(slots=True)
class _Open:
    key: object
    epoch: int | None  # of the plan in force
    askers: list[tuple[bytes, Query]]


@dataclass(slots=True)
class Suppositions:
    """Appends what is to be said or solved to ``out``."""

    state: State
    rules: PlanRules
    out: list[Action]
    _open: dict[int, _Open] = field(default_factory=dict)
    _known: OrderedDict[object, Found] = field(default_factory=OrderedDict)
    _num_asked: int = 0

    def plan(self, client: bytes, query: Query) -> None:
        """The plan in force with what one more worker would change; or the one that is supposed."""
        problem = None if query.suppose is None else plan_report.unknown_worker(self.state, query.suppose)
        if problem is not None:
            self._say(client, query, {"error": problem})
            return
        key = (*self._seen(), query.suppose)
        if key in self._known or not self._is_question(query):
            self._answer(client, query, self._known.get(key))
        else:
            self._ask(key, client, query)

    def solved(self, solved: Solved) -> None:
        """The answer, or why there is none; whoever waited gets it, as things were when they asked."""
        question = self._open.pop(solved.number, None)
        if question is None:
            return
        if not solved.problem:
            self._known[question.key] = solved.found
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        for client, query in question.askers:
            if query.suppose is None:
                self._answer(client, query, solved.found if question.epoch == self._epoch else None)
            elif solved.problem:
                self._say(client, query, {"error": solved.problem})
            else:
                self._answer(client, query, solved.found)

    def _ask(self, key: object, client: bytes, query: Query) -> None:
        same = next((each for each in self._open.values() if each.key == key), None)
        if same is not None and len(same.askers) < MAX_ASKERS:
            same.askers.append((client, query))
        elif same is not None or len(self._open) >= MAX_OPEN or len(self.state.workers) > MAX_WHOLE:
            self._turn_away(client, query)
        else:
            self._num_asked += 1
            self._open[self._num_asked] = _Open(key, self._epoch, [(client, query)])
            self.out.append(Solve(self._num_asked, self._question(query.suppose)))

    def _turn_away(self, client: bytes, query: Query) -> None:
        """The plan in force can be told without what it would take long to find out."""
        if query.suppose is None:
            self._answer(client, query, None)
        else:
            self._say(client, query, {"error": "too many ask what the plan would be: try again in a moment"})

    def _is_question(self, query: Query) -> bool:
        current = self.state.book.current
        explains = current is not None and current.forecast is not None and current.forecast.one_more_s is None
        return query.suppose is not None or explains

    def _question(self, suppose: Suppose | None) -> Question:
        workers = tuple(worker for worker in self.state.workers.values() if not worker.is_gone)
        return Question(self.state.manifest, workers, self.state.book.current, self.rules, suppose)

    def _seen(self) -> tuple[object, ...]:
        workers = tuple(
            (w.incarnation, w.state, tuple(w.refusals), w.pace, w.planned)
            for w in self.state.workers.values()
            if not w.is_gone
        )
        return (workers, self._epoch, self.state.manifest is None)

    @property
    def _epoch(self) -> int | None:
        return None if self.state.book.current is None else self.state.book.current.epoch

    def _answer(self, client: bytes, query: Query, found: Found) -> None:
        if query.suppose is not None:
            assert isinstance(found, Proposal | Shortage)
            self._say(client, query, plan_report.supposed(self.state, found))
            return
        book = self.state.book
        if isinstance(found, Forecast) and book.current is not None and book.current.forecast is not None:
            known = replace(book.current.forecast, one_more_s=found.one_more_s, like=found.like)
            book.current = replace(book.current, forecast=known)
        self._say(client, query, plan_report.plan(self.state))

    def _say(self, client: bytes, query: Query, body: Json) -> None:
        self.out.append(SayClient(client, Report(what=query.what, ok="error" not in body, body=body)))

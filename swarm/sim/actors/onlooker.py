"""A client that looks answers up while others read them.

It asks several equal questions together, gives some of them up, and asks about requests that do not exist. Now and then
it reads on in a reader's place, and leaves again.
"""

from __future__ import annotations

from itertools import count

from swarm.client import events as client_event
from swarm.errors import ClientError
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.surroundings import Surroundings
from swarm.sim.checks.audit import Violation
from swarm.sim.schedules.schedule import Look
from swarm.wire.messages import Finished, LookUp, Recall, Recalled, Report, Snapshot

ASK_S = 10.0  # timeout of a question; longer than the broker waits for its journal
GIVE_UP_S = 0.05
UNKNOWN = "nobody-asked-for-this"
CODES = {"unknown", "journal", "overloaded", "superseded", "invalid"}


class Onlooker(ClientNode):
    """Client that looks answers up.

    The answers are held to the same checks as a reader's stream, and every question must be answered.
    """

    def __init__(self, cluster: Surroundings, name: str) -> None:
        self._keys = count(1)
        self._asked: dict[int, tuple[float, LookUp | Recall]] = {}  # time and question, by key
        super().__init__(cluster, name, (0.0, 0.05))

    def look(self, plan: Look) -> None:
        """Ask ``plan.times`` questions together, and perhaps give up or take over after a moment."""
        audit = self._cluster.audit
        known = sorted(audit.submits)
        if not known:
            return
        request_id = UNKNOWN if plan.whom % 8 == 0 else known[plan.whom % len(known)]
        submit = audit.submits.get(request_id)
        index = 0 if submit is None else plan.whom % (submit.params.n + 1)  # sometimes an index that does not exist
        for number in range(plan.times):
            key = next(self._keys)
            question: LookUp | Recall = LookUp(question=key, request_id=request_id, index=index, start=plan.whom % 3)
            if number % 3 == 2:
                question = Recall(request_id=request_id)
            self._asked[key] = self._world.now, question
            self.feed(client_event.Ask(key, question, ASK_S))
            if plan.gives_up:
                self._world.at(GIVE_UP_S, lambda k=key: self._give_up(k))  # type: ignore[misc]
        if plan.reads_s is not None and submit is not None and request_id in audit.promised:
            audit.read_elsewhere.add(request_id)
            audit.may_fail.add(request_id)  # unread answers are given up after a while
            self.feed(client_event.Start(submit, attached=True))
            self._world.at(plan.reads_s, lambda: self.feed(client_event.Leave(request_id)))

    def _give_up(self, key: int) -> None:
        if self._asked.pop(key, None) is not None:
            self.feed(client_event.Withdraw(key))

    def _perform(self, action: client_event.Action) -> None:
        super()._perform(action)
        match action:
            case client_event.Answered(key, answer, _):
                self._take_answer(key, answer)
            case client_event.Unanswered(key):
                self._unanswered(key)
            case _:
                pass

    def _take_answer(self, key: int, answer: client_event.Reply) -> None:
        _, question = self._asked.pop(key)
        match answer:
            case Snapshot():
                self._check(answer)
            case Recalled(submit) if submit != self._cluster.audit.submits.get(submit.request_id):
                raise Violation(f"I12: {self.name} is told that {submit} was asked for")
            case Report(body=body) if body.get("code") not in CODES:
                raise Violation(f"I12: {question} is refused with {body}")
            case _:
                pass

    def _check(self, seen: Snapshot) -> None:
        where = f"{self.name}: {seen.request_id}[{seen.index}]"
        case = self._cluster.audit.expected[seen.request_id, seen.index]
        told = client_event.Deliver(seen.request_id, seen.index, seen.start, seen.ids, seen.logprobs, seen.hops)
        if problem := case.astray(told):
            raise Violation(f"I2: {where}: {problem}")
        if seen.finished is not None and seen.finished.reason in ("stop", "length"):
            self._ended(seen.request_id, seen.index, seen.finished)

    def _unanswered(self, key: int) -> None:
        """Check that the broker was away or stood still: nothing else leaves a question unanswered."""
        asked_at, question = self._asked.pop(key)
        broker = self._cluster.broker
        if not broker.is_away and not broker.stood_still_since(asked_at) and not broker.shut_doors:
            raise Violation(f"I12: nobody answers {question}, asked at {asked_at:.3f}")

    # --- the short time for which it reads

    def _delivered(self, action: client_event.Deliver) -> None:
        if problem := self._cluster.audit.expected[action.request_id, action.index].astray(action):
            raise Violation(f"I2: {self.name}: {action.request_id}[{action.index}]: {problem}")

    def _ended(self, request_id: str, index: int, finished: Finished) -> None:
        problem = self._cluster.audit.expected[request_id, index].wrong_end(finished)
        if finished.reason in ("stop", "length") and problem:
            raise Violation(f"I2: {self.name}: {request_id}[{index}]: {problem}")

    def _failed(self, request_id: str, error: ClientError) -> None:
        pass  # another reader has taken over, or the request has ended

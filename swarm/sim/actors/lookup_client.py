"""A client that looks answers up while others read them.

It asks several equal questions together, gives some of them up, and asks about requests that do not exist. Now and then
it reads on in a reader's place, and leaves again.
"""

from __future__ import annotations

from itertools import count

from swarm.client import events as client_event
from swarm.errors import ClientError
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.environment import Environment
from swarm.sim.checks.audit import Violation
from swarm.sim.schedules.schedule import LookupSpec
from swarm.wire.messages import Finished, GetRequest, LookUp, Report, RequestDetails, TokensSnapshot

ANSWER_TIMEOUT_S = 10.0  # timeout of a question; longer than the broker waits for its journal
GIVE_UP_S = 0.05
UNKNOWN = "nobody-asked-for-this"
CODES = {"unknown", "journal", "overloaded", "superseded", "invalid"}


class LookupClient(ClientNode):
    """Client that looks answers up.

    The answers are held to the same checks as a reader's stream, and every question must be answered.
    """

    def __init__(self, cluster: Environment, name: str) -> None:
        self._keys = count(1)
        self._questions: dict[int, tuple[float, LookUp | GetRequest]] = {}  # time and question, by key
        super().__init__(cluster, name, (0.0, 0.05))

    def look_up(self, plan: LookupSpec) -> None:
        """Ask ``plan.times`` questions together, and perhaps give up or take over after a moment."""
        audit = self._cluster.audit
        request_ids = sorted(audit.submits)
        if not request_ids:
            return
        request_id = UNKNOWN if plan.choice % 8 == 0 else request_ids[plan.choice % len(request_ids)]
        submit = audit.submits.get(request_id)
        index = 0 if submit is None else plan.choice % (submit.params.n + 1)  # sometimes an index that does not exist
        for number in range(plan.num_questions):
            key = next(self._keys)
            question: LookUp | GetRequest = LookUp(
                question=key, request_id=request_id, index=index, start=plan.choice % 3
            )
            if number % 3 == 2:
                question = GetRequest(request_id=request_id)
            self._questions[key] = self._world.now, question
            self.feed(client_event.AskQuestion(key, question, ANSWER_TIMEOUT_S))
            if plan.gives_up:
                self._world.schedule(GIVE_UP_S, lambda k=key: self._give_up(k))  # type: ignore[misc]
        if plan.read_for_s is not None and submit is not None and request_id in audit.accepted:
            audit.shared.add(request_id)
            audit.may_fail.add(request_id)  # unread answers are given up after a while
            self.feed(client_event.StartRequest(submit, attached=True))
            self._world.schedule(plan.read_for_s, lambda: self.feed(client_event.LeaveRequest(request_id)))

    def _give_up(self, key: int) -> None:
        if self._questions.pop(key, None) is not None:
            self.feed(client_event.AbandonQuestion(key))

    def _perform(self, action: client_event.SessionAction) -> None:
        super()._perform(action)
        match action:
            case client_event.ReturnAnswer(key, answer, _):
                self._take_answer(key, answer)
            case client_event.ReturnError(key):
                self._on_unanswered(key)
            case _:
                pass

    def _take_answer(self, key: int, answer: client_event.Reply) -> None:
        _, question = self._questions.pop(key)
        match answer:
            case TokensSnapshot():
                self._check(answer)
            case RequestDetails(submit) if not self._cluster.audit.is_submission(submit):
                raise Violation(f"I12: {self.name} got another submission: {submit}")
            case Report(body=body) if body.get("code") not in CODES:
                raise Violation(f"I12: {question} is refused with {body}")
            case _:
                pass

    def _check(self, answer: TokensSnapshot) -> None:
        where = f"{self.name}: {answer.request_id}[{answer.index}]"
        case = self._cluster.audit.expected[answer.request_id, answer.index]
        delivery = client_event.Deliver(
            answer.request_id, answer.index, answer.start, answer.ids, answer.logprobs, answer.hops
        )
        if problem := case.delivery_error(delivery):
            raise Violation(f"I2: {where}: {problem}")
        if answer.finished is not None and answer.finished.reason in ("stop", "length"):
            self._on_ended(answer.request_id, answer.index, answer.finished)

    def _on_unanswered(self, key: int) -> None:
        """Check that the broker was away or stood still: nothing else leaves a question unanswered."""
        asked_at, question = self._questions.pop(key)
        broker = self._cluster.broker
        if not broker.is_away and not broker.has_paused_since(asked_at) and not broker.closed_listeners:
            raise Violation(f"I12: no answer to {question}, asked at {asked_at:.3f}")

    # --- the short time for which it reads

    def _on_delivered(self, action: client_event.Deliver) -> None:
        if problem := self._cluster.audit.expected[action.request_id, action.index].delivery_error(action):
            raise Violation(f"I2: {self.name}: {action.request_id}[{action.index}]: {problem}")

    def _on_ended(self, request_id: str, index: int, finished: Finished) -> None:
        problem = self._cluster.audit.expected[request_id, index].end_error(finished)
        if finished.reason in ("stop", "length") and problem:
            raise Violation(f"I2: {self.name}: {request_id}[{index}]: {problem}")

    def _on_failed(self, request_id: str, error: ClientError) -> None:
        pass  # another reader has taken over, or the request has ended

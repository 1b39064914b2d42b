"""A client that reads another client's request: from the first token on, at its own pace."""

from __future__ import annotations

from collections import Counter

from swarm.client import events as client_event
from swarm.errors import ClientError, ReadElsewhere, RequestFailed
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.environment import Environment
from swarm.sim.checks.audit import Violation
from swarm.wire.messages import Finished, GetRequest, Report, RequestDetails, Submit

RECALL, RECALL_S = 1, 10.0  # key of its only question, and the timeout of the answer
ATTACH_RETRY_S = 0.3  # until it tries again to read a request that is not accepted yet


class AttachedReader(ClientNode):
    """Client that attaches to a request of another client. Its stream must pass the same checks as the submitter's."""

    def __init__(self, cluster: Environment, name: str, consume_s: tuple[float, float], submit: Submit) -> None:
        self._submit = submit
        self._received: Counter[int] = Counter()
        self._ends: dict[int, Finished] = {}
        self._recalls = cluster.recalls
        self.error: ClientError | None = None
        cluster.add_reader(self)
        super().__init__(cluster, name, consume_s)

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self._ends) == self._submit.params.n

    @property
    def has_read_all(self) -> bool:
        return self.error is None and self.is_done

    def attach(self) -> None:
        """Attach once the request is accepted: before, it may be unknown."""
        audit = self._cluster.audit
        if self._submit.request_id in audit.accepted:
            audit.shared.add(self._submit.request_id)
            if self._recalls:
                self.feed(client_event.AskQuestion(RECALL, GetRequest(request_id=self._submit.request_id), RECALL_S))
            else:
                self.feed(client_event.StartRequest(self._submit, attached=True))
        elif self._submit.request_id not in audit.abandoned and not audit.has_ended(self._submit.request_id):
            self._world.schedule(ATTACH_RETRY_S, self.attach)
        else:
            self.error = ClientError("it was never accepted")

    def _perform(self, action: client_event.SessionAction) -> None:
        super()._perform(action)
        match action:
            case client_event.ReturnAnswer(_, RequestDetails(submit)):
                self._on_recalled(submit)
            case client_event.ReturnAnswer(_, Report(body=body)):
                self._on_recall_failed(str(body.get("error", "")))
            case client_event.ReturnError():
                self._world.schedule(ATTACH_RETRY_S, self.attach)
            case _:
                pass

    def _on_recalled(self, submit: Submit) -> None:
        if not self._cluster.audit.is_submission(submit):
            raise Violation(f"I2: {self.name} got the submission {submit}, expected {self._submit}")
        self.feed(client_event.StartRequest(submit, attached=True))

    def _on_recall_failed(self, problem: str) -> None:
        """Handle an error. An accepted request can always be asked for, except while the journal can't be read."""
        if "looked up" in problem or "read again" in problem:
            self._world.schedule(ATTACH_RETRY_S, self.attach)
            return
        self.error = RequestFailed(problem)

    def check_end(self) -> None:
        """Raise Violation unless the client has read the whole answer, or the read failed for a permitted reason.

        Permitted reasons: another client took over the reading, faults allow the request to fail, or the request had
        ended and was stored only in a journal that was lost.
        """
        audit, request_id = self._cluster.audit, self._submit.request_id
        if not self.is_done:
            raise Violation(f"I1: {self.name} reads {request_id} and never comes to an end")
        may_fail = request_id in audit.may_fail | audit.abandoned or isinstance(self.error, ReadElsewhere)
        may_fail |= self._cluster.broker.disk.was_lost and audit.has_ended(request_id)
        if self.error is not None and not may_fail and request_id in audit.accepted:
            raise Violation(f"I1: {self.name} could not read {request_id}: {self.error}")

    def _on_delivered(self, action: client_event.Deliver) -> None:
        case, start = self._cluster.audit.expected[action.request_id, action.index], action.start
        where = f"{self.name}: {action.request_id}[{action.index}]"
        if action.index in self._ends or start != self._received[action.index]:
            raise Violation(f"I3: {where} got {start} after {self._received[action.index]}, {self._ends}")
        self._received[action.index] += len(action.ids)
        if problem := case.delivery_error(action):
            raise Violation(f"I2: {where}: {problem}")

    def _on_ended(self, request_id: str, index: int, finished: Finished) -> None:
        where = f"{self.name}: {request_id}[{index}]"
        if index in self._ends:
            raise Violation(f"I1: {where} ended twice")
        self._ends[index] = finished
        if finished.reason in ("stop", "length") and (
            problem := self._cluster.audit.expected[request_id, index].end_error(finished)
        ):
            raise Violation(f"I2: {where}: {problem}")
        if self._received[index] < finished.num_tokens:
            raise Violation(f"I3: {where} ended with {finished.num_tokens} of which {self._received[index]} came")

    def _on_failed(self, request_id: str, error: ClientError) -> None:
        if self.may_be_unanswered(request_id, error):
            self._world.schedule(ATTACH_RETRY_S, self.attach)
        else:
            self.error = error

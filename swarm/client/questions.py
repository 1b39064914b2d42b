"""Unanswered questions of a client: which question an answer belongs to, and which have timed out.

An answer names only the kind of question it belongs to. So questions of one kind are queued: the next one is sent when
the previous one is answered. An abandoned question keeps its place in the queue for a while, because its answer may
still come and would be mistaken for the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.client.events import AskQuestion, Reply, ReturnError, SessionAction
from swarm.errors import ClientError
from swarm.wire.messages import (
    AdapterCommand,
    AssetPart,
    ClientMessage,
    Describe,
    Description,
    GetAsset,
    GetRequest,
    Invite,
    Join,
    LookUp,
    PlanCommand,
    Query,
    Report,
    RequestDetails,
    Revoke,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    StopWorker,
    TokensSnapshot,
)

# seconds that an abandoned question keeps its place; with its own time limit, as long as a broker takes to answer
ABANDONED_S: Final = 10.0

# Which question a report answers.
_QUESTION_OF_REPORT: Final = {
    "asset": GetAsset,
    "join": Join,
    "stop": StopWorker,
    "steer": PlanCommand,
    "adapters": AdapterCommand,
    "settings": ShowSettings,
    "invite": Invite,
    "revoke": Revoke,
    "rotate": Rotate,
    "rotate_broker": RotateBroker,
    "rotate_member": RotateMember,
}


@dataclass(slots=True)
class _Question:
    ask: AskQuestion
    started: float  # time at which it was asked; shifted by pauses
    is_sent: bool = False  # sent to the broker
    abandoned_at: float | None = None  # time at which its caller stopped waiting

    @property
    def queue(self) -> object:
        """Its queue. None: it needs no queue, since its answer names its question or fits every asker."""
        question = self.ask.question
        if isinstance(question, Describe | GetRequest | LookUp):
            return None
        return question.what if isinstance(question, Query) else type(question)


@dataclass(slots=True)
class PendingQuestions:
    """Unanswered questions by their caller's key, in the order of asking."""

    _questions: dict[int, _Question] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._questions)

    def add(self, ask: AskQuestion, now: float) -> None:
        self._questions[ask.key] = _Question(ask, now)

    def take_due(self) -> list[ClientMessage]:
        """Return the questions that can be sent now, and mark them as sent."""
        busy_queues = {question.queue for question in self._questions.values() if question.is_sent} - {None}
        due: list[ClientMessage] = []
        for question in self._questions.values():
            if not question.is_sent and question.queue not in busy_queues:
                question.is_sent = True
                busy_queues |= {question.queue} - {None}
                due.append(question.ask.question)
        return due

    def abandon(self, key: int, now: float) -> None:
        question = self._questions.get(key)
        if question is not None and question.is_sent and question.queue is not None:
            question.abandoned_at = now
        else:
            self._questions.pop(key, None)

    def on_connected(self) -> list[ClientMessage]:
        """Return the questions to repeat to a newly connected broker: answers to earlier copies will not come."""
        self._questions = {key: question for key, question in self._questions.items() if question.abandoned_at is None}
        return [question.ask.question for question in self._questions.values() if question.is_sent]

    def pop_answered(self, message: Reply) -> list[int]:
        """Remove the questions that this message answers, and return the keys of callers that still wait. A description
        of the broker or of a request answers every caller that asked for it."""
        sent = [(key, question) for key, question in self._questions.items() if question.is_sent]
        answered = [(key, question) for key, question in sent if _answers(message, question.ask.question)]
        if not answered or not isinstance(answered[0][1].ask.question, Describe | GetRequest):
            answered = answered[:1]
        for key, _ in answered:
            del self._questions[key]
        return [key for key, question in answered if question.abandoned_at is None]

    def shift_deadlines(self, pause_s: float, now: float) -> None:
        """Shift the start of every question by a pause of this process."""
        for question in self._questions.values():
            question.started = min(now, question.started + pause_s)
            if question.abandoned_at is not None:
                question.abandoned_at = min(now, question.abandoned_at + pause_s)

    def expire(self, now: float) -> Iterator[tuple[int, float]]:
        """Abandon questions whose time limit has passed; yields their keys and limits. Remove those that were abandoned
        long ago."""
        for key, question in list(self._questions.items()):
            if question.abandoned_at is None and now >= question.started + question.ask.timeout_s:
                self.abandon(key, now)
                yield key, question.ask.timeout_s
            elif question.abandoned_at is not None and now >= question.abandoned_at + ABANDONED_S:
                del self._questions[key]

    def keys_where(self, condition: Callable[[float], bool]) -> list[int]:
        """Return the keys of questions whose start time satisfies the condition."""
        return [key for key, question in self._questions.items() if condition(question.started)]

    def fail(self, keys: Sequence[int], error: ClientError) -> list[SessionAction]:
        """Remove these questions; their callers get the error."""
        waiting = [key for key in keys if self._questions.pop(key).abandoned_at is None]
        return [ReturnError(key, error) for key in waiting]

    def fail_all(self, error: ClientError) -> list[SessionAction]:
        return self.fail(list(self._questions), error)


def _named_id(message: RequestDetails | TokensSnapshot | Report, name: str) -> object:
    """Return the request or question that an answer names."""
    match message:
        case Report(body=body):
            return body.get(name)
        case TokensSnapshot(question=number):
            return number
        case RequestDetails(submit=submit):
            return submit.request_id


def _answers(message: Reply, question: object) -> bool:  # noqa: PLR0911 (one line per kind of answer)
    match message, question:
        case Description(), Describe():
            return True
        case AssetPart(name=name, offset=offset), GetAsset():
            return question.name == name and question.offset == offset
        case Report(what=what), Query():
            return question.what == what
        case ((RequestDetails() | Report(what="recall")), GetRequest()):
            return _named_id(message, "request_id") == question.request_id
        case ((TokensSnapshot() | Report(what="look_up")), LookUp()):
            return _named_id(message, "question") == question.question
        case (
            Report(what=what),
            GetAsset()
            | Join()
            | StopWorker()
            | PlanCommand()
            | AdapterCommand()
            | ShowSettings()
            | Invite()
            | Revoke()
            | Rotate()
            | RotateBroker()
            | RotateMember(),
        ):
            return isinstance(question, _QUESTION_OF_REPORT.get(what, ()))
    return False

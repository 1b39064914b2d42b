"""Unanswered questions of a client: which question an answer belongs to, and which have timed out.

An answer names only the kind of question it belongs to. So questions of one kind are queued: the next one is sent when
the previous one is answered. An abandoned question keeps its place in the queue for a while, because its answer may
still come and would be mistaken for the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.client.events import Action, Ask, Reply, Unanswered
from swarm.errors import ClientError
from swarm.wire.messages import (
    AssetPart,
    ClientMessage,
    Describe,
    Description,
    GetAsset,
    Invite,
    Join,
    LookUp,
    Query,
    Recall,
    Recalled,
    Report,
    Revoke,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    Snapshot,
    Steer,
    StopWorker,
)

# seconds that an abandoned question keeps its place; with its own time limit, as long as a broker takes to answer
LEFT_S: Final = 10.0

# Which question a report answers.
_REPORTED: Final = {
    "asset": GetAsset,
    "join": Join,
    "stop": StopWorker,
    "steer": Steer,
    "settings": ShowSettings,
    "invite": Invite,
    "revoke": Revoke,
    "rotate": Rotate,
    "rotate_broker": RotateBroker,
    "rotate_member": RotateMember,
}


@dataclass(slots=True)
class _Question:
    ask: Ask
    started: float  # time at which it was asked; shifted by pauses
    is_said: bool = False  # sent to the broker
    left_at: float | None = None  # time at which its caller stopped waiting

    @property
    def line(self) -> object:
        """Its queue. None: it needs no queue, since its answer names its question or fits every asker."""
        question = self.ask.question
        if isinstance(question, Describe | Recall | LookUp):
            return None
        return question.what if isinstance(question, Query) else type(question)


@dataclass(slots=True)
class Questions:
    """Unanswered questions by their caller's key, in the order of asking."""

    _asked: dict[int, _Question] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, ask: Ask, now: float) -> None:
        self._asked[ask.key] = _Question(ask, now)

    def due(self) -> list[ClientMessage]:
        """Return the questions that can be sent now, and mark them as sent."""
        lines = {question.line for question in self._asked.values() if question.is_said} - {None}
        due: list[ClientMessage] = []
        for question in self._asked.values():
            if not question.is_said and question.line not in lines:
                question.is_said = True
                lines |= {question.line} - {None}
                due.append(question.ask.question)
        return due

    def withdraw(self, key: int, now: float) -> None:
        question = self._asked.get(key)
        if question is not None and question.is_said and question.line is not None:
            question.left_at = now
        else:
            self._asked.pop(key, None)

    def connect(self) -> list[ClientMessage]:
        """Return the questions to repeat to a newly connected broker: answers to earlier copies will not come."""
        self._asked = {key: question for key, question in self._asked.items() if question.left_at is None}
        return [question.ask.question for question in self._asked.values() if question.is_said]

    def answered_by(self, message: Reply) -> list[int]:
        """Remove the questions that this message answers, and return the keys of callers that still wait. A description
        of the broker or of a request answers every caller that asked for it."""
        said = [(key, question) for key, question in self._asked.items() if question.is_said]
        found = [(key, question) for key, question in said if _answers(message, question.ask.question)]
        if not found or not isinstance(found[0][1].ask.question, Describe | Recall):
            found = found[:1]
        for key, _ in found:
            del self._asked[key]
        return [key for key, question in found if question.left_at is None]

    def forgive(self, pause_s: float, now: float) -> None:
        """Shift the start of every question by a pause of this process."""
        for question in self._asked.values():
            question.started = min(now, question.started + pause_s)
            if question.left_at is not None:
                question.left_at = min(now, question.left_at + pause_s)

    def late(self, now: float) -> Iterator[tuple[int, float]]:
        """Abandon questions whose time limit has passed; yields their keys and limits. Remove those that were abandoned
        long ago."""
        for key, question in list(self._asked.items()):
            if question.left_at is None and now >= question.started + question.ask.timeout_s:
                self.withdraw(key, now)
                yield key, question.ask.timeout_s
            elif question.left_at is not None and now >= question.left_at + LEFT_S:
                del self._asked[key]

    def keys_where(self, holds: Callable[[float], bool]) -> list[int]:
        """Return the keys of questions whose start time satisfies the condition."""
        return [key for key, question in self._asked.items() if holds(question.started)]

    def fail(self, keys: Sequence[int], error: ClientError) -> list[Action]:
        """Remove these questions; their callers get the error."""
        waiting = [key for key in keys if self._asked.pop(key).left_at is None]
        return [Unanswered(key, error) for key in waiting]

    def fail_all(self, error: ClientError) -> list[Action]:
        return self.fail(list(self._asked), error)


def _named(message: Recalled | Snapshot | Report, name: str) -> object:
    """Return the request or question that an answer names."""
    match message:
        case Report(body=body):
            return body.get(name)
        case Snapshot(question=number):
            return number
        case Recalled(submit=submit):
            return submit.request_id


def _answers(message: Reply, question: object) -> bool:  # noqa: PLR0911 (one line per kind of answer)
    match message, question:
        case Description(), Describe():
            return True
        case AssetPart(name=name, offset=offset), GetAsset():
            return question.name == name and question.offset == offset
        case Report(what=what), Query():
            return question.what == what
        case ((Recalled() | Report(what="recall")), Recall()):
            return _named(message, "request_id") == question.request_id
        case ((Snapshot() | Report(what="look_up")), LookUp()):
            return _named(message, "question") == question.question
        case (
            Report(what=what),
            GetAsset()
            | Join()
            | StopWorker()
            | Steer()
            | ShowSettings()
            | Invite()
            | Revoke()
            | Rotate()
            | RotateBroker()
            | RotateMember(),
        ):
            return isinstance(question, _REPORTED.get(what, ()))
    return False

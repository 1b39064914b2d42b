"""The questions of a client that are not answered yet: whom an answer is for, and who has waited too long. Pure."""

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
    Query,
    Recall,
    Recalled,
    Report,
    Revoke,
    Rotate,
    RotateBroker,
    RotateMember,
    ShowSettings,
    Steer,
    StopWorker,
)

# Which report answers what.
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
    started: float


@dataclass(slots=True)
class Questions:
    """Questions by the key that their asker knows them by, in the order of asking."""

    _asked: dict[int, _Question] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._asked)

    @property
    def texts(self) -> list[ClientMessage]:
        """The questions as they are sent."""
        return [question.ask.question for question in self._asked.values()]

    def take(self, ask: Ask, now: float) -> None:
        self._asked[ask.key] = _Question(ask, now)

    def withdraw(self, key: int) -> None:
        self._asked.pop(key, None)

    def answered_by(self, message: Reply) -> list[int]:
        """Forget the questions that this message answers; returns their keys."""
        keys = [key for key, question in self._asked.items() if _answers(message, question.ask.question)]
        if not isinstance(message, Description):
            keys = keys[:1]  # answers come in the order of the questions
        for key in keys:
            del self._asked[key]
        return keys

    def forgive(self, pause_s: float, now: float) -> None:
        """Let every question begin later by a pause of this process."""
        for question in self._asked.values():
            question.started = min(now, question.started + pause_s)

    def late(self, now: float) -> Iterator[tuple[int, float]]:
        """Name those whose time limit is over, and that limit."""
        for key, question in list(self._asked.items()):
            if now >= question.started + question.ask.timeout_s:
                yield key, question.ask.timeout_s

    def keys_where(self, holds: Callable[[float], bool]) -> list[int]:
        """The questions of whose beginning this holds."""
        return [key for key, question in self._asked.items() if holds(question.started)]

    def fail(self, keys: Sequence[int], error: ClientError) -> list[Action]:
        """Forget these questions; their askers get the error."""
        for key in keys:
            del self._asked[key]
        return [Unanswered(key, error) for key in keys]

    def fail_all(self, error: ClientError) -> list[Action]:
        return self.fail(list(self._asked), error)


def _answers(message: Reply, question: object) -> bool:
    match message, question:
        case Description(), Describe():
            return True
        case AssetPart(name=name, offset=offset), GetAsset():
            return question.name == name and question.offset == offset
        case Report(what=what), Query():
            return question.what == what
        case ((Recalled() | Report(what="recall")), Recall()):
            of = message.submit.request_id if isinstance(message, Recalled) else message.body.get("request_id")
            return of == question.request_id
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

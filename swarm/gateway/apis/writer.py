"""Interface of an API's answer encoders: the answer as one object, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from swarm.gateway.answer import AnswerPart, TokenCounts
from swarm.gateway.errors import ApiError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One server-sent event."""

    data: bytes
    event: str = ""

    def encode(self, event_id: str = "") -> bytes:
        """Encode the event, with this id if it has one."""
        number = f"id: {event_id}\n".encode() if event_id else b""
        name = f"event: {self.event}\n".encode() if self.event else b""
        return number + name + b"data: " + self.data + b"\n\n"


class JsonLine(SseEvent):
    """One line of a stream of JSON lines, which have no ids and no names."""

    __slots__ = ()

    def encode(self, event_id: str = "") -> bytes:
        return self.data + b"\n"


class EventTemplate:
    """Template of an event of which only one text changes, wherever it occurs: the rest of its JSON is encoded once."""

    PLACEHOLDER = "\x00text\x00"  # cannot occur in JSON unescaped

    def __init__(self, body: Json) -> None:
        """Create the template. ``body`` has ``PLACEHOLDER`` in place of the text."""
        self._around = msgspec.json.encode(body).split(msgspec.json.encode(self.PLACEHOLDER))

    def render(self, text: str) -> SseEvent:
        return SseEvent(msgspec.json.encode(text).join(self._around))


def parse_arguments(text: str) -> Json:
    """Return a call's arguments as an object. Arguments that were cut off become {}; the answer's end shows the cut."""
    try:
        return msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError:
        return {}


class AnswerWriter(Protocol):
    """Encoder of one answer. Its output depends on the parts alone, not on time or chance."""

    def start_events(self, num_prompt: int = 0) -> Sequence[SseEvent]:
        """Return the events before the first part. ``num_prompt``: tokens of the prompt."""
        ...

    def write(self, part: AnswerPart) -> Sequence[SseEvent]: ...

    def end_events(self, counts: TokenCounts) -> Sequence[SseEvent]:
        """Return the events after the last part."""
        ...

    def error_events(self, problem: ApiError) -> Sequence[SseEvent]:
        """Return the events that end a stream with an error."""
        ...

    def full_response(self, parts: Sequence[AnswerPart], counts: TokenCounts) -> Json:
        """Return the answer as one object."""
        ...

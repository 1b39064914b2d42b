"""Interface of an API's answer encoders: the answer as one object, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from swarm.gateway.answer import Counts, Part
from swarm.gateway.errors import Problem

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sse:
    """One server-sent event."""

    data: bytes
    event: str = ""

    def encode(self) -> bytes:
        name = f"event: {self.event}\n".encode() if self.event else b""
        return name + b"data: " + self.data + b"\n\n"


class Mould:
    """Template of an event of which only one text changes: the rest of its JSON is encoded once."""

    HOLE = "\x00text\x00"  # cannot occur in JSON unescaped

    def __init__(self, body: Json) -> None:
        """Create the template. ``body`` has ``PLACEHOLDER`` in place of the text."""
        self._before, _, self._after = msgspec.json.encode(body).partition(msgspec.json.encode(self.HOLE))

    def cast(self, text: str) -> Sse:
        return Sse(self._before + msgspec.json.encode(text) + self._after)


class Writer(Protocol):
    """Encoder of one answer. Its output depends on the parts alone, not on time or chance."""

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        """Return the events before the first part. ``num_prompt``: tokens of the prompt."""
        ...

    def write(self, part: Part) -> Sequence[Sse]: ...

    def tail(self, counts: Counts) -> Sequence[Sse]:
        """Return the events after the last part."""
        ...

    def failed(self, problem: Problem) -> Sequence[Sse]:
        """Return the events that end a stream with an error."""
        ...

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        """Return the answer as one object."""
        ...

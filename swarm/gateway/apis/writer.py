"""What an API must be able to do with an answer: write it whole, or as the events of a stream."""

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
    """One event of a stream."""

    data: bytes
    event: str = ""

    def encode(self) -> bytes:
        name = f"event: {self.event}\n".encode() if self.event else b""
        return name + b"data: " + self.data + b"\n\n"


class Mould:
    """An event of which only one text changes: everything else of its JSON is written once."""

    HOLE = "\x00text\x00"  # in no JSON as it is

    def __init__(self, body: Json) -> None:
        """``body`` has ``HOLE`` where the text shall stand."""
        self._before, _, self._after = msgspec.json.encode(body).partition(msgspec.json.encode(self.HOLE))

    def cast(self, text: str) -> Sse:
        return Sse(self._before + msgspec.json.encode(text) + self._after)


class Writer(Protocol):
    """Writes one answer. What it writes depends on the parts alone: no clock, no chance."""

    def head(self, num_prompt: int = 0) -> Sequence[Sse]:
        """Events before the first part. ``num_prompt``: tokens of the prompt."""
        ...

    def write(self, part: Part) -> Sequence[Sse]: ...

    def tail(self, counts: Counts) -> Sequence[Sse]:
        """Events behind the last part."""
        ...

    def failed(self, problem: Problem) -> Sequence[Sse]:
        """Events that end a stream which can't go on."""
        ...

    def whole(self, parts: Sequence[Part], counts: Counts) -> Json:
        """The answer as one object."""
        ...

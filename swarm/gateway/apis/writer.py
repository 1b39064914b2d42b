"""What an API must be able to do with an answer: write it whole, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

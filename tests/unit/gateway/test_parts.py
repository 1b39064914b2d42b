"""From the pieces of a continuation to the parts of an answer, and why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.client.results import Piece
from swarm.gateway.answer import CallBegins, End, Part, Text
from swarm.gateway.ask import Tool, ToolUse
from swarm.gateway.desk.parts import Parts
from swarm.gateway.tools.families import OWN

HERMES = OWN["hermes"]({})
TOOLS = ToolUse((Tool("weather"),))
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def parts_of(use: ToolUse, *texts: str, reason: str = "stop", **last: Any) -> list[Part]:
    """The parts of one continuation, whose last token has no text."""
    parts = Parts("r", use, HERMES)
    pieces = [Piece(number, text, number) for number, text in enumerate(texts)]
    pieces.append(Piece(99, "", len(texts), finish_reason=reason, **last))
    return [part for piece in pieces for part in parts.take(piece)]


@pytest.mark.parametrize("use", [ToolUse(), TOOLS])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_ends_as_it_ended(use: ToolUse, reason: str) -> None:
    """At its cap, by length: whether tools are offered or not."""
    parts = parts_of(use, "one ", "two", reason=reason)
    assert parts[-1] == End(0, reason, 3)  # type: ignore[arg-type]
    assert "".join(part.text for part in parts if isinstance(part, Text)) == "one two"


def test_an_answer_that_calls_ends_by_its_calls() -> None:
    """But one that was cut off was cut off."""
    for reason, told in (("stop", "tool_calls"), ("length", "length")):
        parts = parts_of(TOOLS, "I look. ", CALL, reason=reason)
        assert [part.name for part in parts if isinstance(part, CallBegins)] == ["weather"]
        assert parts[-1] == End(0, told, 3)  # type: ignore[arg-type]


def test_the_stop_string_is_told() -> None:
    assert parts_of(ToolUse(), "one", stop="END")[-1] == End(0, "stop", 2, "END")

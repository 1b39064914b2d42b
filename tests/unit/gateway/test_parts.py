"""From the pieces of a continuation to the parts of an answer, and why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.client.results import Piece
from swarm.gateway.answer import AnswerPart, CallStartPart, ChoiceEndPart, TextPart
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.tool_calls.formats import BUILT_IN

HERMES = BUILT_IN["hermes"]({})
TOOLS = ToolOptions((Tool("weather"),))
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def parts_of(use: ToolOptions, *texts: str, reason: str = "stop", **last: Any) -> list[AnswerPart]:
    """The parts of one continuation, whose last token has no text."""
    parts = AnswerAssembler("r", use, HERMES)
    pieces = [Piece(number, text, number) for number, text in enumerate(texts)]
    pieces.append(Piece(99, "", len(texts), finish_reason=reason, **last))
    return [part for piece in pieces for part in parts.add(piece)]


@pytest.mark.parametrize("use", [ToolOptions(), TOOLS])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_ends_as_it_ended(use: ToolOptions, reason: str) -> None:
    """At its cap, by length: whether tools are offered or not."""
    parts = parts_of(use, "one ", "two", reason=reason)
    assert parts[-1] == ChoiceEndPart(0, reason, 3)  # type: ignore[arg-type]
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == "one two"


def test_an_answer_that_calls_ends_by_its_calls() -> None:
    """But one that was cut off was cut off."""
    for reason, told in (("stop", "tool_calls"), ("length", "length")):
        parts = parts_of(TOOLS, "I look. ", CALL, reason=reason)
        assert [part.name for part in parts if isinstance(part, CallStartPart)] == ["weather"]
        assert parts[-1] == ChoiceEndPart(0, told, 3)  # type: ignore[arg-type]


def test_the_stop_string_is_told() -> None:
    assert parts_of(ToolOptions(), "one", stop="END")[-1] == ChoiceEndPart(0, "stop", 2, "END")

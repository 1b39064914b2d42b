"""From the pieces of a continuation to the parts of an answer, and why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.client.results import Piece
from swarm.gateway.answer import AnswerPart, CallStartPart, ChoiceEndPart, ReasoningPart, TextPart
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.completion_request import Tool, ToolOptions
from swarm.gateway.reasoning.marks import think
from swarm.gateway.tool_calls.formats import BUILT_IN
from swarm.wire.messages import TokenLogprob

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


def thought_parts(
    use: ToolOptions, *texts: str, is_opened: bool = False, **fields: Any
) -> tuple[list[AnswerPart], int]:
    """The parts of an answer that may begin with thinking, and how many of its tokens count as thinking."""
    parts = AnswerAssembler("r", use, HERMES, reasoning=lambda: think().parser(is_opened=is_opened))
    pieces = [Piece(number, text, number, **fields) for number, text in enumerate(texts)]
    pieces.append(Piece(99, "", len(texts), finish_reason="stop"))
    return [part for piece in pieces for part in parts.add(piece)], parts.num_reasoning


def test_thinking_precedes_text_and_calls() -> None:
    """A call within the thinking is none."""
    parts, _ = thought_parts(TOOLS, "<think>", CALL, "</think>", "I look. ", CALL)
    assert [part.text for part in parts if isinstance(part, ReasoningPart)] == [CALL]
    assert [part.text for part in parts if isinstance(part, TextPart)] == ["I look."]
    assert [part.name for part in parts if isinstance(part, CallStartPart)] == ["weather"]
    assert parts[-1] == ChoiceEndPart(0, "tool_calls", 6)


@pytest.mark.parametrize(
    ("texts", "is_opened", "num_tokens"),
    [
        (("<think>", "Hm", "</think>", "\n\n", "Yes"), False, 3),
        (("<th", "ink>", "Hm", "</", "think>", "Yes", "."), False, 5),
        (("Hm", ".", "</think>", "Yes"), True, 3),
        (("<th", "at", " is"), False, 0),
        (("Hm", "."), True, 3),
    ],
)
def test_thinking_is_counted_with_its_marks(texts: tuple[str, ...], is_opened: bool, num_tokens: int) -> None:
    """Also the token that ends the answer, if it ends within the thinking."""
    for use in (ToolOptions(), TOOLS):
        assert thought_parts(use, *texts, is_opened=is_opened)[1] == num_tokens


def test_each_token_s_log_probability_comes_once() -> None:
    """With the text of its token or a later one, also those of marks."""
    logprobs = (TokenLogprob(1, -0.5),)
    parts, _ = thought_parts(ToolOptions(), "<think>", "Hm", "</think>", "\n", "Yes", logprobs=logprobs)
    texts = [part for part in parts if isinstance(part, TextPart | ReasoningPart)]
    assert [len([piece for piece in part.pieces if piece.logprobs]) for part in texts] == [2, 3]

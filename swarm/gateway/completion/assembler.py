"""Answer assembler: turns the pieces of a request into the parts of its answer (thinking, text, calls, ends). Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2s

from swarm.client.results import Piece
from swarm.gateway.answer import (
    AnswerPart,
    CallArgumentsPart,
    CallEndPart,
    CallStartPart,
    ChoiceEndPart,
    FinishReason,
    ReasoningPart,
    TextPart,
)
from swarm.gateway.completion_request import ToolOptions
from swarm.gateway.reasoning.format import Phase, ReasoningDelta, ReasoningParser, ReasoningResult
from swarm.gateway.tool_calls.format import (
    ArgumentsDelta,
    CallStarted,
    ParseResult,
    TextDelta,
    ToolCallFormat,
    ToolCallParser,
)


def make_call_id(request_id: str, choice: int, number: int) -> str:
    """Return the id of a call, which is the same at every gateway."""
    return "call_" + blake2s(f"{request_id}/{choice}/{number}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class _Choice:
    parser: ToolCallParser | None  # parser for tool calls; None if no tools are offered
    reasoning: ReasoningParser | None  # parser for thinking; None if none is split off
    num_calls: int = 0
    num_tokens: int = 0
    num_reasoning: int = 0  # tokens of the thinking, with its marks
    num_undecided: int = 0  # tokens that may turn out to be of the thinking
    untold_pieces: list[Piece] = field(default_factory=list)  # pieces whose text has not been returned yet

    def take_pieces(self) -> tuple[Piece, ...]:
        """Return the pieces that no part has had, for the next part."""
        pieces, self.untold_pieces = tuple(self.untold_pieces), []
        return pieces


class AnswerAssembler:
    """Assembles the parts of one answer. ``reasoning`` makes a parser that splits off the thinking. If tools are
    offered, the model's tool-call format parses calls from the rest."""

    def __init__(
        self,
        request_id: str,
        use: ToolOptions,
        family: ToolCallFormat,
        num_choices: int = 1,
        reasoning: Callable[[], ReasoningParser | None] = lambda: None,
    ) -> None:
        self._request_id, self.num_choices = request_id, num_choices
        self._choices = [
            _Choice(family.parser(use) if use.are_offered else None, reasoning()) for _ in range(num_choices)
        ]

    @property
    def num_reasoning(self) -> int:
        """Number of tokens so far that are thinking."""
        return sum(choice.num_reasoning for choice in self._choices)

    def add(self, piece: Piece) -> list[AnswerPart]:
        choice = self._choices[piece.choice]
        choice.num_tokens += piece.token is not None
        if choice.parser is None and choice.reasoning is None:
            parts = self._plain_text(choice, piece)
        else:
            choice.untold_pieces.append(piece)
            parts = self._split_thinking(choice, piece)
        if piece.finish_reason is not None:
            parts += self._end(choice, piece)
        return parts

    def _plain_text(self, choice: _Choice, piece: Piece) -> list[AnswerPart]:
        if not piece.text and not piece.logprobs and not piece.hops:
            return []
        return [TextPart(piece.choice, piece.text, (piece,))]

    def _split_thinking(self, choice: _Choice, piece: Piece) -> list[AnswerPart]:
        """Parse a piece's text, and count its token."""
        parser = choice.reasoning
        if parser is None:
            return self._parse_calls(piece.choice, choice, piece.text)
        before = parser.phase
        results = parser.push(piece.text) if piece.text else ()
        if before is not Phase.ANSWERING and piece.token is not None:
            choice.num_undecided += 1
        if before is Phase.THINKING or parser.phase is Phase.THINKING:
            choice.num_reasoning += choice.num_undecided
        if parser.phase is not Phase.UNDECIDED:
            choice.num_undecided = 0
        return self._convert_reasoning(piece.choice, choice, results)

    def _convert_reasoning(self, index: int, choice: _Choice, results: Sequence[ReasoningResult]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for result in results:
            if isinstance(result, ReasoningDelta):
                parts.append(ReasoningPart(index, result.text, choice.take_pieces()))
            else:
                parts += self._parse_calls(index, choice, result.text)
        return parts

    def _parse_calls(self, index: int, choice: _Choice, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if choice.parser is None:
            return [TextPart(index, text, choice.take_pieces())]
        return self._convert(index, choice, choice.parser.push(text))

    def _convert(self, index: int, choice: _Choice, results: Sequence[ParseResult]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for result in results:
            if isinstance(result, TextDelta):
                parts.append(TextPart(index, result.text, choice.take_pieces()))
            elif isinstance(result, CallStarted):
                number, choice.num_calls = choice.num_calls, choice.num_calls + 1
                parts.append(CallStartPart(index, number, make_call_id(self._request_id, index, number), result.name))
            elif isinstance(result, ArgumentsDelta):
                parts.append(CallArgumentsPart(index, choice.num_calls - 1, result.text))
            else:
                parts.append(CallEndPart(index, choice.num_calls - 1))
        return parts

    def _end(self, choice: _Choice, piece: Piece) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if choice.reasoning is not None:
            parts += self._convert_reasoning(piece.choice, choice, choice.reasoning.finish())
        if choice.parser is not None:
            parts += self._convert(piece.choice, choice, choice.parser.finish())
        if any(each.logprobs or each.hops for each in choice.untold_pieces):
            parts.append(TextPart(piece.choice, "", tuple(choice.untold_pieces)))
        reason: FinishReason = "length" if piece.finish_reason == "length" else "stop"
        if choice.num_calls and reason == "stop":
            reason = "tool_calls"
        return [*parts, ChoiceEndPart(piece.choice, reason, choice.num_tokens, piece.stop)]

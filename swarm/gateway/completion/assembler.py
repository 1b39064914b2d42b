"""Answer assembler: turns the pieces of a request into the parts of its answer (text, calls, ends). Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
    TextPart,
)
from swarm.gateway.completion_request import ToolOptions
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
    num_calls: int = 0
    num_tokens: int = 0
    untold_pieces: list[Piece] = field(default_factory=list)  # pieces whose text has not been returned yet


class AnswerAssembler:
    """Assembles the parts of one answer. If tools are offered, the model's tool-call format parses calls from the
    text."""

    def __init__(self, request_id: str, use: ToolOptions, family: ToolCallFormat, num_choices: int = 1) -> None:
        self._request_id, self.num_choices = request_id, num_choices
        self._choices = [_Choice(family.parser(use) if use.are_offered else None) for _ in range(num_choices)]

    def add(self, piece: Piece) -> list[AnswerPart]:
        choice = self._choices[piece.choice]
        choice.num_tokens += piece.token is not None
        if choice.parser is None:
            parts = self._plain_text(choice, piece)
        else:
            choice.untold_pieces.append(piece)
            parts = self._convert(piece.choice, choice, choice.parser.push(piece.text)) if piece.text else []
        if piece.finish_reason is not None:
            parts += self._end(choice, piece)
        return parts

    def _plain_text(self, choice: _Choice, piece: Piece) -> list[AnswerPart]:
        if not piece.text and not piece.logprobs and not piece.hops:
            return []
        return [TextPart(piece.choice, piece.text, (piece,))]

    def _convert(self, index: int, choice: _Choice, results: Sequence[ParseResult]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for result in results:
            if isinstance(result, TextDelta):
                pieces, choice.untold_pieces = tuple(choice.untold_pieces), []
                parts.append(TextPart(index, result.text, pieces))
            elif isinstance(result, CallStarted):
                number, choice.num_calls = choice.num_calls, choice.num_calls + 1
                parts.append(CallStartPart(index, number, make_call_id(self._request_id, index, number), result.name))
            elif isinstance(result, ArgumentsDelta):
                parts.append(CallArgumentsPart(index, choice.num_calls - 1, result.text))
            else:
                parts.append(CallEndPart(index, choice.num_calls - 1))
        return parts

    def _end(self, choice: _Choice, piece: Piece) -> list[AnswerPart]:
        parts = [] if choice.parser is None else self._convert(piece.choice, choice, choice.parser.finish())
        if any(each.logprobs or each.hops for each in choice.untold_pieces):
            parts.append(TextPart(piece.choice, "", tuple(choice.untold_pieces)))
        reason: FinishReason = "length" if piece.finish_reason == "length" else "stop"
        if choice.num_calls and reason == "stop":
            reason = "tool_calls"
        return [*parts, ChoiceEndPart(piece.choice, reason, choice.num_tokens, piece.stop)]

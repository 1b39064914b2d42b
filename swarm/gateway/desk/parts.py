"""Answer assembler: turns the pieces of a request into the parts of its answer (text, calls, ends). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2s

from swarm.client.results import Piece
from swarm.gateway.answer import CallBegins, CallEnds, CallText, End, Part, Reason, Text
from swarm.gateway.ask import ToolUse
from swarm.gateway.tools.family import Argued, Begun, CallReader, Family, Found, Said


def call_id(request_id: str, choice: int, number: int) -> str:
    """Return the id of a call, which is the same at every gateway."""
    return "call_" + blake2s(f"{request_id}/{choice}/{number}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class _Choice:
    reader: CallReader | None  # parser for tool calls; None if no tools are offered
    num_calls: int = 0
    num_tokens: int = 0
    silent: list[Piece] = field(default_factory=list)  # pieces whose text has not been returned yet


class Parts:
    """Assembles the parts of one answer. If tools are offered, the model's tool-call format parses calls from the
    text."""

    def __init__(self, request_id: str, use: ToolUse, family: Family, num_choices: int = 1) -> None:
        self._request_id, self.num_choices = request_id, num_choices
        self._choices = [_Choice(family.reader(use) if use.offered else None) for _ in range(num_choices)]

    def take(self, piece: Piece) -> list[Part]:
        choice = self._choices[piece.choice]
        choice.num_tokens += piece.token is not None
        if choice.reader is None:
            parts = self._plain(choice, piece)
        else:
            choice.silent.append(piece)
            parts = self._read(piece.choice, choice, choice.reader.push(piece.text)) if piece.text else []
        if piece.finish_reason is not None:
            parts += self._end(choice, piece)
        return parts

    def _plain(self, choice: _Choice, piece: Piece) -> list[Part]:
        if not piece.text and not piece.logprobs and not piece.hops:
            return []
        return [Text(piece.choice, piece.text, (piece,))]

    def _read(self, index: int, choice: _Choice, found: Sequence[Found]) -> list[Part]:
        parts: list[Part] = []
        for each in found:
            if isinstance(each, Said):
                pieces, choice.silent = tuple(choice.silent), []
                parts.append(Text(index, each.text, pieces))
            elif isinstance(each, Begun):
                number, choice.num_calls = choice.num_calls, choice.num_calls + 1
                parts.append(CallBegins(index, number, call_id(self._request_id, index, number), each.name))
            elif isinstance(each, Argued):
                parts.append(CallText(index, choice.num_calls - 1, each.text))
            else:
                parts.append(CallEnds(index, choice.num_calls - 1))
        return parts

    def _end(self, choice: _Choice, piece: Piece) -> list[Part]:
        parts = [] if choice.reader is None else self._read(piece.choice, choice, choice.reader.finish())
        if any(each.logprobs or each.hops for each in choice.silent):
            parts.append(Text(piece.choice, "", tuple(choice.silent)))
        reason: Reason = "length" if piece.finish_reason == "length" else "stop"
        if choice.num_calls and reason == "stop":
            reason = "tool_calls"
        return [*parts, End(piece.choice, reason, choice.num_tokens, piece.stop)]

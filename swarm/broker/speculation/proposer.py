"""Interface of proposers, which guess how a sequence goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from swarm.broker.state import Sequence

ProposerName = Literal["suffix", "draft", "grammar"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence's tokens, the next one first, and the proposer that guessed them."""

    proposer: ProposerName
    tokens: tuple[int, ...]


class Proposer(Protocol):
    """Guesses tokens. An implementation is pure: it keeps state in memory, and neither waits nor computes for long."""

    @property
    def name(self) -> ProposerName: ...

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that may follow ``sequence.tokens``; none without a confident guess."""

    def forget(self, sequence: int) -> None:
        """Drop what is kept for a running sequence, which has ended or left the stages."""

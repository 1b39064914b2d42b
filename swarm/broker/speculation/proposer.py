"""Interface of proposers, which guess how a sequence goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarm.broker.state import Sequence

ProposerName = Literal["suffix", "draft", "grammar"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence's tokens, the next one first, and the proposer that guessed them.

    ``strength``: how certain the proposer is, from 0 on. Proposals of equal strength should be accepted equally often;
    the control of the depth learns how often.
    """

    proposer: ProposerName
    tokens: tuple[int, ...]
    strength: int = 0


class Proposer(Protocol):
    """Guesses tokens. An implementation is pure: it keeps state in memory, and neither waits nor computes for long."""

    @property
    def name(self) -> ProposerName: ...

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that may follow ``sequence.tokens``; none without a confident guess."""

    def forget(self, sequence: int) -> None:
        """Drop what is kept for a running sequence, which has ended or left the stages."""


@runtime_checkable
class AsyncProposer(Proposer, Protocol):
    """Proposer whose guesses are computed elsewhere, and for which a sequence may wait for a while."""

    def prepare(self, sequence: Sequence, most: int, now: float) -> float | None:
        """Order a proposal of at most ``most`` tokens for a running sequence whose next token has become due. Return
        the time until which the sequence is worth delaying for it; None: it is not delayed.

        ``Speculation`` calls it once after each step that gave the sequence tokens. The sequence joins no step until
        ``Speculation.end_wait`` is called or the time has passed. When the answer has arrived, the owner of the
        proposer stores it for ``propose`` and calls ``end_wait``.
        """

    def record(self, sequence: int, num_proposed: int, num_accepted: int) -> None:
        """Record how many tokens of the proposal that ``propose`` returned last were accepted."""


@runtime_checkable
class IndexingProposer(Proposer, Protocol):
    """Proposer that prepares for guesses while prompts are computed."""

    def begin_step(self, prefilling: Iterable[Sequence]) -> None:
        """Begin a step that computes parts of these sequences' prompts. Its proposals are asked for afterwards."""


@runtime_checkable
class RatedProposer(Proposer, Protocol):
    """Proposer some of whose guesses are more certain than others."""

    def strength(self, sequence: int) -> int:
        """Return the strength of the last proposal for a sequence (see ``Proposal``)."""

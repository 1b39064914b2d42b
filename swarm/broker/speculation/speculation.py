"""Speculation: which tokens are proposed for a sequence, and how often proposals were accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from swarm.broker.speculation.proposer import AsyncProposer, Proposal, Proposer
from swarm.wire.messages import MAX_PROPOSED

if TYPE_CHECKING:
    from swarm.broker.state import Sequence


class Speculation:
    """The proposers, and the sequences that wait for one of them."""

    def __init__(self, proposers: Iterable[Proposer] = ()) -> None:
        self.proposers = tuple(proposers)
        self._waits: dict[int, float] = {}  # sequence -> time until which it waits for its proposal

    @property
    def is_active(self) -> bool:
        return bool(self.proposers)

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        """Return the best proposal of at most ``most`` tokens; None without one."""
        best: Proposal | None = None
        for proposer in self.proposers:
            tokens = proposer.propose(sequence, min(most, MAX_PROPOSED))
            if tokens and (best is None or len(tokens) > len(best.tokens)):
                best = Proposal(proposer.name, tokens)
        return best

    def record(self, sequence: Sequence, proposer: str, num_proposed: int, num_accepted: int) -> None:
        """Record how many tokens of a proposal were accepted."""
        for each in self.proposers:
            if each.name == proposer and isinstance(each, AsyncProposer):
                each.record(sequence.id, num_proposed, num_accepted)

    def prepare(self, sequence: Sequence, most: int, now: float) -> None:
        """Order proposals for a sequence whose next token has become due."""
        for proposer in self.proposers:
            if isinstance(proposer, AsyncProposer):
                until = proposer.prepare(sequence, most, now)
                if until is not None and until > now:
                    self._waits[sequence.id] = until

    def is_waiting(self, sequence: Sequence, now: float) -> bool:
        """Whether the sequence waits for a proposal and joins no step yet."""
        until = self._waits.get(sequence.id)
        if until is None:
            return False
        if now < until:
            return True
        del self._waits[sequence.id]
        return False

    def end_wait(self, sequence: int) -> None:
        """Let a sequence join the next step: its proposal has arrived, or will not."""
        self._waits.pop(sequence, None)

    def forget(self, sequence: int) -> None:
        """Drop what is kept for a sequence that has ended or left the stages."""
        self._waits.pop(sequence, None)
        for proposer in self.proposers:
            proposer.forget(sequence)

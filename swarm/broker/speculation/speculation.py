"""Speculation: which proposer guesses for a sequence, and how often its proposals were accepted.

A mode names the proposers that may guess: the broker's setting, or a request's own. A request can choose among the
broker's proposers; it can't add one. Tokens that a grammar forces are proposed unless the mode is ``off``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from swarm.broker.speculation.depth import DepthControl, Offer
from swarm.broker.speculation.grammar import GrammarProposer
from swarm.broker.speculation.proposer import AsyncProposer, IndexingProposer, Proposal, Proposer, RatedProposer
from swarm.broker.state.lifecycle import SequenceState
from swarm.params import SpeculationMode
from swarm.series import POWERS, Histogram
from swarm.wire.messages import MAX_PROPOSED, Json

MAX_REPORTED = 16  # positions of proposals in reports
# first positions of the groups for which metrics count tokens
GROUPS = (*range(9), 16)
_KEEP = 0.99  # per step: factor on the largest number of tokens of a step, so that it follows

if TYPE_CHECKING:
    from swarm.broker.state import Sequence
    from swarm.wire.messages import ForcedTokens


@dataclass(slots=True)
class ProposerFigures:
    """Number of proposals of one proposer, of their tokens, and of the tokens that were accepted."""

    num_proposals: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    # by position in a proposal: how often it was proposed, and accepted
    proposed_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def acceptance(self) -> list[float]:
        """Return the share of accepted tokens at the first positions of proposals."""
        most = max(self.proposed_at, default=-1) + 1
        return [round(self.accepted_at[n] / self.proposed_at[n], 3) for n in range(min(most, MAX_REPORTED))]

    def by_position(self) -> Json:
        """Return the numbers of proposed and accepted tokens by position in their proposals, from 1 on; later positions
        are grouped."""
        counts: Json = {}
        for first, stop in pairwise((*GROUPS, MAX_PROPOSED)):
            name = str(stop) if stop == first + 1 else f"{first + 1}-{stop}"
            counts[name] = {
                "proposed": sum(self.proposed_at[at] for at in range(first, stop)),
                "accepted": sum(self.accepted_at[at] for at in range(first, stop)),
            }
        return counts

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Add a proposal that was verified."""
        self.num_proposals += 1
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self.proposed_at.update(range(num_proposed))
        self.accepted_at.update(range(num_accepted))


class Speculation:
    """The proposers, and the sequences that wait for one of them. ``mode``: for requests that choose none. ``control``:
    how many tokens are proposed; None: as many as there are."""

    def __init__(
        self,
        proposers: Iterable[Proposer] = (),
        mode: SpeculationMode = "auto",
        control: DepthControl | None = None,
    ) -> None:
        self.mode = mode
        self.control = control
        self._grammar = GrammarProposer()
        self.proposers: tuple[Proposer, ...] = () if mode == "off" else (self._grammar, *proposers)
        self._rated = tuple(p for p in self.proposers if isinstance(p, RatedProposer))
        self._indexing = tuple(p for p in self.proposers if isinstance(p, IndexingProposer))
        self._async = tuple(p for p in self.proposers if isinstance(p, AsyncProposer))
        self.figures: dict[str, ProposerFigures] = {p.name: ProposerFigures() for p in self.proposers}
        self.accepted_lengths = Histogram((0.0, *POWERS[:7]))  # accepted tokens of each proposal
        self.max_tokens_per_step = 1.0  # largest number of tokens that a recent step has given a sequence
        self._tracked: dict[int, Sequence] = {}  # sequences of which proposers may keep something
        self._waits: dict[int, float] = {}  # sequence -> time until which it waits for its proposal

    @property
    def is_active(self) -> bool:
        return bool(self.proposers)

    def begin_step(self, prefilling: Many[Sequence]) -> None:
        """Let proposers prepare for the sequences of which a step computes parts of the prompts."""
        for proposer in self._indexing:
            among = [sequence for sequence in prefilling if self._may_propose(proposer, sequence)]
            self._tracked.update((sequence.id, sequence) for sequence in among)
            proposer.begin_step(among)

    def choose(self, mosts: Many[tuple[Sequence, int]], num_positions: int) -> dict[int, Proposal]:
        """Return the proposals of a step by sequence.

        ``mosts``: the sequences for which tokens may be proposed, with the maximum numbers of tokens.
        ``num_positions``: positions of the step without proposals.
        """
        if not mosts:
            return {}
        offers = [offer for sequence, most in mosts if (offer := self._best_offer(sequence, most)) is not None]
        if self.control is None:
            return {offer.sequence: offer.proposal for offer in offers}
        depths = self.control.choose(offers, len(mosts), num_positions)
        return {
            sequence: replace(proposal, tokens=proposal.tokens[: depths[sequence]])
            for sequence, proposal in offers
            if sequence in depths
        }

    def _best_offer(self, sequence: Sequence, most: int) -> Offer | None:
        """Return the proposal that is expected to bring the most tokens; None without one."""
        self._tracked[sequence.id] = sequence
        best: Offer | None = None
        for proposer in self.proposers:
            if not self._may_propose(proposer, sequence) or not self._is_wanted(proposer, sequence):
                continue
            tokens = proposer.propose(sequence, min(most, MAX_PROPOSED))
            if tokens:
                strength = proposer.strength(sequence.id) if proposer in self._rated else 0
                offer = Offer(sequence.id, Proposal(proposer.name, tokens, strength))
                if best is None or self._value(offer) > self._value(best):
                    best = offer
        return best

    def _is_wanted(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether a lookup is worth its time: tokens of other proposers are at hand, or their time is spent."""
        return self.control is None or proposer.name != "suffix" or self.control.wants(sequence.id)

    def _value(self, offer: Offer) -> float:
        return len(offer.proposal.tokens) if self.control is None else self.control.expected(offer)

    def record_step(self, epoch: int, positions: int, seconds: float) -> None:
        """Record the time of a completed step."""
        self.max_tokens_per_step = max(1.0, _KEEP * self.max_tokens_per_step)
        if self.control is not None:
            self.control.record_step(epoch, positions, seconds)

    def record(self, sequence: Sequence, proposer: str, num_proposed: int, num_accepted: int) -> None:
        """Record how many tokens of a proposal were accepted."""
        self.figures[proposer].record(num_proposed, num_accepted)
        self.accepted_lengths.add(num_accepted)
        self.max_tokens_per_step = max(self.max_tokens_per_step, 1 + num_accepted)
        if self.control is not None:
            self.control.record(sequence.id, proposer, num_proposed, num_accepted)
        for each in self._async:
            if each.name == proposer:
                each.record(sequence.id, num_proposed, num_accepted)

    def on_forced(self, sequence: Sequence, forced: ForcedTokens) -> None:
        """Keep the tokens that a sequence's grammar forces after its newest token."""
        if self.is_active and self._may_propose(self._grammar, sequence):
            self._tracked[sequence.id] = sequence
            self._grammar.store(sequence, forced.tokens)

    def prepare(self, sequence: Sequence, most: int, now: float) -> None:
        """Order proposals for a sequence whose next token has become due, unless its next tokens are certain."""
        if self._grammar.has_tokens(sequence):
            return
        for proposer in self._async:
            if self._may_propose(proposer, sequence):
                self._tracked[sequence.id] = sequence
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

    def num_waiting(self, now: float) -> int:
        """Return how many sequences wait for a proposal and are still running."""
        self.end_expired(now)
        return len(self._waits)

    def end_expired(self, now: float) -> None:
        """Drop waits whose time has passed, and those of sequences that have ended or left the stages."""
        if self._waits:
            self._waits = {
                sequence: until
                for sequence, until in self._waits.items()
                if now < until and self._tracked[sequence].state is SequenceState.RUNNING
            }

    @property
    def next_wait_end(self) -> float:
        """Time at which the next wait ends by itself; infinite if no sequence waits."""
        return min(self._waits.values(), default=inf)

    def end_wait(self, sequence: int) -> None:
        """Let a sequence join the next step: its proposal has arrived, or will not."""
        self._waits.pop(sequence, None)

    def forget_inactive(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Drop what is kept for sequences that have ended or left the stages, among these or all."""
        among = self._tracked.values() if sequences is None else sequences
        for sequence in [s.id for s in among if s.state is not SequenceState.RUNNING]:
            if self._tracked.pop(sequence, None) is None:
                continue
            self._waits.pop(sequence, None)
            if self.control is not None:
                self.control.forget(sequence)
            for proposer in self.proposers:
                proposer.forget(sequence)

    def report(self) -> Json:
        """Return figures for ``swarmctl stats``. ``acceptance``: by position in a proposal, the share of tokens that
        were accepted. ``positions``: the numbers behind it, for metrics."""
        return {
            "mode": self.mode,
            **{
                name: {
                    "proposals": figures.num_proposals,
                    "proposed": figures.num_proposed,
                    "accepted": figures.num_accepted,
                    "acceptance": figures.acceptance(),
                    "positions": figures.by_position(),
                }
                for name, figures in self.figures.items()
            },
        }

    def _may_propose(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether a proposer may guess for a sequence: by the broker's mode, and by the request's own."""
        modes = (self.mode, sequence.request.submit.speculation or self.mode)
        return all(mode == "auto" or (mode != "off" and proposer.name in (mode, "grammar")) for mode in modes)

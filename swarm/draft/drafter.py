"""Proposals of a draft model: which tokens it computes, and when.

The model's keys and values of a sequence stay from request to request. A request brings the tokens that the answer has
gained; positions of earlier proposals that were refused are cut off first. The tokens that are missing are computed in
the same pass as the draw of the first proposed token; each further token takes a pass of one row per sequence. All
sequences of a request go through the model together.

A sequence that lacks more than a few positions is *behind*: it is computed in chunks between the requests, and not
proposed for until it has caught up. If the memory is full, the sequences that were asked for longest ago are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from swarm.errors import KvFull
from swarm.params import SamplingParams
from swarm.stage.executor import Batch, Executor, SampleJob
from swarm.wire.draft_messages import (
    CATCH_UP,
    AskedSequence,
    AskProposals,
    CaughtUp,
    DraftedTokens,
    Proposals,
    class_of,
)
from swarm.wire.messages import Row, Sampled

CHUNK = 64  # positions computed between two requests; one that arrives meanwhile waits for the chunk's end


@dataclass(slots=True, eq=False)
class DraftSequence:
    """A sequence in the draft model's memory."""

    id: int
    params: SamplingParams  # as drawn with: with log probabilities, without a grammar and thinking
    seed: int
    num_prompt: int
    limit: int  # maximum number of positions
    tokens: list[int]  # tokens that the broker has sent, and after them the last proposal
    kv: int = 0  # positions that are computed
    is_behind: bool = False

    @property
    def pending(self) -> int:
        """Tokens to be computed before the next draw."""
        return len(self.tokens) - self.kv

    def is_end(self, token: int, eos_token_ids: Sequence[int]) -> bool:
        """Whether the answer ends with this token."""
        is_eos = token in eos_token_ids and not self.params.ignore_eos
        return is_eos or token in self.params.stop_token_ids or len(self.tokens) >= self.limit


@dataclass(slots=True, eq=False)
class _Proposal:
    """A proposal in the making."""

    sequence: DraftSequence
    start: int  # position of its first token
    most: int
    tokens: list[int]
    logprobs: list[float]
    acceptance: float = 1.0  # probability that all of its tokens are accepted
    is_done: bool = False


class Drafter:
    """Draft model with the sequences that it holds. ``executor`` has all layers active."""

    def __init__(self, executor: Executor, max_sequences: int) -> None:
        self._executor = executor
        self._context = executor.manifest.context
        self._eos_token_ids = executor.manifest.eos_token_ids
        self._max_sequences = max_sequences
        self._sequences: dict[int, DraftSequence] = {}  # the one that was asked for longest ago first

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is behind."""
        return any(sequence.is_behind for sequence in self._sequences.values())

    def propose(self, ask: AskProposals) -> Proposals:
        """Return proposals for the sequences of a request."""
        began = time.perf_counter()
        for ended in ask.forget:
            self._release(ended)
        lost, refused, asked = [], [], list[_Proposal]()
        for entry in ask.sequences:
            if entry.start + len(entry.tokens) >= self._context:
                self._release(entry.sequence)
                refused.append(entry.sequence)
            elif (sequence := self._update(entry)) is None:
                lost.append(entry.sequence)
            else:
                most = min(entry.most, min(sequence.limit, self._context) - len(sequence.tokens))
                asked.append(_Proposal(sequence, len(sequence.tokens), most, [], []))
        ready = self._take_ready(asked)
        passes = 0
        while running := [proposal for proposal in ready if not proposal.is_done]:
            self._draw(running, ask)
            passes += 1
        drafted = tuple(
            DraftedTokens(p.sequence.id, p.start, tuple(p.tokens), tuple(p.logprobs)) for p in ready if p.tokens
        )
        held = self._sequences
        dropped = [p.sequence.id for p in asked if held.get(p.sequence.id) is not p.sequence]
        behind = tuple(p.sequence.id for p in asked if p.sequence.is_behind and p.sequence.id not in dropped)
        return Proposals(
            ask.number,
            drafted,
            behind,
            tuple(lost),
            (*refused, *dropped),
            passes,
            time.perf_counter() - began,
        )

    def catch_up(self) -> CaughtUp | None:
        """Compute one chunk of a sequence that is behind; return a message if it has caught up with it."""
        sequence = next(s for s in self._sequences.values() if s.is_behind)
        count = min(CHUNK, sequence.pending - 1)
        if self._forward([sequence], [count], draws=False) is None or sequence.pending > 1:
            return None
        sequence.is_behind = False
        return CaughtUp(sequence.id)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def _update(self, entry: AskedSequence) -> DraftSequence | None:
        """Add a sequence's new tokens, and cut off what differs from them; None if earlier tokens are missing."""
        if entry.opening is not None:
            self._open(entry)
        sequence = self._sequences.pop(entry.sequence, None)
        if sequence is None or entry.start > len(sequence.tokens):
            self._executor.release(entry.sequence)
            return None
        self._sequences[entry.sequence] = sequence  # now the last one
        common = entry.start
        for mine, sent in zip(sequence.tokens[entry.start :], entry.tokens, strict=False):
            if mine != sent:
                break
            common += 1
        sequence.tokens[entry.start :] = entry.tokens
        # The last token is always computed, because the next one is drawn after it.
        position = min(common, len(sequence.tokens) - 1)
        if position < sequence.kv:
            sequence.kv = position
            self._executor.truncate(entry.sequence, position)
        return sequence

    def _open(self, entry: AskedSequence) -> None:
        opening = entry.opening
        assert opening is not None
        self._release(entry.sequence)
        while len(self._sequences) >= self._max_sequences:
            self._release(next(iter(self._sequences)))
        limit = min(opening.limit, self._context)
        params = msgspec.structs.replace(opening.params, logprobs=0, grammar=None, thinking=None)
        self._executor.open(entry.sequence, limit)
        self._sequences[entry.sequence] = DraftSequence(
            entry.sequence, params, opening.seed, opening.num_prompt, limit, []
        )

    def _release(self, sequence: int) -> None:
        if self._sequences.pop(sequence, None) is not None:
            self._executor.release(sequence)

    def _take_ready(self, asked: Iterable[_Proposal]) -> list[_Proposal]:
        """Return the proposals that can be drawn now; the other sequences are behind."""
        ready, left = [], CATCH_UP
        for proposal in sorted(asked, key=lambda p: p.sequence.pending):
            sequence = proposal.sequence
            sequence.is_behind = sequence.pending > left
            if not sequence.is_behind and proposal.most > 0:
                left -= sequence.pending
                ready.append(proposal)
        return ready

    # --- computing ---------------------------------------------------------------------------------------------------

    def _draw(self, proposals: Sequence[_Proposal], ask: AskProposals) -> None:
        """Draw the next token of each proposal; proposals that end with it, or can't go on, are done."""
        sequences = [proposal.sequence for proposal in proposals]
        sampled = self._forward(sequences, [sequence.pending for sequence in sequences], draws=True)
        if sampled is None:  # the memory is too small for all of them
            for proposal in proposals:
                proposal.is_done = proposal.sequence.id not in self._sequences
            return
        drawn = {draw.sequence: draw for draw in sampled}
        for proposal in proposals:
            draw = drawn.get(proposal.sequence.id)
            if draw is None:  # the model's logits are not finite
                proposal.is_done = True
                continue
            logprob = draw.logprobs[0].logprob
            proposal.tokens.append(draw.token)
            proposal.logprobs.append(logprob)
            proposal.sequence.tokens.append(draw.token)
            proposal.acceptance *= ask.acceptance[class_of(logprob)]
            proposal.is_done = (
                len(proposal.tokens) >= proposal.most
                or proposal.acceptance < ask.least
                or proposal.sequence.is_end(draw.token, self._eos_token_ids)
            )

    def _forward(
        self, sequences: Sequence[DraftSequence], counts: Sequence[int], *, draws: bool
    ) -> tuple[Sampled, ...] | None:
        """Compute the next positions of these sequences. None if a sequence had to be dropped for lack of memory, this
        one or another: then nothing was computed."""
        rows = tuple(Row(s.id, s.kv, count, draws) for s, count in zip(sequences, counts, strict=True))
        tokens = [token for s, count in zip(sequences, counts, strict=True) for token in s.tokens[s.kv : s.kv + count]]
        jobs = tuple(SampleJob(n, s.params, s.seed, s.tokens, s.num_prompt) for n, s in enumerate(sequences))
        batch = Batch(rows, np.array(tokens, np.int64), None, jobs if draws else ())
        try:
            result = self._executor.forward(batch, lambda: False, lambda: None)
        except KvFull:
            self._release(next(iter(self._sequences)))
            return None
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.kv += count
        return result.sampled

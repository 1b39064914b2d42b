"""Proposed tokens in steps: which decodes carry how many, and what remains of them when the step completes.

Proposals take only what no other sequence needs: the rest of the step's tokens, the sequence's own KV blocks, and free
blocks while no sequence waits for any. They preempt and evict none. When the step completes, the blocks that only
refused tokens needed are free again. Where several steps are in flight, one free block is left for each running
sequence, and no sequence is preempted for blocks that are about to become free (``kv_capacity``).
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.broker.speculation.proposer import Proposal
from swarm.broker.speculation.speculation import Speculation
from swarm.broker.state import InFlightProposal, InFlightStep, Sequence, SequenceState, State
from swarm.wire.messages import BLOCK, MAX_PROPOSED, MAX_ROWS, SequencePosition, num_blocks

# Worker deaths with a sequence in flight, after which nothing is proposed for it: at the third death it is quarantined,
# which must not happen because of guesses.
MAX_DEATHS = 1
SPECULATION_VERSION = 4  # of the protocol: the first whose stages verify proposed tokens


def choose_proposals(
    state: State, speculation: Speculation, chosen: list[tuple[Sequence, int]], step_tokens: int, *, overlaps: bool
) -> dict[int, InFlightProposal]:
    """Return the tokens to propose, by sequence, for the decodes of a step with these rows; take the KV blocks that
    they need. ``overlaps``: other steps may be formed before this one completes."""
    if not speculation.is_active or not state.rebuilding.is_idle or not _can_verify(state):
        return {}
    speculation.begin_step([sequence for sequence, _ in chosen if sequence.scheduled < sequence.num_prompt])
    proposals: dict[int, InFlightProposal] = {}
    # a last stage may return a token for each row and each proposed token
    left = min(step_tokens - sum(count for _, count in chosen), MAX_ROWS - len(chosen))
    spare = len(state.running) if overlaps else 0
    mosts = [(sequence, min(left, max_proposed(state, sequence, spare))) for sequence, _ in chosen]
    found = speculation.choose([each for each in mosts if each[1] > 0], sum(count for _, count in chosen))
    for sequence, _ in mosts if found else ():
        most = min(left, max_proposed(state, sequence, spare))  # the sequences before it may have taken blocks
        proposal = _limit(state, found.get(sequence.id), most)
        if proposal is not None and proposal.tokens:
            blocks = sequence.blocks
            state.running.resize(sequence, max(blocks, num_blocks(sequence.sampled + len(proposal.tokens))))
            proposals[sequence.id] = InFlightProposal(proposal.proposer, proposal.tokens, sequence.sampled, blocks)
            left -= len(proposal.tokens)
    return proposals


def _limit(state: State, proposal: Proposal | None, most: int) -> Proposal | None:
    """Cut a proposal to ``most`` tokens, and before the first one that is not in the model's vocabulary: no stage could
    compute it. A grammar's tokens come from a worker."""
    if proposal is None or state.manifest is None:
        return None
    tokens = proposal.tokens[: max(0, most)]
    foreign = (index for index, token in enumerate(tokens) if not 0 <= token < state.manifest.vocab_size)
    return Proposal(proposal.proposer, tokens[: next(foreign, len(tokens))])


def max_proposed(state: State, sequence: Sequence, spare: int = 0) -> int:
    """Return how many tokens may be proposed for a sequence at most: none unless it decodes and is no suspect, and no
    more than it can still draw but for the last one, which needs no position. ``spare``: blocks to leave free."""
    if not sequence.is_decoding or not sequence.may_speculate or sequence.num_deaths > MAX_DEATHS:
        return 0
    if sequence.id in state.evidence.suspects:
        return 0
    num_missing = min(sequence.max_remaining, sequence.request.submit.params.max_tokens - sequence.num_generated)
    if sequence.stop_at is not None:
        num_missing = min(num_missing, sequence.stop_at - sequence.num_generated)
    free = 0 if state.waiting else max(0, state.plans.kv_blocks - state.reserved_blocks - spare)
    return min(MAX_PROPOSED, num_missing - 1, (sequence.blocks + free) * BLOCK - sequence.sampled)


def prepare_proposals(state: State, speculation: Speculation, flight: InFlightStep, now: float) -> None:
    """Order proposals for the sequences whose next tokens have become due with a completed step, and let them wait."""
    if not speculation.is_active or not state.rebuilding.is_idle or not _can_verify(state):
        return
    for sequence, _ in flight.sequences:
        if sequence.state is SequenceState.RUNNING and flight.is_current(sequence):
            speculation.prepare(sequence, max_proposed(state, sequence), now)


def settle_proposals(state: State, speculation: Speculation, flight: InFlightStep) -> int:
    """Record how many proposed tokens of a completed step were accepted, and remove the others, after its tokens were
    collected. Return how many were not accepted."""
    num_refused = 0
    if state.plans.current is not None and not flight.num_patches:
        speculation.record_step(state.plans.current.epoch, flight.num_tokens, state.now - flight.sent_at)
    for sequence_id, proposal in flight.proposals.items():
        num_refused += len(proposal.tokens)
        sequence = state.sequences.get(sequence_id)
        if sequence is None:
            continue
        drawn = sequence.tokens[proposal.start : proposal.start + len(proposal.tokens)]
        if drawn:
            num_accepted = count_equal(proposal.tokens, drawn)
            num_refused -= num_accepted
            state.count("proposed_tokens", len(proposal.tokens))
            state.count("accepted_tokens", num_accepted)
            speculation.record(sequence, proposal.proposer, len(proposal.tokens), num_accepted)
        if sequence.state is not SequenceState.RUNNING or not flight.is_current(sequence):
            continue
        if sequence.proposed:
            sequence.refuse_proposals()
        if not sequence.pending:  # the last stage returned no token that the next step could begin with
            state.redraw_last(sequence)
        state.return_blocks(sequence, max(proposal.blocks, num_blocks(sequence.scheduled)))
    return num_refused


def refused_positions(state: State, chosen: Iterable[Sequence]) -> list[SequencePosition]:
    """Return the positions to which the next step cuts sequences that have given blocks back and have no row in it."""
    has_row = {sequence.id for sequence in chosen}
    return [
        SequencePosition(sequence.id, sequence.kv)
        for sequence in state.to_truncate
        if sequence.state is SequenceState.RUNNING and sequence.is_open_in_stages and sequence.truncate
        if sequence.id not in has_row
    ]


def count_equal(proposed: tuple[int, ...], drawn: list[int]) -> int:
    """Return the number of first tokens that are equal."""
    for index, (token, other) in enumerate(zip(proposed, drawn, strict=False)):
        if token != other:
            return index
    return min(len(proposed), len(drawn))


def _can_verify(state: State) -> bool:
    """Whether every stage of the active plan can verify proposed tokens. Where a row's bits depend on its batch, an
    answer would not be the same with them as without. States can't be rolled back to before refused ones."""
    plan = state.plans.current
    if state.state_stride:
        return False
    members = [] if plan is None else [stage.incarnation for stage in plan.stages]
    return bool(members) and all(
        max(state.workers[member].hello.wire_versions) >= SPECULATION_VERSION
        and not ((capacity := state.plans.capacity.get(member)) is not None and "inexact" in capacity.kernels)
        for member in members
    )

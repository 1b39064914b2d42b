"""Sequences that stay in the stages over a change of plan, and the prefixes that they go on sharing.

Stages keep what they have mapped, so survivors hold a shared prefix once, whatever happens to its other layers. The
broker's account is built again from links, one per sequence: it shares the longest prefix that it has in common with a
sequence that stays. ``Activate`` has these links, so that every stage counts alike. In layers that changed hands only
the source's prefix is computed again (``rebuild``), and the others map it.
"""

from __future__ import annotations

from swarm.broker.state import Sequence, State
from swarm.broker.state.shared_prefixes import estimate_links
from swarm.broker.steps.kv_capacity import admission_blocks, shareable_positions
from swarm.wire.messages import BLOCK, SharedPrefix, num_blocks
from swarm.wire.shared_positions import SharedPositions


def evict_overflow(state: State) -> list[Sequence]:
    """Keep the running sequences that fit into the new plan, in order of rank; the others wait again. Returns the kept
    ones.

    A sequence without a link counts in full. If that is too much, sequences that can share the prefix of a kept one
    wait until they can start from it again.
    """
    plans, blocks = state.plans, 0
    for sequence in state.running:
        sequence.drop_unscored()
    before = state.prefixes.start_plan()
    kept: list[tuple[Sequence, int]] = []
    evicted: list[Sequence] = []
    ranked = sorted(state.running, key=lambda s: s.rank, reverse=True)
    needs = [admission_blocks(state, sequence, headroom=0) for sequence in ranked]
    linked = estimate_links(before, ranked) if before.unit == state.shared.unit else {}
    can_overflow = sum(needs) - sum(linked.values()) // BLOCK > plans.kv_blocks
    followers = find_followers(ranked, state.shared.unit) if can_overflow else frozenset()
    for sequence, needed in zip(ranked, needs, strict=True):
        link = find_link(state, before, sequence, [other for other, _ in kept])
        own = needed - (0 if link is None else link.position // BLOCK)
        # A sequence that can't reach its limit under this plan must wait for another one.
        can_end = num_blocks(sequence.limit) <= plans.kv_blocks and (link is not None or sequence.id not in followers)
        can_end = can_end and not sequence.keeps_sum and not state.outdated_worker(sequence.request.submit.params)
        if can_end and len(kept) < plans.max_sequences and blocks + own <= plans.kv_blocks:
            blocks += own
            kept.append((sequence, needed))
            if link is not None:
                state.shared.fork(sequence.id, link.source, link.position)
                state.prefixes.add(link)
        else:
            evicted.append(sequence)
    state.running.clear()
    if evicted:
        state.count("plan_evictions", len(evicted))
    for sequence in evicted:
        sequence.requeue()
        sequence.mark_fitting()
        state.waiting.add(sequence)
    for sequence, needed in kept:
        sequence.truncate_to(sequence.kv)
        state.running.add(sequence, needed)
    return [sequence for sequence, _ in kept]


def find_link(state: State, before: SharedPositions, sequence: Sequence, others: list[Sequence]) -> SharedPrefix | None:
    """Return the longest prefix that a sequence can go on sharing with one of these. None: there is none, or the
    sequence has computed nothing behind it."""
    if before.unit != state.shared.unit or not before.stop(sequence.id):
        return None
    source = max(others, key=lambda other: before.common_stop(sequence.id, other.id), default=None)
    if source is None:
        return None
    position = state.shared.fork_stop(source.id, before.common_stop(sequence.id, source.id))
    if not position or sequence.kv <= position or source.kv < position:
        return None
    if sequence.tokens[:position] != source.tokens[:position]:
        return None
    num_mappings = state.shared.num_mappings + state.shared.fork_mappings(source.id, position)
    if num_mappings > state.plans.share_mappings:
        return None
    return SharedPrefix(sequence.id, source.id, position)


def find_followers(ranked: list[Sequence], unit: int) -> frozenset[int]:
    """Return the sequences that can share the prompt of an earlier one of their request."""
    leaders: set[str] = set()
    followers: set[int] = set()
    for sequence in ranked:
        if shareable_positions(sequence, unit):
            if sequence.request.id in leaders:
                followers.add(sequence.id)
            leaders.add(sequence.request.id)
    return frozenset(followers)

"""What stays over a change of plan: which sequences keep their room, and what counts of that which workers hold.

Keys and values are known by their sequence's number, and a number says little: a worker may have served another
journal, or one that a backup has taken the place of since. So what a worker holds at its Hello counts as far as it is
of this broker's journal, and was computed from the tokens that this broker knows. From the first plan on that goes
through the worker, it holds what it was told to.
"""

from __future__ import annotations

from swarm.broker.state import Sequence, State, Worker
from swarm.broker.state.blocks import num_blocks
from swarm.broker.steps.room import entry_blocks
from swarm.wire.digests import num_matching
from swarm.wire.messages import NOBODYS, Hello, SequencePosition


def keep_what_fits(state: State) -> list[Sequence]:
    """Running sequences that have room under the new plan, those with the best claim first; the others wait again."""
    book, blocks = state.book, 0
    kept: list[tuple[Sequence, int]] = []
    evicted: list[Sequence] = []
    for sequence in sorted(state.running, key=lambda s: s.rank, reverse=True):
        needed = entry_blocks(state, sequence, headroom=0)
        can_end = num_blocks(sequence.limit) <= book.kv_blocks
        if can_end and len(kept) < book.max_sequences and blocks + needed <= book.kv_blocks:
            blocks += needed
            kept.append((sequence, needed))
        else:
            evicted.append(sequence)
    state.running.clear()
    for sequence in evicted:
        sequence.wait_again()
        sequence.fit()
        state.waiting.add(sequence)
    for sequence, needed in kept:
        sequence.cut_to(sequence.kv)
        state.running.add(sequence, needed)
    return [sequence for sequence, _ in kept]


def what_counts(hello: Hello, state: State) -> dict[int, int] | None:
    """Of each sequence that the worker holds, how many positions; those with none are left out. None: it has served no
    broker yet, so that there is nothing to doubt."""
    if hello.lineage == NOBODYS and not hello.held:
        return None
    if hello.lineage.journal != state.lineage.journal:
        return {}
    found: dict[int, int] = {}
    for sequence_id, held in {held.sequence: held for held in hello.held}.items():
        sequence = state.sequences.get(sequence_id)
        position = max((part.position for part in held.kv), default=0)
        if sequence is None or held.limit != sequence.limit:
            continue  # the number was given out twice, by a journal that a backup took the place of
        counts = num_matching(sequence.tokens, position, held.digests)
        if counts:
            found[sequence_id] = counts
    return found


def live_at(worker: Worker, kept: list[Sequence]) -> tuple[SequencePosition, ...]:
    """What the worker is to keep of these sequences. It lets go of whatever is not named."""
    believed = worker.believed
    if believed is None:
        return tuple(SequencePosition(s.id, s.kv) for s in kept)
    return tuple(SequencePosition(s.id, min(s.kv, believed[s.id])) for s in kept if s.id in believed)

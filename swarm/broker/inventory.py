"""What stays over a change of plan: which sequences keep their room."""

from __future__ import annotations

from swarm.broker.blocks import num_blocks
from swarm.broker.room import entry_blocks
from swarm.broker.state import Sequence, State


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
        sequence.unfit_s = 0.0
        state.waiting.add(sequence)
    for sequence, needed in kept:
        sequence.cut_to(sequence.kv)
        state.running.add(sequence, needed)
    return [sequence for sequence, _ in kept]

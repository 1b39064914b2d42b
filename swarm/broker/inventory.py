"""What stays over a change of plan: which sequences keep their room, and which of their positions really are there."""

from __future__ import annotations

from swarm.broker.blocks import num_blocks
from swarm.broker.room import entry_blocks
from swarm.broker.state import Sequence, State
from swarm.wire.messages import Activated, HeldSequence, LayerRange


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


def take_inventory(state: State, message: Activated) -> None:
    """A position counts only if every layer of every stage holds it."""
    assert state.book.current is not None
    stage = state.book.current.stage_of(message.incarnation)
    assert stage is not None
    held = {h.sequence: h for h in message.held}
    for sequence in state.running:
        position = held_position(held.get(sequence.id), stage.layers)
        if position < sequence.kv:
            sequence.num_recomputed += 1
            sequence.kv = sequence.scheduled = position
            state.running.refresh(sequence)


def held_position(held: HeldSequence | None, layers: LayerRange) -> int:
    """The position up to which all of ``layers`` hold the sequence."""
    if held is None:
        return 0
    covering = [p for p in held.kv if p.layers.first < layers.stop and p.layers.stop > layers.first]
    covered = sum(min(p.layers.stop, layers.stop) - max(p.layers.first, layers.first) for p in covering)
    return min(p.position for p in covering) if covered == len(layers) else 0

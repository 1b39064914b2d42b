"""What stays over a change of plan: which sequences keep their room, and which of their positions really are there."""

from __future__ import annotations

from swarm.broker.blocks import num_blocks
from swarm.broker.state import Sequence, SequenceState, State
from swarm.wire.messages import Activated, HeldSequence, LayerRange


def keep_what_fits(state: State) -> list[Sequence]:
    """Running sequences that have room under the new plan, oldest first; the others wait again."""
    book, blocks = state.book, 0
    kept: list[Sequence] = []
    evicted: list[Sequence] = []
    for sequence in sorted(state.running, key=lambda s: s.id):
        needed = num_blocks(sequence.limit)
        if len(kept) < book.max_sequences and blocks + needed <= book.kv_blocks:
            blocks += needed
            kept.append(sequence)
            continue
        sequence.cut_to(0)
        sequence.truncate = False
        sequence.unfit_s = 0.0
        sequence.state = SequenceState.WAITING
        evicted.append(sequence)
    state.waiting.extendleft(reversed(evicted))  # they came before whoever has not run yet
    for sequence in kept:
        sequence.cut_to(sequence.kv)
    state.running[:] = kept
    return kept


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


def held_position(held: HeldSequence | None, layers: LayerRange) -> int:
    """The position up to which all of ``layers`` hold the sequence."""
    if held is None:
        return 0
    covering = [p for p in held.kv if p.layers.first < layers.stop and p.layers.stop > layers.first]
    covered = sum(min(p.layers.stop, layers.stop) - max(p.layers.first, layers.first) for p in covering)
    return min(p.position for p in covering) if covered == len(layers) else 0

"""KV capacity of the stages: which sequence holds how many blocks, and which is preempted when blocks are short.

A block has 32 positions. A sequence is admitted with blocks for its tokens and a little more, and grows block by block;
so sequences that may become long run side by side as long as they are short. Where a stage's memory is taken by
reservation and not by writing, a sequence is admitted with blocks for its maximum length.

When no blocks are free, retired sequences are evicted first. Then the sequence with the lowest rank is preempted, the
youngest of the lowest class: it releases all blocks, waits, and is computed again later. It loses no token.

Why this terminates: ranks are a strict order. The sequence with the highest rank is never preempted and fits into the
stages if alone, so it ends eventually, and the next one has the highest rank. A sequence that can't grow and finds none
of lower rank pauses. And no sequence is preempted more than ``MAX_PREEMPTED`` times: after that it is admitted with
blocks for its maximum length, and keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Sequence, State
from swarm.wire.messages import num_blocks

MAX_PREEMPTED = 3


@dataclass(slots=True)
class Room:
    """Allocator of KV blocks and slots. ``headroom``: positions beyond its tokens for which a sequence gets blocks at
    admission."""

    state: State
    headroom: int
    max_running: int

    @property
    def blocks(self) -> int:
        state = self.state
        return state.book.kv_blocks - state.running.blocks - state.prefix.num_blocks

    @property
    def places(self) -> int:
        state = self.state
        held = len(state.prefix.retired)
        return min(self.max_running, state.book.max_sequences - held) - len(state.running)

    def entry_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks needed to admit the sequence."""
        return entry_blocks(self.state, sequence, self.headroom)

    # --- admission
    # -------------------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> bool:
        """Admit a sequence, with blocks from retired or lower-class sequences if necessary, and start it from a cached
        prefix. Return False if there is no capacity."""
        state, blocks = self.state, self.entry_blocks(sequence)
        victims = self._victims(sequence, blocks, own_class=False)
        if victims is None:
            return False
        for victim in victims:
            state.give_way(victim)
        found = state.prefix.find(sequence.tokens)
        if found is not None:
            state.prefix.pin(found[0])
            self._evict(blocks)
            if not self._holds(blocks):  # possible only by evicting the prefix that it would start from
                state.prefix.unpin(found[0])
                found = None
        self._evict(blocks)
        if not self._holds(blocks):
            return False
        sequence.enter(found)
        if found is not None:
            state.prefix.index.use(found[0])
            state.count("prefix_hits")
            state.count("prefix_positions", sequence.kv)
        state.running.add(sequence, blocks)
        return True

    def _holds(self, blocks: int) -> bool:
        return self.blocks >= blocks and self.places >= 1

    # --- growing -----------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, position: int) -> bool:
        """Make sure that a running sequence has blocks up to ``position``. Return False if it must pause or was
        preempted."""
        blocks = num_blocks(position)
        more = blocks - sequence.blocks
        if more <= 0:
            return True
        victims = self._victims(sequence, more, own_class=True)
        if victims is None:
            self.state.count("growth_waits")
            return False
        for victim in victims:
            self.state.give_way(victim)
        self._evict(more, places=0)
        if self.blocks < more:
            return False
        self.state.running.resize(sequence, blocks)
        return True

    # --- preemption
    # ------------------------------------------------------------------------------------------------------

    def _victims(self, sequence: Sequence, blocks: int, *, own_class: bool) -> list[Sequence] | None:
        """Return the sequences to preempt so that this number of blocks is free (and a slot, if the sequence is not
        running yet); None if that is impossible. Only a sequence that runs already may preempt others of its own class.
        """
        state = self.state
        short = blocks - self.blocks - state.prefix.evictable_blocks
        short_places = 0 if own_class else 1 - self.places - state.prefix.num_evictable
        if short <= 0 and short_places <= 0:
            return []
        lowest = state.running.lowest
        if lowest is None or lowest > sequence.priority or (lowest == sequence.priority and not own_class):
            return None
        victims: list[Sequence] = []
        for other in sorted((s for s in state.running if self._may_give_way(s, sequence, own_class)), key=_by_claim):
            if short <= 0 and short_places <= 0:
                break
            victims.append(other)
            short -= other.blocks
            short_places -= 1
        return victims if short <= 0 and short_places <= 0 else None

    def _may_give_way(self, other: Sequence, to: Sequence, own_class: bool) -> bool:
        has_less = other.rank < to.rank if own_class else other.priority < to.priority
        return has_less and other.num_preempted < MAX_PREEMPTED and not self.state.prefix.is_pinned(other.id)

    def _evict(self, blocks: int, places: int = 1) -> None:
        """Evict retired sequences as far as needed."""
        self.state.evict(blocks - self.blocks, places - self.places if places else 0)


def entry_blocks(state: State, sequence: Sequence, headroom: int) -> int:
    """Return the blocks with which a sequence is admitted, or stays in the stages over a change of plan."""
    plan = state.book.current
    if plan is None or not plan.commits_on_write or sequence.num_preempted >= MAX_PREEMPTED:
        return num_blocks(sequence.limit)
    # the headroom doubles with each preemption
    wanted = min(sequence.limit, sequence.sampled + (headroom << sequence.num_preempted))
    return num_blocks(wanted)


def _by_claim(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

"""Who has how much room for keys and values, and who gives it back when there is not enough.

Room is counted in blocks of 32 positions. A sequence enters with room for what it has and a little more, and takes
block after block as it grows, so many that may become long run side by side as long as they are short. Where a stage's
memory is taken by what is reserved, not by what is written, it enters with room for all it may come to hold.

When there is none left: retired sequences go first. Then whoever has the least claim gives way, the youngest of the
lowest class: it releases all, waits, and is computed again later. Nobody loses a token by it.

Why this comes to an end: claims are a strict order. Whoever has the best one is never asked to give way, and if alone
fits into the stages, so it ends some day, and the next one has the best claim. A sequence that can't grow and finds
nobody with less claim just pauses. And nobody gives way more than ``MAX_PREEMPTED`` times: after that it enters with
room for all it may come to hold, and keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Sequence, State
from swarm.wire.messages import num_blocks

MAX_PREEMPTED = 3


@dataclass(slots=True)
class Room:
    """What is free in the stages, with the rules for getting more. ``headroom``: positions beyond what a sequence has
    for which it gets room when it enters."""

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
        """Count the blocks that it needs to enter."""
        return entry_blocks(self.state, sequence, self.headroom)

    # --- entering ----------------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> bool:
        """Take room for a sequence, from retired ones or lower classes if need be, and begin with a prefix that
        somebody holds. False: there is none."""
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
            if not self._holds(blocks):  # only at the cost of what it would begin with
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
        """See to it that a running sequence has room up to ``position``. False: it must pause, or had to give way."""
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

    # --- giving way --------------------------------------------------------------------------------------------------

    def _victims(self, sequence: Sequence, blocks: int, *, own_class: bool) -> list[Sequence] | None:
        """Who has to give way so that there are so many blocks (and a place, if it is not in yet); None: it can't be
        done. Within its own class only one that runs already has a claim on others' room."""
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
        """Let retired sequences go as far as needed."""
        self.state.evict(blocks - self.blocks, places - self.places if places else 0)


def entry_blocks(state: State, sequence: Sequence, headroom: int) -> int:
    """The room with which a sequence enters the stages, or stays in them over a change of plan."""
    plan = state.book.current
    if plan is None or not plan.commits_on_write or sequence.num_preempted >= MAX_PREEMPTED:
        return num_blocks(sequence.limit)
    wanted = min(sequence.limit, sequence.sampled + (headroom << sequence.num_preempted))
    return num_blocks(wanted)


def _by_claim(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

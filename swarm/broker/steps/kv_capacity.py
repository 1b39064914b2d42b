"""KV capacity of the stages: which sequence holds how many blocks, and which is preempted when blocks are short.

A block has 32 positions. A sequence is admitted with blocks for its tokens and a little more, and grows block by block;
so sequences that may become long run side by side as long as they are short. Where a stage's memory is taken by
reservation and not by writing, a sequence is admitted with blocks for its maximum length.

Where the stages can share memory, the blocks of a common prefix count once (``state.shared``): a sequence that starts
from it needs blocks for the rest only, and gives back only what no other sequence holds. When the stages can't map any
more, it starts from a copy and needs all of its blocks.

When no blocks are free, retired sequences are evicted first. Then the sequence with the lowest rank is preempted, the
youngest of the lowest class: it releases all blocks, waits, and is computed again later. It loses no token.

Why this terminates: ranks are a strict order. The sequence with the highest rank is never preempted and fits into the
stages if alone, so it ends eventually, and the next one has the highest rank. A sequence that can't grow and finds none
of lower rank pauses. And no sequence is preempted more than ``MAX_PREEMPTIONS`` times: after that it is admitted with
blocks for its maximum length, and keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Sequence, State
from swarm.wire.messages import BLOCK, num_blocks
from swarm.wire.shared_positions import Departures

MAX_PREEMPTIONS = 3


@dataclass(slots=True)
class KvAllocator:
    """Allocator of KV blocks and slots. ``headroom``: positions beyond its tokens for which a sequence gets blocks at
    admission."""

    state: State
    headroom: int
    max_running: int

    @property
    def free_blocks(self) -> int:
        state = self.state
        return state.plans.kv_blocks - state.reserved_blocks

    @property
    def free_slots(self) -> int:
        state = self.state
        held = len(state.prefix.retired)
        return min(self.max_running, state.plans.max_sequences - held) - len(state.running)

    def admission_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks needed to admit the sequence."""
        return admission_blocks(self.state, sequence, self.headroom)

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> bool:
        """Admit a sequence, with blocks from retired or lower-class sequences if necessary, and start it from a cached
        prefix. Return False if there is no capacity."""
        blocks = self.admission_blocks(sequence)
        if self._choose_victims(sequence, blocks, own_class=False) != [] and self._admit_shared(sequence, blocks):
            return True
        victims = self._choose_victims(sequence, blocks, own_class=False)
        if victims is None:
            return False
        for victim in victims:
            self.state.preempt(victim)
        if self._start_from_prefix(sequence, blocks):
            return True
        self._evict(blocks)
        if not self._has_capacity(blocks):
            return False
        sequence.admit(None)
        self.state.running.add(sequence, blocks)
        return True

    def _admit_shared(self, sequence: Sequence, blocks: int) -> bool:
        """Admit a sequence that fits only because it shares a prefix, without preempting any other."""
        unit = self.state.shared.unit
        most = (sequence.sampled - 1) // unit * unit if unit else 0
        if not most or self._choose_victims(sequence, blocks - most // BLOCK, own_class=False) != []:
            return False  # even the longest possible prefix would not help, and a search takes time
        return self._start_from_prefix(sequence, blocks)

    def _start_from_prefix(self, sequence: Sequence, blocks: int) -> bool:
        """Admit a sequence that starts from a cached prefix. Return False if there is none, or no capacity without
        evicting it."""
        state = self.state
        prefix = None
        if not sequence.starts_from_nothing:
            prefix = state.prefix.find(sequence.tokens, sequence.adapter, sequence.images, stride=state.state_stride)
        if prefix is None:
            return False
        source, position = prefix
        may_share = self._can_map(source, position)  # otherwise the stages copy, and all of its blocks are its own
        own_blocks = blocks - state.shared.fork_stop(source, position) // BLOCK if may_share else blocks
        state.prefix.pin(source)
        if self._choose_victims(sequence, own_blocks, own_class=False) != []:
            state.prefix.unpin(source)
            return False
        self._evict(own_blocks)
        sequence.admit((source, position))
        if may_share:
            state.shared.fork(sequence.id, source, position)
        state.prefix.index.count_use(source)
        state.count("prefix_hits")
        state.count("prefix_positions", sequence.kv)
        state.running.add(sequence, blocks)
        return True

    def _can_map(self, source: int, position: int) -> bool:
        """Whether the stages can map what a fork would share."""
        shared = self.state.shared
        return shared.num_mappings + shared.fork_mappings(source, position) <= self.state.plans.share_mappings

    def _has_capacity(self, blocks: int) -> bool:
        return self.free_blocks >= blocks and self.free_slots >= 1

    # --- growing -----------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, position: int) -> bool:
        """Make sure that a running sequence has blocks up to ``position``. Return False if it must pause or was
        preempted."""
        blocks = num_blocks(position)
        more = blocks - sequence.blocks
        if more <= 0:
            return True
        victims = self._choose_victims(sequence, more, own_class=True)
        if victims is None:
            self.state.count("growth_waits")
            return False
        for victim in victims:
            self.state.preempt(victim)
        self._evict(more, slots=0)
        if self.free_blocks < more:
            return False
        self.state.running.resize(sequence, blocks)
        return True

    # --- preemption --------------------------------------------------------------------------------------------------

    def _choose_victims(self, sequence: Sequence, blocks: int, *, own_class: bool) -> list[Sequence] | None:
        """Return the sequences to preempt so that ``blocks`` KV blocks are free for ``sequence``; None if that is
        impossible.

        ``own_class``: sequences of the same priority may be preempted as well. Set only for a running sequence; any
        other sequence also needs a free slot.
        """
        state = self.state
        departures = Departures(state.shared)
        missing_blocks = blocks - self.free_blocks
        if missing_blocks > 0:
            missing_blocks -= state.prefix.evictable_blocks(departures)
        missing_slots = 0 if own_class else 1 - self.free_slots - state.prefix.num_evictable
        if missing_blocks <= 0 and missing_slots <= 0:
            return []
        if missing_blocks > 0 and state.borrowed_blocks:
            return None  # blocks become free when a step with proposed tokens completes
        lowest = state.running.lowest_class
        if lowest is None or lowest > sequence.priority or (lowest == sequence.priority and not own_class):
            return None
        victims: list[Sequence] = []
        for other in sorted((s for s in state.running if self._is_preemptible(s, sequence, own_class)), key=_rank_key):
            if missing_blocks <= 0 and missing_slots <= 0:
                break
            victims.append(other)
            missing_blocks -= other.blocks - departures.add(other.id) // BLOCK
            missing_slots -= 1
        return victims if missing_blocks <= 0 and missing_slots <= 0 else None

    def _is_preemptible(self, other: Sequence, beneficiary: Sequence, own_class: bool) -> bool:
        has_lower_rank = other.rank < beneficiary.rank if own_class else other.priority < beneficiary.priority
        return has_lower_rank and other.num_preempted < MAX_PREEMPTIONS and not self.state.prefix.is_pinned(other.id)

    def _evict(self, blocks: int, slots: int = 1) -> None:
        """Evict retired sequences as far as needed."""
        self.state.evict(blocks - self.free_blocks, slots - self.free_slots if slots else 0)


def admission_blocks(state: State, sequence: Sequence, headroom: int) -> int:
    """Return the blocks with which a sequence is admitted, or stays in the stages over a change of plan."""
    plan = state.plans.current
    if plan is None or not plan.commits_on_write or sequence.num_preempted >= MAX_PREEMPTIONS:
        return num_blocks(sequence.limit)
    # the headroom doubles with each preemption
    num_positions = min(sequence.limit, sequence.sampled + (headroom << sequence.num_preempted))
    return num_blocks(num_positions)


def shareable_positions(sequence: Sequence, unit: int) -> int:
    """Return how many positions of its prompt the sequences of a request can share."""
    return min(sequence.num_prompt, sequence.sampled - 1) // unit * unit if unit else 0


def _rank_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

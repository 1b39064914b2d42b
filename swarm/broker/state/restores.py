"""Sequences whose keys and values the stages read from disk before they run (``steps.restoring``)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.broker.state.lifecycle import SequenceState
from swarm.broker.state.sequences import Sequence

MIN_SLOW_S = 0.3  # answers that come sooner are not slow, however little time there was
SLOW_SHARE = 0.9  # of the time that stages have: later answers are slow
FIRST_REST_S, MAX_REST_S = 1.0, 64.0  # without reading, after a slow answer; doubled with each further one


@dataclass(slots=True)
class Restore:
    """A sequence that waits for what the stages read. ``position``: the least that a stage has reported."""

    sequence: Sequence
    residency: int  # the sequence's when it was admitted
    ticket: int
    start: int  # position from which on the stages read
    stop: int  # position up to which they read at most
    began_at: float
    deadline: float  # when the sequence runs at the latest
    ordered_at: float = 0.0  # when the stages were ordered to read, and how long they may
    within_s: float = 0.0
    step: int | None = None  # the step with which the stages open the sequence
    # stages that have not reported yet, once they are ordered to read
    unanswered: set[str] = field(default_factory=set)
    position: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether the sequence still waits for it."""
        sequence = self.sequence
        is_same = sequence.state is SequenceState.RUNNING and sequence.residency == self.residency
        return is_same and sequence.is_restoring

    def await_answers(self, stages: Collection[str], within_s: float, now: float) -> None:
        """Record that these stages were ordered to read, and to answer in time."""
        self.unanswered.update(stages)
        self.ordered_at, self.within_s = now, within_s

    def is_slow(self, now: float) -> bool:
        """Whether a stage that answers now has used up its time."""
        return now - self.ordered_at >= max(MIN_SLOW_S, SLOW_SHARE * self.within_s)

    def record_answer(self, stage: str, position: int) -> None:
        """Record the position that a stage has reached."""
        self.unanswered.discard(stage)
        self.position = position if self.position is None else min(self.position, position)


@dataclass(slots=True)
class RestoreState:
    """What the stages write to disk and read from it."""

    bits: str = ""  # the same at all stages of the last plan; empty: they differ, or a stage has no space on disk
    num_positions: int = 0  # length from which on sequences are written and read; 0: none are
    in_progress: dict[int, Restore] = field(default_factory=dict)  # by sequence
    # sequences with keys and values of stages with other bits, and those that begin with theirs: they are not written
    excluded: set[int] = field(default_factory=set)
    num_tickets: int = 0
    rest_s: float = 0.0  # length of the last rest; 0 once all stages have answered in time
    rests_until: float = 0.0

    def start_plan(self, bits: str, num_positions: int, running: dict[int, int]) -> None:
        """Begin a plan with these bits. ``running``: positions that the stages hold, by sequence."""
        self.excluded &= running.keys()
        if not bits or bits != self.bits:
            self.excluded |= {sequence for sequence, position in running.items() if position}
        self.bits, self.num_positions = bits, num_positions if bits else 0

    def end_plan(self) -> None:
        """End all restores; nothing is read until the next plan serves."""
        self.in_progress.clear()
        self.num_positions = 0

    def record_admission(self, sequence: Sequence) -> None:
        """Exclude a sequence that was admitted if it begins with the keys and values of an excluded one."""
        if sequence.fork_of in self.excluded:
            self.excluded.add(sequence.id)

    def rest(self, now: float) -> None:
        """Read nothing for a while: a disk is slow, and computing would have been faster."""
        if now >= self.rests_until:
            self.rest_s = min(MAX_REST_S, max(FIRST_REST_S, 2 * self.rest_s))
            self.rests_until = now + self.rest_s

    def begin(self, sequence: Sequence, now: float, deadline: float) -> None:
        """Let a sequence wait for what the stages have of it on disk."""
        self.num_tickets += 1
        self.in_progress[sequence.id] = Restore(
            sequence,
            sequence.residency,
            self.num_tickets,
            start=sequence.kv,
            stop=sequence.sampled - 1,
            began_at=now,
            deadline=deadline,
        )

    @property
    def num_awaited(self) -> int:
        """Positions of all sequences that wait."""
        return sum(item.stop + 1 - item.start for item in self.in_progress.values() if item.is_current)

    @property
    def unopened(self) -> list[Sequence]:
        """Sequences that the stages have not opened yet."""
        return [item.sequence for item in self.in_progress.values() if item.step is None and item.is_current]

    def record_opening(self, sequence: Sequence, step: int) -> None:
        """Record the step with which the stages open a sequence."""
        self.in_progress[sequence.id].step = step

    def find(self, sequence: int, ticket: int) -> Restore | None:
        """Return a restore that is in progress."""
        item = self.in_progress.get(sequence)
        return item if item is not None and item.ticket == ticket and item.is_current else None

    def end(self, item: Restore) -> None:
        """Remove a restore."""
        del self.in_progress[item.sequence.id]

    def shift_deadlines(self, pause_s: float) -> None:
        for item in self.in_progress.values():
            item.deadline += pause_s

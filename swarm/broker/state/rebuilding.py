"""Keys and values that must be rebuilt after a change of plan."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarm.broker.state.sequences import Sequence
from swarm.wire.messages import Activated


@dataclass(slots=True)
class Rebuilding:
    """Sequences whose keys and values are incomplete in some layers since the plan changed, and the progress of their
    rebuild."""

    chunk_positions: int = 256  # positions per replay order
    # what each stage holds, until all stages have reported it
    reports: dict[str, Activated] = field(default_factory=dict)
    queue: deque[Sequence] = field(default_factory=deque)  # sequences that wait for their rebuild to start
    in_progress: list[Sequence] = field(default_factory=list)  # sequences with a chunk under way
    num_groups: int = 0  # replay steps ordered so far
    ordered_at: float = 0.0  # time at which an order was last sent or answered
    began_at: float = 0.0
    cost: int = 0  # layers times positions of all replays since ``began_at``
    cost_done: int = 0  # the part of it that is computed
    completed_before: int = 0  # number of the next step when a sequence last became complete
    num_resuming: int = 0  # sequences that became complete before that step

    @property
    def is_idle(self) -> bool:
        """Whether all layers are rebuilt."""
        return not self.queue and not self.in_progress

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are not complete yet."""
        return len(self.queue) + len(self.in_progress)

    def begin_work(self, cost: int) -> None:
        """Note the layers times positions of all replays."""
        self.cost, self.cost_done = cost, 0

    def record_work(self, layer_positions: int) -> None:
        """Add a finished chunk."""
        self.cost_done += layer_positions

    def work_left(self) -> tuple[int, int]:
        """Return the layers times positions that are not computed yet, and the part that no other plan could have
        avoided."""
        runs = [run for sequence in (*self.in_progress, *self.queue) for run in sequence.rebuilds]
        return max(0, self.cost - self.cost_done), sum(run.least for run in runs)

    def next_group(self) -> int:
        """Return the number of the next replay step."""
        self.num_groups += 1
        return self.num_groups

    def record_complete(self, next_step: int) -> None:
        """Note that a sequence has become complete. ``next_step``: number of the next step."""
        self.num_resuming = self.num_resuming + 1 if self.completed_before == next_step else 1
        self.completed_before = next_step

    def expected_rest_s(self, now: float) -> float:
        """Return the expected time until all sequences are complete, at the speed so far."""
        left = max(0, self.cost - self.cost_done)
        return max(0.0, now - self.began_at) * left / self.cost_done if self.cost_done else 0.0

    def expected_wait_s(self, now: float) -> float:
        """Return the time from the beginning until a waiting sequence is complete, on average over them: they become
        complete one after the other."""
        return max(0.0, now - self.began_at) + self.expected_rest_s(now) / 2

    def clear(self) -> None:
        """Drop everything at the end of an epoch: the stages will report again what each layer holds."""
        self.reports.clear()
        for sequence in (*self.in_progress, *self.queue):
            sequence.cancel_rebuilds()
        self.queue.clear()
        self.in_progress.clear()
        self.cost = self.cost_done = self.completed_before = self.num_resuming = 0

"""Comparisons of a stage's results with those of other workers (``members.recheck``)."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state.plans import StagePlan
from swarm.broker.state.sequences import Sequence


@dataclass(slots=True)
class RecheckComparison:
    """A recheck in progress: results of one stage are computed again by other workers."""

    ticket: int
    epoch: int
    sequence: Sequence
    stage: StagePlan
    checkers: tuple[str, ...]  # names of the workers that compute again
    stop: int  # position up to which the results are compared
    give_up_at: float
    # result of the stage: a digest, or the drawn tokens; None until it is available
    expected: str | tuple[int, ...] | None = None
    result: str | tuple[int, ...] | None = None  # result of the checkers; None until it is available


@dataclass(slots=True)
class RecheckSchedule:
    """Schedule of ``members.recheck``: one comparison at a time, of each stage and each sequence in turn."""

    current: RecheckComparison | None = None
    due_at: float = 0.0  # time at which the last one became due
    _num_begun: int = 0
    _turn: int = 0
    _last_sequence: int = 0

    def next_stage(self, num_stages: int) -> int:
        index, self._turn = self._turn % num_stages, self._turn + 1
        return index

    def next_sequence(self, eligible: list[Sequence]) -> Sequence | None:
        """Return the sequence that follows the last one compared, by id."""
        later = [sequence for sequence in eligible if sequence.id > self._last_sequence]
        return min(later or eligible, key=lambda sequence: sequence.id, default=None)

    def next_ticket(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def record_sequence(self, sequence: Sequence) -> None:
        self._last_sequence = sequence.id

    def begin(self, comparison: RecheckComparison) -> None:
        self.current = comparison

    def end(self) -> RecheckComparison:
        ended, self.current = self.current, None
        assert ended is not None
        return ended

    def record_due(self, now: float) -> None:
        self.due_at = now

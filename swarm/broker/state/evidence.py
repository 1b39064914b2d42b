"""Steps that raised, and what has come through since: the evidence on which a worker or a request is blamed.

A failed step stays here for ``KEEP_S``. What happens later is added to it: which of its sequences have come as far
since, and against which of their requests its worker has been vouched for, because it has computed something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.wire.messages import LayerRange

KEEP_S = 600.0
MAX_FAILURES = 64


@dataclass(slots=True, eq=False)
class FailedStep:
    """One step that raised."""

    worker: str  # name of the worker at which it raised
    layers: LayerRange
    ends: Mapping[int, int]  # sequence -> where its row ended
    owners: Mapping[int, str]  # sequence -> its request
    at: float
    pending: set[int] = field(default_factory=set)  # sequences that have not come so far since
    vouched: set[str] = field(default_factory=set)  # requests without which the worker has computed a step since
    is_tested: bool = False  # a test of the worker's device has passed since
    is_last: bool = True  # the worker has computed nothing since

    def __post_init__(self) -> None:
        self.pending.update(self.ends)

    @property
    def requests(self) -> set[str]:
        return set(self.owners.values())

    @property
    def pending_requests(self) -> set[str]:
        return {self.owners[sequence] for sequence in self.pending}


@dataclass(slots=True)
class Evidence:
    """See the module's text."""

    steps: list[FailedStep] = field(default_factory=list)  # the oldest first
    suspects: frozenset[int] = frozenset()  # sequences that are pending in a failure: computed alone
    suspects_are_next: bool = False  # whose turn it is, where others have something to compute too
    unproven: dict[str, str] = field(default_factory=dict)  # worker -> request convicted there, if no step since

    def of_worker(self, name: str) -> list[FailedStep]:
        return [failure for failure in self.steps if failure.worker == name]

    def of_request(self, request_id: str) -> list[FailedStep]:
        """Return the failures since which one of its sequences has not come through."""
        return [failure for failure in self.steps if request_id in failure.pending_requests]

    def in_row(self, worker: str) -> list[FailedStep]:
        """Return a worker's failures since it computed something."""
        return [failure for failure in self.of_worker(worker) if failure.is_last]

    def failed_last(self, sequence: int) -> float:
        """When a sequence was in a step that raised, and has not come through since."""
        return max((failure.at for failure in self.steps if sequence in failure.pending), default=0.0)

    def add(self, failure: FailedStep) -> None:
        """Note that a step raised."""
        self.steps.append(failure)
        self._tidy(failure.at)

    def came_through(
        self, workers: Iterable[str], layers: LayerRange, ends: Mapping[int, int], requests: Iterable[str], now: float
    ) -> None:
        """These workers have computed a step of these requests in these layers; its rows end there."""
        names, computed = set(workers), set(requests)
        self.unproven = {worker: it for worker, it in self.unproven.items() if worker not in names}
        for failure in self.steps:
            if failure.worker in names:
                failure.is_last = False
                failure.vouched |= failure.requests - computed
            if failure.layers.first < layers.stop and layers.first < failure.layers.stop:
                failure.pending -= {s for s in failure.pending if ends.get(s, 0) >= failure.ends[s]}
        self._tidy(now)

    def forget(self, sequences: Iterable[int]) -> None:
        """These have ended: whether they would have come through is not known."""
        ended = set(sequences)
        for failure in self.steps:
            failure.pending -= ended

    def passed_test(self, worker: str) -> None:
        """The worker's device computes without anybody's tokens."""
        for failure in self.of_worker(worker):
            failure.is_tested, failure.is_last = True, False

    def convict(self, request_id: str) -> None:
        """This request is to blame for its failures; they count against nobody else."""
        explained = self.of_request(request_id)
        self.unproven |= {failure.worker: request_id for failure in explained}
        self.steps = [failure for failure in self.steps if failure not in explained]
        self._tidy(0.0)

    def _tidy(self, now: float) -> None:
        self.steps = [failure for failure in self.steps if now - failure.at < KEEP_S][-MAX_FAILURES:]
        self.suspects = frozenset(sequence for failure in self.steps for sequence in failure.pending)

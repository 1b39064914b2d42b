"""Steps that raised, and what was computed afterwards: the evidence on which a worker or a request is blamed.

A failed step stays here for ``KEEP_S``. Later steps update it. A sequence of the failed step no longer counts once it
has been computed to the same position. If the worker has since computed a step that did not contain one of the failed
step's requests, that is noted for the request.
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
    ends: Mapping[int, int]  # sequence -> position at which its row ended
    owners: Mapping[int, str]  # sequence -> id of its request
    failed_at: float  # time of the failure
    speculative: frozenset[int] = frozenset()  # sequences whose rows ended in proposed tokens, which ``ends`` excludes
    pending: set[int] = field(default_factory=set)  # sequences that have not been computed up to their ``ends`` since
    # requests of this step without which the worker has computed a step since
    worker_ok_without: set[str] = field(default_factory=set)
    is_tested: bool = False  # the worker's device has passed a test since
    is_last: bool = True  # the worker has computed nothing since

    def __post_init__(self) -> None:
        self.pending.update(self.ends)

    @property
    def requests(self) -> set[str]:
        return set(self.owners.values())

    @property
    def pending_requests(self) -> set[str]:
        return {self.owners[sequence] for sequence in self.pending}

    def is_speculative(self, request_id: str) -> bool:
        """Whether all pending sequences of a request had proposed tokens in the step, which may be why it failed."""
        return all(sequence in self.speculative for sequence in self.pending if self.owners[sequence] == request_id)


@dataclass(slots=True)
class Evidence:
    """Recent failed steps and the sequences under suspicion (see the module)."""

    steps: list[FailedStep] = field(default_factory=list)  # oldest first
    suspects: frozenset[int] = frozenset()  # sequences that are pending in a failure; they are computed alone
    suspects_are_next: bool = False  # whether suspects go next if other sequences have work too
    # worker -> request convicted of its failure; until the worker has computed a step
    unproven: dict[str, str] = field(default_factory=dict)
    # incarnation -> name of workers whose steps failed, and whose name another process has taken over
    replaced: dict[str, str] = field(default_factory=dict)

    def failures_of_worker(self, name: str) -> list[FailedStep]:
        return [failure for failure in self.steps if failure.worker == name]

    def failures_of_request(self, request_id: str) -> list[FailedStep]:
        """Return the failures since which some sequence of this request has not been computed. Those with proposed
        tokens count only if it has failed without any, too."""
        failures = [failure for failure in self.steps if request_id in failure.pending_requests]
        return [] if all(failure.is_speculative(request_id) for failure in failures) else failures

    def consecutive_failures(self, worker: str) -> list[FailedStep]:
        """Return a worker's failures since it last computed a step."""
        return [failure for failure in self.failures_of_worker(worker) if failure.is_last]

    def last_failure_at(self, sequence: int) -> float:
        """Return the time of the last failure since which this sequence has not been computed; 0 if there is none."""
        return max((failure.failed_at for failure in self.steps if sequence in failure.pending), default=0.0)

    def add(self, failure: FailedStep) -> None:
        """Record a failed step."""
        self.steps.append(failure)
        self._drop_old(failure.failed_at)

    def record_success(
        self, workers: Iterable[str], layers: LayerRange, ends: Mapping[int, int], requests: Iterable[str], now: float
    ) -> None:
        """Record that these workers have computed a step in these layers. ``ends``: sequence -> position at which its
        row ended."""
        names, computed = set(workers), set(requests)
        self.unproven = {worker: request for worker, request in self.unproven.items() if worker not in names}
        for failure in self.steps:
            if failure.worker in names:
                failure.is_last = False
                failure.worker_ok_without |= failure.requests - computed
            if failure.layers.first < layers.stop and layers.first < failure.layers.stop:
                failure.pending -= {s for s in failure.pending if ends.get(s, 0) >= failure.ends[s]}
        self._drop_old(now)

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop sequences that have ended: whether they could be computed stays unknown."""
        ended = set(sequences)
        for failure in self.steps:
            failure.pending -= ended

    def record_passed_test(self, worker: str) -> None:
        """Record that the worker's device has passed its test, which uses no request's tokens."""
        for failure in self.failures_of_worker(worker):
            failure.is_tested, failure.is_last = True, False

    def record_replaced(self, incarnation: str, name: str) -> None:
        """Record that another process has taken over the name of a worker whose device is to be tested."""
        self.replaced[incarnation] = name
        if len(self.replaced) > MAX_FAILURES:
            del self.replaced[next(iter(self.replaced))]

    def take_replaced(self, incarnation: str) -> str | None:
        """Return the former name of a worker that was replaced before its test ended, once."""
        return self.replaced.pop(incarnation, None)

    def convict(self, request_id: str) -> None:
        """Blame this request for its failures; they no longer count against workers or other requests."""
        explained = self.failures_of_request(request_id)
        self.unproven |= {failure.worker: request_id for failure in explained}
        self.steps = [failure for failure in self.steps if failure not in explained]
        self._drop_old(0.0)

    def _drop_old(self, now: float) -> None:
        self.steps = [failure for failure in self.steps if now - failure.failed_at < KEEP_S][-MAX_FAILURES:]
        self.suspects = frozenset(sequence for failure in self.steps for sequence in failure.pending)

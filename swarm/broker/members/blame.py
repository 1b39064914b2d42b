"""Find out what is to blame for a step that raised: the worker, or a request in the step.

After a failed step the same workers continue in a new epoch, and the step's sequences are computed apart: each alone,
in turns with the others (``steps.scheduler``). Which steps fail and which succeed then is the evidence
(``state.evidence``).

A failure of a step with proposed tokens is no evidence against the requests that they were proposed for, until these
have failed without any. Nothing is proposed for their sequences from then on.

A **request** is to blame when its failures follow it: steps with it have failed ``GUILTY_AFTER`` times, it has not
succeeded since, and it failed on two workers, or no other worker could have taken over. In addition, one of these
workers must have computed something else since: another request's step, or a test of its device. A test counts if no
other request fails at these workers. The tests may miss a worker's defect: where no other worker could take over, the
next request is convicted by tests alone only after ``UNSURE_AFTER`` failures.

A **worker** is to blame when its failures follow it, and is put out with the verdict ``failed``:

* it has computed nothing between ``FAILED_AFTER`` failures, and no request was in all of them; or
* it has failed ``OFTEN`` times recently, no single request was in all of these failures, and the last failure was the
  first one for its requests.

If one request was in all of them, the worker is put out as well, so that other workers show which of the two is to
blame: after ``FAILED_AFTER`` failures in a row where others can take its layers, else after ``GUILTY_AFTER``.

A worker that is out for this reason tests its device and sends Hello if the test passes. The first time the broker
calls it back immediately, later after a pause that doubles. The keys and values that it holds are not used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.broker.members.integrity import FaultRuling, call_pause_s
from swarm.broker.state import Sequence, SequenceState, State, Worker
from swarm.broker.state.evidence import KEEP_S, FailedStep
from swarm.wire.messages import LayerRange, ReplayDone, SequencePosition, StepFailure

FAILED_AFTER = 2  # failures in a row of one worker
GUILTY_AFTER = 3  # failures of one sequence since it last came through
# the same, if only a test exonerates the only worker, and a test already convicted an earlier request
UNSURE_AFTER = 15
OFTEN = 4  # failures of one worker within ``KEEP_S``


@dataclass(slots=True)
class StepFailureJudge:
    """Evidence about failed steps, and the decision between worker and request (see the module)."""

    state: State

    def judge(self, worker: Worker, failure: StepFailure, reason: str, *, is_needed: bool) -> FaultRuling:
        """Decide what to do about a step that raised. ``is_needed``: no other worker could compute this worker's
        layers."""
        self.state.count("steps_failed")
        proposals = {row.sequence: self.state.find_proposal(row.sequence) for row in failure.rows}
        ends = {
            row.sequence: row.position if (proposal := proposals[row.sequence]) is None else proposal.start
            for row in failure.rows
        }
        speculative = frozenset(sequence for sequence, proposal in proposals.items() if proposal is not None)
        for sequence in (self.state.sequences[s] for s in speculative if s in self.state.sequences):
            sequence.stop_speculation()
        owners = {s: self._find_request(s) for s in ends}
        evidence = self.state.evidence
        evidence.forget(filter(self._has_ended, evidence.suspects))
        evidence.add(FailedStep(worker.name, failure.layers, ends, owners, self.state.now, speculative))
        # The single request in the step, if there was only one.
        sole_request = next(iter(owners.values())) if len(set(owners.values())) == 1 else None
        if sole_request in self.state.requests and self._is_guilty(sole_request, is_needed):
            return FaultRuling(None, "", self._convict(sole_request, reason))
        why = self._removal_reason(worker, is_needed)
        if not why:
            return FaultRuling(None, "", ())
        delay_call(worker, self.state.now)
        return FaultRuling(worker, f"{why}; the last one, in {failure.layers.label}: {reason}", ())

    def record_step(self, reached: Iterable[SequencePosition], now: float) -> None:
        """Record a step that all stages of the active plan have computed. ``reached``: last position of each sequence
        in the step."""
        plan = self.state.plans.current
        if plan is not None:
            layers = LayerRange(0, plan.stages[-1].layers.stop)
            self._record_computed(layers, {row.sequence: row.position for row in reached}, now)

    def record_replay(self, done: ReplayDone, now: float) -> None:
        """Record that the stages of these layers have computed a chunk of a replay."""
        plan = self.state.plans.current
        if plan is not None and plan.epoch == done.epoch and self.state.evidence.steps:
            ends = {done.sequence: done.kv} | {item.sequence: item.position for item in done.more}
            self._record_computed(done.layers, ends, now)

    def _record_computed(self, layers: LayerRange, ends: dict[int, int], now: float) -> None:
        assert self.state.plans.current is not None
        stages = self.state.plans.current.stages
        names = [s.name for s in stages if s.layers.first < layers.stop and layers.first < s.layers.stop]
        self.state.evidence.record_success(names, layers, ends, map(self._find_request, ends), now)

    def record_test(self, worker: Worker, problem: str) -> None:
        """Record the result of a worker's device test. ``problem``: why it failed; empty: it passed."""
        self._record_test(worker.name, problem)
        if problem:
            delay_call(worker, self.state.now)

    def record_late_test(self, incarnation: str, problem: str) -> bool:
        """Record the result of a device test that ends after another process has taken over the worker's name.

        Two processes of one name whose steps fail in turn may replace each other during every test. Return whether it
        was such a test.
        """
        name = self.state.evidence.take_replaced(incarnation)
        if name is not None:
            self._record_test(name, problem)
        return name is not None

    def _record_test(self, name: str, problem: str) -> None:
        if problem:
            self.state.count("device_tests_failed")
        else:
            self.state.evidence.record_passed_test(name)

    # --- the request -------------------------------------------------------------------------------------------------

    def _is_guilty(self, request_id: str, is_needed: bool) -> bool:
        evidence = self.state.evidence
        failures = evidence.failures_of_request(request_id)
        workers = {failure.worker for failure in failures}
        is_alone = len(workers) == 1
        if len(failures) < GUILTY_AFTER or (is_alone and not is_needed):
            return False
        if any(request_id in failure.worker_ok_without for failure in failures):
            return True
        pending_steps = [failure for failure in evidence.steps if failure.worker in workers and failure.pending]
        is_only_one = all(request_id in failure.pending_requests for failure in pending_steps)
        # convicted, and no step computed since
        convicted = {evidence.unproven.get(worker, request_id) for worker in workers}
        is_enough = not is_alone or convicted == {request_id} or len(failures) >= UNSURE_AFTER
        return any(failure.is_tested for failure in failures) and is_only_one and is_enough

    def _convict(self, request_id: str, reason: str) -> tuple[tuple[Sequence, str], ...]:
        """Return the request's failed sequences, each with the reason for ending it, and clear the workers of blame."""
        failures = self.state.evidence.failures_of_request(request_id)
        failed = {sequence for failure in failures for sequence in failure.pending}
        self.state.evidence.convict(request_id)
        names = sorted({failure.worker for failure in failures})
        if len(names) > 1 or any(request_id in failure.worker_ok_without for failure in failures):
            self._clear(names)
        layers = ", ".join(dict.fromkeys(failure.layers.label for failure in failures))
        detail = (
            f"quarantined: its steps failed {len(failures)} times (on {', '.join(names)}, in {layers}), where other "
            f"requests succeeded; the last one: {reason}"
        )
        sequences = self.state.requests[request_id].sequences
        return tuple((s, detail) for s in sequences if s.id in failed and s.state is not SequenceState.ENDED)

    def _clear(self, names: list[str]) -> None:
        """Let these workers come back immediately: the request was to blame."""
        for worker in self.state.workers.values():
            if worker.name in names:
                worker.num_faults, worker.call_after = 0, min(worker.call_after, self.state.now)

    def _has_ended(self, sequence_id: int) -> bool:
        sequence = self.state.sequences.get(sequence_id)
        return sequence is None or sequence.state is SequenceState.ENDED

    def _find_request(self, sequence_id: int) -> str:
        """Return the request of a sequence; for a sequence that has been dropped, a name unique to it."""
        sequence = self.state.sequences.get(sequence_id)
        return f"sequence {sequence_id}" if sequence is None else sequence.request.id

    # --- the worker --------------------------------------------------------------------------------------------------

    def _removal_reason(self, worker: Worker, is_needed: bool) -> str:
        """Return the reason why this worker must be put out; empty: it stays."""
        failures = self.state.evidence.failures_of_worker(worker.name)
        in_row = self.state.evidence.consecutive_failures(worker.name)
        if len(in_row) >= FAILED_AFTER and not _common_requests(in_row):
            return f"its last {len(in_row)} steps failed, whatever was in them"
        is_new = all(len(self.state.evidence.failures_of_request(r)) <= 1 for r in failures[-1].pending_requests)
        if len(failures) >= OFTEN and not _common_requests(failures) and is_new:
            return f"{len(failures)} of its steps failed within {KEEP_S / 60:.0f} minutes, with different requests"
        if len(in_row) >= (GUILTY_AFTER if is_needed else FAILED_AFTER):
            shows = "a test of its device will show" if is_needed else "other workers will show"
            return f"its last {len(in_row)} steps failed; {shows} whether a request is to blame"
        counts = Counter(request_id for failure in failures for request_id in failure.pending_requests)
        if not is_needed and counts and max(counts.values()) >= GUILTY_AFTER:
            return f"a request failed here {GUILTY_AFTER} times; other workers will show which of the two is to blame"
        return ""


def delay_call(worker: Worker, now: float) -> None:
    """Set when the worker may be called back: immediately at first, later after a pause. Old faults expire."""
    if now - worker.call_after > KEEP_S:
        worker.num_faults = 0
    worker.num_faults += 1
    worker.call_after = now + call_pause_s(worker.num_faults - 1)


def _common_requests(failures: list[FailedStep]) -> set[str]:
    """Return the requests that were in every one of these failures."""
    return failures[0].requests.intersection(*(failure.requests for failure in failures[1:]))

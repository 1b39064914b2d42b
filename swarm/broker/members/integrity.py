"""Integrity of workers' results: messages that were damaged in transit, and hidden states that are not finite.

* *Damaged.* A message's checksum is wrong. The step is lost, and since it may have been the only one, the broker
  doesn't
  wait for a gap: it starts a new epoch immediately, and no worker is blamed. If messages keep arriving damaged and no
  step succeeds, it is not chance: new epochs at that rate would only waste time, so the slower rule for lost steps
  takes
  over (``monitor.LostStepDetector``), which in the end blames the steps' contents.
* *Not finite.* A stage rejects such hidden states and names their sender. The sender must be the previous stage: a
  worker
  can accuse no other one. Since that stage rejects them too, it received finite ones and produced these: it is out,
  fenced, and the keys and values that it holds no longer count (``admission`` has it drop them when it joins again).
  While others can do its work it is called back only after a pause, which doubles each time: broken memory would
  produce
  corrupt results again immediately.
* *Not finite in a row with proposed tokens.* Their text may be none that the model has a finite answer to. The step is
  repeated, nothing more is proposed for the sequence, and neither the worker nor the request is blamed.
* *The same sequence again.* If a sequence is involved ``QUARANTINE_AFTER`` times, on more than one worker or on a
  worker
  that no other one could replace, the model has no finite answer to it: its request fails, and the worker stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Sequence, SequenceState, State, Worker
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import NotFinite, SequencePosition

PAUSE_S = 5.0
MAX_PAUSE_S = 300.0
QUARANTINE_AFTER = 3  # worker deaths at which a request was in flight, until it is suspected of causing them
MAX_IMMEDIATE_EPOCHS = 3  # damaged messages without a completed step between, until the rule for lost steps takes over


def call_pause_s(times: int) -> float:
    """Return how long a worker that was put out this many times is not called back; doubles each time."""
    return min(MAX_PAUSE_S, PAUSE_S * 2 ** (times - 1)) if times > 0 else 0.0


@dataclass(frozen=True, slots=True)
class FaultRuling:
    """Decision about a worker that could not compute a step, or computed it wrongly. ``out``: the worker, if it must
    go; ``poisonous``: sequences that no worker can compute, each with the reason."""

    out: Worker | None
    evidence: str
    poisonous: tuple[tuple[Sequence, str], ...]


@dataclass(slots=True)
class IntegrityMonitor:
    """Decides about damaged messages and about hidden states that are not finite (see the module)."""

    state: State

    def record_damage(self) -> bool:
        """Count a damaged message. Returns whether to act immediately, since a step may have been in it."""
        self.state.count("damaged_messages")
        self.state.data_path_errors.num_damaged += 1
        return self.state.data_path_errors.num_damaged <= MAX_IMMEDIATE_EPOCHS

    def judge(self, reporter: Worker, suspect: Worker, report: NotFinite, *, is_needed: bool) -> FaultRuling:
        """Decide about hidden states that are not finite. ``is_needed``: no other worker could compute the suspect's
        layers."""
        self.state.count("not_finite")
        certain = [row for row in report.rows if not self._has_proposal(row)]
        if not certain:  # a guess may be a text to which the model has no finite answer
            return FaultRuling(None, "", ())
        sequences = [s for row in certain if (s := self._find_unended(row.sequence)) is not None]
        for sequence in sequences:
            sequence.record_not_finite(suspect.name)
        poisonous = [
            s for s in sequences if len(s.not_finite) >= QUARANTINE_AFTER and (is_needed or len(set(s.not_finite)) > 1)
        ]
        evidence = (
            f"it sent {reporter.name} hidden states that are not finite, out of {report.layers.label}: "
            + ", ".join(f"sequence {row.sequence} from position {row.position} on" for row in report.rows[:4])
        )
        is_the_model = bool(sequences) and len(poisonous) == len(sequences)
        if not is_the_model:
            suspect.num_corrupt_results += 1
            suspect.call_after = self.state.now + call_pause_s(suspect.num_corrupt_results)
        ends = tuple((sequence, self._poison_reason(sequence, report)) for sequence in poisonous)
        return FaultRuling(None if is_the_model else suspect, evidence, ends)

    def _has_proposal(self, row: SequencePosition) -> bool:
        """Whether the row ends in proposed tokens. Nothing more is then proposed for the sequence."""
        if self.state.find_proposal(row.sequence) is None:
            return False
        if (sequence := self._find_unended(row.sequence)) is not None:
            sequence.stop_speculation()
        return True

    def sequences_to_quarantine(self) -> list[tuple[Sequence, str]]:
        """Return the sequences that were in flight at several worker deaths, with the reason to end them: each may be
        the cause, and must not take the swarm down."""
        present = [s for s in (*self.state.running, *self.state.waiting) if s.num_deaths >= QUARANTINE_AFTER]
        what = "quarantined: it was in flight at {} worker deaths or losses of steps"
        return [(sequence, what.format(sequence.num_deaths)) for sequence in present]

    def may_rejoin(self, worker: Worker) -> bool:
        """Whether to call back a worker that is out but alive.

        A pause must have passed, unless there is no plan without this worker. A worker whose steps failed, or that
        differed from the plan, must wait in any case: it could not serve, and the broker would call it back again and
        again.
        """
        plans = self.state.plans
        must_wait = worker.verdict in (Verdict.FAILED, Verdict.DIFFERS)
        is_wanted = plans.current is None and plans.upcoming is None and not must_wait
        return self.state.now >= worker.call_after or is_wanted

    def find_accused(self, reporter: Worker, report: NotFinite) -> Worker | None:
        """Return the stage before the reporter's if that is the accused one. None: the accused worker can't have sent
        the data."""
        plan = self.state.plans.current
        own = plan.stage_of(reporter.incarnation) if plan is not None else None
        if plan is None or own is None:
            return None
        before = next((stage for stage in plan.stages if stage.layers.stop == own.layers.first), None)
        if before is None or before.name != report.worker:
            return None
        return self.state.workers.get(before.incarnation)

    def _find_unended(self, sequence_id: int) -> Sequence | None:
        sequence = self.state.sequences.get(sequence_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    @staticmethod
    def _poison_reason(sequence: Sequence, report: NotFinite) -> str:
        position = next(row.position for row in report.rows if row.sequence == sequence.id)
        return (
            f"quarantined: its hidden states were not finite {len(sequence.not_finite)} times "
            f"(on {', '.join(sequence.not_finite)}), the last time at position {position} in {report.layers.label}; "
            "the model's weights or their dtype are unfit for this input"
        )

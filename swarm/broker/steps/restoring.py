"""Restoring: long sequences begin with the keys and values that the stages have on their disks, if there are any.

When a plan serves whose stages all have space on disk and the same bits, they write long sequences to it (``SpillKv``).
A sequence that is then admitted with enough tokens to compute takes this way:

1. The next step opens it in all stages, without a row.
2. When that step is complete, each stage is ordered to read what it has (``RestoreKv``).
3. When all stages have answered, the sequence goes on from the least position that one of them has reached. Its next
   step cuts the others to it.

The sequence holds its blocks from the beginning, so memory is never short for what is read. If an answer is missing
when the deadline has passed, nothing counts, and everything is computed. The deadline is about the time in which that
would be done. Answers that come later have an old ticket. After a late or missing answer, nothing is read for a while,
so that a disk that hangs delays few sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.state import Plan, Sequence, State, Worker
from swarm.broker.state.restores import Restore
from swarm.wire.messages import KvRestored, RestoreKv, SpillKv

SPILL_VERSION = 4  # of the protocol: the first with these orders
MIN_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # stages look at the time ten times a second
READ_POSITION_S = 0.00025  # expected time per position of slow disks, where no speed of computing is known yet
ANSWER_SHARE = 0.8  # of the time until the deadline, after which stages answer with what they have read


def begin_restore(state: State, sequence: Sequence, now: float) -> None:
    """Let a sequence that was just admitted wait for what the stages have of it on disk, if it is long enough."""
    least, num_positions = state.restores.num_positions, sequence.pending
    may_restore = not sequence.starts_from_nothing and now >= state.restores.rests_until
    if least and num_positions >= least and may_restore:
        num_awaited = num_positions + state.restores.num_awaited
        state.restores.begin(sequence, now, now + wait_s(num_awaited, state.costs.prompt_tokens_per_s))
        sequence.start_restore()
        state.running.refresh(sequence)
    else:
        state.recoveries.record_restored(sequence.id, sequence.kv, sequence.kv)


def wait_s(num_positions: int, tokens_per_s: float | None) -> float:
    """Return how long a sequence may wait: about the time for computing its positions, and those of the sequences that
    already wait."""
    seconds = num_positions / tokens_per_s if tokens_per_s else 1.0 + num_positions * READ_POSITION_S
    return max(MIN_WAIT_S, min(MAX_WAIT_S, seconds))


@dataclass(slots=True)
class Restorer:
    """Orders stages to write and read, and handles their answers. Appends actions to ``out``."""

    state: State
    out: Outbox

    def on_serving(self) -> None:
        """Order the stages of a plan that begins to write long sequences, if all can, with the same bits."""
        plan, restores = self.state.plans.current, self.state.restores
        assert plan is not None
        workers = [self.state.workers[stage.incarnation] for stage in plan.stages]
        running = {sequence.id: sequence.kv for sequence in self.state.running}
        bits = self._common_bits(plan, workers)
        if not bits and (spilling := sorted(w.name for w in workers if w.hello.spill_from)):
            without = sorted(w.name for w in workers if w.name not in spilling)
            reason = (
                "these have no space on disk" if without else "the stages compute other bits, or the model has states"
            )
            self.out.note("disks_not_used", epoch=plan.epoch, reason=reason, workers=without)
        restores.start_plan(bits, max(w.hello.spill_from for w in workers), running)
        if restores.num_positions:
            order = SpillKv(
                epoch=plan.epoch,
                num_positions=restores.num_positions,
                bits=restores.bits,
                excluded=tuple(sorted(restores.excluded)),
            )
            self.out.extend(SendToWorker(worker.peer, order) for worker in workers)
            self.state.count("restored_positions", 0)  # reported from now on

    def _common_bits(self, plan: Plan, workers: list[Worker]) -> str:
        """Return the bits that all stages have; empty if they differ, or if a stage has no space on disk."""
        bits = {self.state.plans.capacity[stage.incarnation].bits for stage in plan.stages}
        can_spill = all(w.hello.spill_from and max(w.hello.wire_versions) >= SPILL_VERSION for w in workers)
        # states are not written
        return bits.pop() if can_spill and len(bits) == 1 and not self.state.state_stride else ""

    def on_step_done(self, step: int, now: float) -> None:
        """Order the stages to read what they have of the sequences that they opened with this step."""
        plan = self.state.plans.current
        for item in list(self.state.restores.in_progress.values()):
            if item.step != step or not item.is_current or plan is None:
                continue
            within_s = max(0.0, ANSWER_SHARE * (item.deadline - now))
            item.await_answers(plan.members, within_s, now)
            order = RestoreKv(
                epoch=plan.epoch,
                sequence=item.sequence.id,
                ticket=item.ticket,
                start=item.start,
                stop=item.stop,
                within_s=within_s,
            )
            self.out.extend(SendToWorker(self.state.workers[i].peer, order) for i in sorted(plan.members))

    def on_restored(self, worker: Worker, message: KvRestored, now: float) -> None:
        """Handle a stage's answer."""
        plan, item = self.state.plans.current, self.state.restores.find(message.sequence, message.ticket)
        is_current = plan is not None and plan.epoch == message.epoch
        if item is None or not is_current or worker.incarnation not in item.unanswered:
            self.state.count("stale_restores")
            return
        item.record_answer(worker.incarnation, self._check_position(worker, item, message.position))
        if item.is_slow(now):
            self._report_slow(worker, item, message.position, now)
        elif not item.unanswered:
            self.state.restores.rest_s = 0.0
        if not item.unanswered and item.position is not None:
            self._finish(item, item.position, now)

    def _check_position(self, worker: Worker, item: Restore, position: int) -> int:
        """Return the position that a stage has reached; where the stages began if it is outside of what they were
        ordered to read. A stage that is not ready reports an earlier one."""
        if item.start <= position <= item.stop:
            return position
        self.state.count("restores_unfit")
        self.out.note(
            "restored_position_unfit",
            "warning",
            worker=worker.name,
            sequence=item.sequence.id,
            position=position,
            ordered=[item.start, item.stop],
        )
        return item.start

    def _report_slow(self, worker: Worker, item: Restore, position: int, now: float) -> None:
        """Report a stage that has used up its time; read nothing for a while."""
        self.state.count("restores_slow")
        self.state.restores.rest(now)
        self.out.note(
            "sequence_restored_slowly",
            "warning",
            worker=worker.name,
            sequence=item.sequence.id,
            position=position,
            ordered=[item.start, item.stop],
            after_s=round(now - item.ordered_at, 4),
            rest_s=self.state.restores.rest_s,
        )

    def tick(self, now: float) -> None:
        """End restores whose deadline has passed, and those of sequences that have ended or were preempted."""
        for item in list(self.state.restores.in_progress.values()):
            if not item.is_current:
                self.state.restores.end(item)
            elif now >= item.deadline:
                self.state.count("restores_too_late")
                missing = sorted(self.state.workers[i].name for i in item.unanswered if i in self.state.workers)
                if missing:
                    self.state.restores.rest(now)
                self.out.note("sequence_not_restored", "warning", sequence=item.sequence.id, awaited=missing)
                self._finish(item, item.start, now)

    def _finish(self, item: Restore, position: int, now: float) -> None:
        """Let a sequence run from a position that all stages have reached."""
        sequence = item.sequence
        self.state.restores.end(item)
        sequence.finish_restore(position)
        self.state.recoveries.record_restored(sequence.id, item.start, position)
        self.state.running.refresh(sequence)
        if position > item.start:
            self.state.count("restored_sequences")
            self.state.count("restored_positions", position - item.start)
            self.out.note(
                "sequence_restored",
                sequence=sequence.id,
                positions=position - item.start,
                left=sequence.pending,
                after_s=round(now - item.began_at, 4),
            )

"""Who is to be believed: messages that were damaged on their way, and hidden states that are not finite.

* *Damaged.* What came is not what was sent (checksums). The step is lost, and since it may have been the only one, the
  broker doesn't wait for a gap: a new epoch, at once, and nobody is blamed. If one message after the other is damaged
  and no step comes through, that is no accident any more: new epochs at that pace would only burn time, so the slower
  rule for lost steps takes over (``vigil.LostSteps``), which in the end blames what the steps carry.
* *Not finite.* A stage refuses such hidden states and names who sent them. It must be the stage before it: nobody can
  accuse anybody else. Since that stage refuses them too, it got finite ones and made these: it is out, fenced, and
  whatever it holds of sequences counts no more (``members`` has it forget that when it joins anew). While others can
  do its work it is called back only after a pause, which doubles each time: broken memory would lie again at once.
* *The same sequence again.* If a sequence is there ``QUARANTINE_AFTER`` times, on more than one worker or on one that
  nobody could stand in for, it is the model that has no finite answer to it: its request fails, and the worker stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Sequence, SequenceState, State, Worker
from swarm.broker.state.workers import Verdict
from swarm.wire.messages import NotFinite

PAUSE_S = 5.0
MAX_PAUSE_S = 300.0
QUARANTINE_AFTER = 3  # worker deaths at which a request was in flight, until it is suspected of causing them
ACT_AT_ONCE = 3  # damaged messages without a step that came through between, until the rule for lost steps takes over


def pause_s(times: int) -> float:
    """How long a worker that was put out so often is not called back; twice as long each time."""
    return min(MAX_PAUSE_S, PAUSE_S * 2 ** (times - 1)) if times > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What follows from what a worker could not compute, or computed wrongly. ``out``: the worker, if it must go;
    ``poisonous``: sequences that no worker can compute."""

    out: Worker | None
    evidence: str
    poisonous: tuple[tuple[Sequence, str], ...]


@dataclass(slots=True)
class Lies:
    """See the module's text."""

    state: State

    def is_loss(self) -> bool:
        """A damaged message came: may a step have been in it, and is it to be acted on at once?"""
        self.state.count("damaged_messages")
        self.state.setbacks.damaged += 1
        return self.state.setbacks.damaged <= ACT_AT_ONCE

    def judge(self, reporter: Worker, suspect: Worker, found: NotFinite, *, is_needed: bool) -> Finding:
        """``is_needed``: nobody else could compute what the suspect does."""
        self.state.count("not_finite")
        concerned = [s for row in found.rows if (s := self._alive(row.sequence)) is not None]
        for sequence in concerned:
            sequence.be_not_finite(suspect.name)
        poisonous = [
            s for s in concerned if len(s.not_finite) >= QUARANTINE_AFTER and (is_needed or len(set(s.not_finite)) > 1)
        ]
        evidence = (
            f"it sent {reporter.name} hidden states that are not finite, out of {found.layers.in_words}: "
            + ", ".join(f"sequence {row.sequence} from position {row.position} on" for row in found.rows[:4])
        )
        is_the_model = bool(concerned) and len(poisonous) == len(concerned)
        if not is_the_model:
            suspect.num_lies += 1
            suspect.call_after = self.state.now + pause_s(suspect.num_lies)
        ends = tuple((sequence, self._why_poisonous(sequence, found)) for sequence in poisonous)
        return Finding(None if is_the_model else suspect, evidence, ends)

    def dangerous(self) -> list[tuple[Sequence, str]]:
        """Whoever was present at several deaths may be their cause, and must not take the swarm with it; and why."""
        present = [s for s in (*self.state.running, *self.state.waiting) if s.num_deaths >= QUARANTINE_AFTER]
        what = "quarantined: it was in flight at {} worker deaths or losses of steps"
        return [(sequence, what.format(sequence.num_deaths)) for sequence in present]

    def may_be_called(self, worker: Worker) -> bool:
        """Whether a worker that lives may be told to join anew: at once if nothing can be served without it, unless its
        steps failed. Then it could serve nothing either, and would be told so again and again."""
        book = self.state.book
        is_wanted = book.current is None and book.coming is None and worker.verdict is not Verdict.FAILED
        return self.state.now >= worker.call_after or is_wanted

    def sender_to(self, reporter: Worker, found: NotFinite) -> Worker | None:
        """The stage before the reporter's, if it is the one accused; None: it accuses one that can't have sent it."""
        plan = self.state.book.current
        own = plan.stage_of(reporter.incarnation) if plan is not None else None
        if plan is None or own is None:
            return None
        before = next((stage for stage in plan.stages if stage.layers.stop == own.layers.first), None)
        if before is None or before.name != found.worker:
            return None
        return self.state.workers.get(before.incarnation)

    def _alive(self, sequence_id: int) -> Sequence | None:
        sequence = self.state.sequences.get(sequence_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    @staticmethod
    def _why_poisonous(sequence: Sequence, found: NotFinite) -> str:
        position = next(row.position for row in found.rows if row.sequence == sequence.id)
        return (
            f"quarantined: its hidden states were not finite {len(sequence.not_finite)} times "
            f"(on {', '.join(sequence.not_finite)}), the last time at position {position} in {found.layers.in_words}; "
            "the model's weights or their dtype are unfit for this input"
        )

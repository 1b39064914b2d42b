"""Who is waited for before a plan is made: at a swarm's start, and after the broker's own death.

A broker takes up where the one before it ended.

The journal tells of requests, their tokens, and the epoch; workers tell what they hold of them when they join. From
both follows what was: the plan that fell, and how far each sequence has come in the stages. What then happens is what
happens after any loss: layers stay with those who have them, sequences whose keys and values are everywhere go on, the
rest is replayed.

Nobody is hurried: the workers of the last plan are waited for a moment, since a plan without them would compute again
what they hold. If nobody holds anything, all processes were started again, and nobody knows which of them: the wait is
longer then, but only until as many have come as a first start would wait for, and no others follow them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.state import Plan, Sequence, SequenceState, StagePlan, State, Worker, WorkerState
from swarm.broker.state.past import Past
from swarm.broker.state.plans import Return
from swarm.wire.messages import LayerRange, num_blocks

# A worker that lives is back within two knocks; and of workers that are started together, the next one comes within
# that time of the one before.
REJOIN_S = 3.0


@dataclass(slots=True)
class Restart:
    """Keeps ``state.back``: what is still to be found out after a restart."""

    state: State
    min_workers: int = 0
    book: Return = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.state.back

    def begin(self, past: Past, now: float, gather_s: float) -> None:
        """Requests have been restored; now for the workers. Those that live are back at once. If none of those that
        came holds anything, all were started again, and starting takes its time: up to ``gather_s``, as at a first
        start."""
        self.book.awaited = set(past.workers)
        self.book.until, self.book.gathered_at = now + REJOIN_S, now + max(REJOIN_S, gather_s)
        self.book.is_over = past.epoch == 0
        self.book.model_is_remembered = past.manifest is not None

    @property
    def holders(self) -> tuple[str, ...]:
        """Whom the next broker should wait for: until the plan to come serves, the sequences are with the members of
        the one in force, or with those that are left of the one that fell; without one, with those awaited here."""
        book = self.state.book
        before = book.current or book.fallen
        members = set() if before is None else before.members
        left = [w.name for w in self.state.workers.values() if w.incarnation in members and not w.is_gone]
        named = () if book.coming is None else (stage.name for stage in book.coming.stages)
        return tuple(dict.fromkeys([*named, *left])) or tuple(self.book.awaited)

    @property
    def missing(self) -> list[str]:
        """Workers of the last plan that have not come back."""
        here = {worker.name for worker in self.state.workers.values() if not worker.is_gone}
        return sorted(self.book.awaited - here)

    @property
    def is_complete(self) -> bool:
        """Whether all are back, and nothing is left to wait for."""
        return bool(self.book.awaited) and not self.book.is_over and not self.missing

    def waits_for(self, now: float) -> str | None:
        """Whom, in words; None if there is no use in waiting any longer."""
        if self.book.is_over or not self.missing or now >= self._given_up_at:
            return None
        return f"the workers of before the restart: {', '.join(self.missing)}"

    @property
    def _given_up_at(self) -> float:
        """When it is of no use any more to wait for those that are missing."""
        here = [worker for worker in self.state.workers.values() if not worker.is_gone]
        if any(worker.believed for worker in here):
            return self.book.until
        if len(here) < max(1, self.min_workers):
            return self.book.gathered_at
        # As many as are wanted. The others may have been started with them, or not at all.
        return min(self.book.gathered_at, max(worker.waits_since for worker in here) + REJOIN_S)

    def end(self) -> Plan | None:
        """A plan is about to be made: take back the sequences that workers hold. The plan that fell, as far as it can
        be told; None if nobody holds anything."""
        if self.book.is_over:
            return None
        self.book.is_over = True
        fallen = _fallen(self.state)
        sequences = self.state.sequences.values()
        # What came since is nobody's: what a worker holds under its number is another's.
        restored = [s for s in sequences if s.state is SequenceState.WAITING and s.request.restored]
        if fallen is None:
            self._note_all_lost(restored)
            return None
        self.state.recoveries.begin("the broker was started again", self.state.now)
        holders = [self.state.workers[stage.incarnation] for stage in fallen.stages]
        for sequence in restored:
            self._take_back(sequence, holders)
        return fallen

    def _note_all_lost(self, restored: list[Sequence]) -> None:
        """Note that nobody holds anything. What was under way begins anew, like prompts, when its turn comes."""
        if not restored:
            return
        num_layers = 0 if self.state.manifest is None else self.state.manifest.num_layers
        positions = sum(s.sampled - 1 for s in restored if s.num_generated)  # a prompt may not have been computed
        self.state.recoveries.begin("the broker was started again, and no worker held anything", self.state.now)
        self.state.recoveries.begins_anew(len(restored), positions * num_layers)

    def _take_back(self, sequence: Sequence, holders: list[Worker]) -> None:
        """Held somewhere up to a position whose tokens are known: it runs, and what lags behind will be replayed."""
        most = max(((worker.believed or {}).get(sequence.id, 0) for worker in holders), default=0)
        position = min(most, sequence.sampled - 1)
        if position <= 0:
            return
        self.state.waiting.remove(sequence)
        sequence.take_back(position, self.state.now)
        self.state.running.add(sequence, num_blocks(position))
        self.state.count("sequences_taken_back")


def _fallen(state: State) -> Plan | None:
    """From what the members say they held, in the order of the layers; of two who claim the same, the first."""
    stages: list[StagePlan] = []
    members = [w for w in state.workers.values() if not w.is_gone and w.believed and w.hello.held_layers is not None]
    for worker in sorted(members, key=lambda w: (_range(w).first, w.joined_at)):
        layers, hello = _range(worker), worker.hello
        if len(layers) and (not stages or stages[-1].layers.stop <= layers.first):
            stages.append(
                StagePlan(
                    worker.incarnation, worker.name, layers, state.ways.endpoint_of(worker), 0, hello.host, hello.device
                )
            )
    return Plan(state.book.epoch, tuple(stages), "") if stages else None


def _range(worker: Worker) -> LayerRange:
    return worker.hello.held_layers or LayerRange(0, 0)


@dataclass(slots=True)
class Gathering:
    """A swarm that starts with several workers makes its first plan with all of them; a broker that starts again, with
    those of its last plan."""

    state: State
    restart: Restart
    min_workers: int
    gather_s: float  # how long the first plan waits for ``min_workers`` once one has joined

    def goes_on(self, now: float) -> bool:
        """Is somebody waited for? ``state.book.waits_for`` says who."""
        awaited = self.restart.waits_for(now)
        if awaited is not None:
            self.state.book.waits_for = awaited
            return True
        joined, wanted = self._waiting(), self.min_workers
        if self.state.book.epoch or len(joined) >= wanted or (joined and now - min(joined) > self.gather_s):
            return False
        self.state.book.waits_for = f"{wanted - len(joined)} more of {wanted} workers"
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all who were waited for are there: those of before a restart, or as many as were asked for, if
        several."""
        return self.restart.is_complete or (not self.state.book.epoch and 1 < self.min_workers <= len(self._waiting()))

    def _waiting(self) -> list[float]:
        """Since when each member waits for others."""
        return [w.waits_since for w in self.state.workers.values() if w.state is WorkerState.MEMBER]

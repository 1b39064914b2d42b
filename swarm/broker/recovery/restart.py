"""Workers to wait for before a plan is made: at a swarm's start, and after the broker's own death.

A restarted broker resumes where the previous one ended.

The journal holds requests, their tokens, and the epoch; workers report what they hold of them when they join. Together
they give the previous state: the plan that fell, and the position of each sequence in the stages. The rest is as after
any loss: layers stay with the workers that have them, sequences whose keys and values are complete go on, the rest is
replayed.

The broker waits a moment for the workers of the last plan, since a plan without them would compute again what they
hold. If no worker holds anything, all processes were restarted, and it is unclear which will come back: the wait is
longer then, but only until as many have come as a first start would wait for, and no others follow them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.broker.state import Plan, Sequence, SequenceState, StagePlan, State, Worker, WorkerState
from swarm.broker.state.past import Past
from swarm.broker.state.plans import Return
from swarm.wire.messages import LayerRange, num_blocks

# Seconds. A worker that lives is back within two connection attempts; and of workers that are started together, each
# comes within that time of the one before.
REJOIN_S = 3.0


@dataclass(slots=True)
class Restart:
    """Progress of a restart: the workers that are awaited, and the sequences to restore. Owns ``state.restart``."""

    state: State
    min_workers: int = 0
    book: Return = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.state.back

    def begin(self, past: Past, now: float, gather_s: float) -> None:
        """Start waiting for workers, after requests have been restored. Workers that live are back soon. If none of
        them holds anything, all were restarted, and starting takes time: up to ``gather_s``, as at a first start."""
        self.book.awaited = set(past.workers)
        self.book.until, self.book.gathered_at = now + REJOIN_S, now + max(REJOIN_S, gather_s)
        self.book.is_over = past.epoch == 0
        self.book.model_is_remembered = past.manifest is not None

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers that the next broker should wait for. Until the prepared plan serves, the sequences are with the
        members of the active one, or with the remaining members of the plan that fell; without a plan, with the workers
        awaited here."""
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
        """Return the workers to wait for, as text; None if waiting longer is pointless."""
        if self.book.is_over or not self.missing or now >= self._given_up_at:
            return None
        return f"the workers from before the restart: {', '.join(self.missing)}"

    @property
    def _given_up_at(self) -> float:
        """Time from which on waiting for the missing workers is pointless."""
        here = [worker for worker in self.state.workers.values() if not worker.is_gone]
        if any(worker.believed for worker in here):
            return self.book.until
        if len(here) < max(1, self.min_workers):
            return self.book.gathered_at
        # As many as required have come. The others may have been started with them, or not at all.
        return min(self.book.gathered_at, max(worker.waits_since for worker in here) + REJOIN_S)

    def end(self) -> Plan | None:
        """Restore the sequences that workers hold, since a plan is about to be made. Returns the plan that fell, as far
        as it can be reconstructed; None if no worker holds anything."""
        if self.book.is_over:
            return None
        self.book.is_over = True
        fallen = _fallen(self.state)
        sequences = self.state.sequences.values()
        # Sequences that came since are held by no worker: what a worker holds under the same number is another
        # sequence's.
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
        """Record that no worker holds anything. Unfinished sequences start again, like prompts, in their turn."""
        if not restored:
            return
        num_layers = 0 if self.state.manifest is None else self.state.manifest.num_layers
        positions = sum(s.sampled - 1 for s in restored if s.num_generated)  # a prompt may not have been computed
        self.state.recoveries.begin("the broker was started again, and no worker held anything", self.state.now)
        self.state.recoveries.begins_anew(len(restored), positions * num_layers)

    def _take_back(self, sequence: Sequence, holders: list[Worker]) -> None:
        """Resume a sequence that a worker holds up to a position whose tokens are available; the missing rest will be
        replayed."""
        most = max(((worker.believed or {}).get(sequence.id, 0) for worker in holders), default=0)
        position = min(most, sequence.sampled - 1)
        if position <= 0:
            return
        self.state.waiting.remove(sequence)
        sequence.take_back(position, self.state.now)
        self.state.running.add(sequence, num_blocks(position))
        self.state.count("sequences_taken_back")


def _fallen(state: State) -> Plan | None:
    """Return the plan as members report having served it, in the order of the layers; if two claim the same layers, the
    first."""
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
    """Wait before the first plan: a new swarm awaits several workers, a restarted broker those of its last plan."""

    state: State
    restart: Restart
    min_workers: int
    gather_s: float  # how long the first plan waits for ``min_workers`` once one has joined

    def goes_on(self, now: float) -> bool:
        """Whether to wait for more workers. Sets ``state.plans.waits_for`` to the reason."""
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
        """Whether all awaited workers are there: those of before a restart, or the required number, if several."""
        return self.restart.is_complete or (not self.state.book.epoch and 1 < self.min_workers <= len(self._waiting()))

    def _waiting(self) -> list[float]:
        """Return the times since which members have been waiting for others."""
        return [w.waits_since for w in self.state.workers.values() if w.state is WorkerState.MEMBER]

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
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.broker.state.plans import RestartState
from swarm.wire.messages import LayerRange, num_blocks

# Seconds. A worker that lives is back within two connection attempts; and of workers that are started together, each
# comes within that time of the one before.
REJOIN_S = 3.0


@dataclass(slots=True)
class Restart:
    """Progress of a restart: the workers that are awaited, and the sequences to restore. Owns ``state.restart``."""

    state: State
    min_workers: int = 0
    progress: RestartState = field(init=False)

    def __post_init__(self) -> None:
        self.progress = self.state.restart

    def begin(self, snapshot: JournalSnapshot, now: float, gather_s: float) -> None:
        """Start waiting for workers, after requests have been restored. Workers that live are back soon. If none of
        them holds anything, all were restarted, and starting takes time: up to ``gather_s``, as at a first start."""
        self.progress.awaited = set(snapshot.workers)
        self.progress.rejoin_until, self.progress.gather_until = now + REJOIN_S, now + max(REJOIN_S, gather_s)
        self.progress.is_over = snapshot.epoch == 0
        self.progress.model_is_remembered = snapshot.manifest is not None

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers that the next broker should wait for. Until the prepared plan serves, the sequences are with the
        members of the active one, or with the remaining members of the plan that fell; without a plan, with the workers
        awaited here."""
        plans = self.state.plans
        before = plans.current or plans.failed
        members = set() if before is None else before.members
        left = [w.name for w in self.state.workers.values() if w.incarnation in members and not w.is_gone]
        named = () if plans.upcoming is None else (stage.name for stage in plans.upcoming.stages)
        return tuple(dict.fromkeys([*named, *left])) or tuple(self.progress.awaited)

    @property
    def missing(self) -> list[str]:
        """Workers of the last plan that have not come back."""
        present = {worker.name for worker in self.state.workers.values() if not worker.is_gone}
        return sorted(self.progress.awaited - present)

    @property
    def is_complete(self) -> bool:
        """Whether all workers of the last plan have rejoined after the broker's restart, so that the wait can end."""
        return bool(self.progress.awaited) and not self.progress.is_over and not self.missing

    def wait_reason(self, now: float) -> str | None:
        """Return the workers to wait for, as text; None if waiting longer is pointless."""
        if self.progress.is_over or not self.missing or now >= self._deadline:
            return None
        return f"the workers from before the restart: {', '.join(self.missing)}"

    @property
    def _deadline(self) -> float:
        """Time from which on waiting for the missing workers is pointless."""
        present = [worker for worker in self.state.workers.values() if not worker.is_gone]
        if any(worker.trusted_positions for worker in present):
            return self.progress.rejoin_until
        if len(present) < max(1, self.min_workers):
            return self.progress.gather_until
        # As many as required have come. The others may have been started with them, or not at all.
        return min(self.progress.gather_until, max(worker.waiting_since for worker in present) + REJOIN_S)

    def finish(self) -> Plan | None:
        """Restore the sequences that workers hold, since a plan is about to be made. Returns the plan that fell, as far
        as it can be reconstructed; None if no worker holds anything."""
        if self.progress.is_over:
            return None
        self.progress.is_over = True
        fallen = _reconstruct_plan(self.state)
        sequences = self.state.sequences.values()
        # Sequences that came since are held by no worker: what a worker holds under the same number is another
        # sequence's.
        restored = [s for s in sequences if s.state is SequenceState.WAITING and s.request.was_restored]
        if fallen is None:
            self._record_all_lost(restored)
            return None
        self.state.recoveries.begin("the broker was started again", self.state.now)
        holders = [self.state.workers[stage.incarnation] for stage in fallen.stages]
        for sequence in restored:
            self._resume_sequence(sequence, holders)
        return fallen

    def _record_all_lost(self, restored: list[Sequence]) -> None:
        """Record that no worker holds anything. Unfinished sequences start again, like prompts, in their turn."""
        if not restored:
            return
        num_layers = 0 if self.state.manifest is None else self.state.manifest.num_layers
        self.state.recoveries.begin("the broker was started again, and no worker held anything", self.state.now)
        for sequence in restored:  # a prompt may not have been computed
            position = sequence.sampled - 1 if sequence.num_generated else 0
            self.state.recoveries.add_lost(sequence.id, position, num_layers)

    def _resume_sequence(self, sequence: Sequence, holders: list[Worker]) -> None:
        """Resume a sequence that a worker holds up to a position whose tokens are available; the missing rest will be
        replayed."""
        if sequence.starts_from_nothing:
            return
        most = max(((worker.trusted_positions or {}).get(sequence.id, 0) for worker in holders), default=0)
        position = min(most, sequence.sampled - 1)
        if position <= 0:
            return
        self.state.waiting.remove(sequence)
        sequence.resume(position, self.state.now)
        self.state.running.add(sequence, num_blocks(position))
        self.state.count("sequences_taken_back")


def _reconstruct_plan(state: State) -> Plan | None:
    """Return the plan that the broker's predecessor served, as the members report it, in layer order. Layers that two
    members claim are assigned to the member that joined first."""
    stages: list[StagePlan] = []
    members = [
        w for w in state.workers.values() if not w.is_gone and w.trusted_positions and w.hello.held_layers is not None
    ]
    for worker in sorted(members, key=lambda w: (_held_range(w).first, w.joined_at)):
        layers, hello = _held_range(worker), worker.hello
        if len(layers) and (not stages or stages[-1].layers.stop <= layers.first):
            stages.append(
                StagePlan(
                    worker.incarnation,
                    worker.name,
                    layers,
                    state.routes.endpoint_of(worker),
                    0,
                    hello.host,
                    hello.device,
                )
            )
    return Plan(state.plans.epoch, tuple(stages), "") if stages else None


def _held_range(worker: Worker) -> LayerRange:
    return worker.hello.held_layers or LayerRange(0, 0)


@dataclass(slots=True)
class StartupWait:
    """Wait before the first plan: a new swarm waits for ``min_workers``, a restarted broker for the workers of its last
    plan."""

    state: State
    restart: Restart
    min_workers: int
    gather_s: float  # how long the first plan waits for ``min_workers`` once one has joined

    def keep_waiting(self, now: float) -> bool:
        """Whether to wait for more workers. Sets ``state.plans.waits_for`` to the reason."""
        awaited = self.restart.wait_reason(now)
        if awaited is not None:
            self.state.plans.waits_for = awaited
            return True
        joined, wanted = self._waiting_since(), self.min_workers
        if self.state.plans.epoch or len(joined) >= wanted or (joined and now - min(joined) > self.gather_s):
            return False
        rest = wanted - len(joined)
        self.state.plans.waits_for = "1 more worker" if wanted == 1 else f"{rest} more of {wanted} workers"
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all awaited workers have joined.

        After a restart of the broker: all workers of the last plan. At a first start: ``min_workers``, if that is more
        than one.
        """
        return self.restart.is_complete or (
            not self.state.plans.epoch and 1 < self.min_workers <= len(self._waiting_since())
        )

    def _waiting_since(self) -> list[float]:
        """Return the time at which each member began to wait for a plan."""
        return [w.waiting_since for w in self.state.workers.values() if w.state is WorkerState.MEMBER]

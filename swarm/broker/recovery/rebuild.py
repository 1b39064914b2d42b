"""Sequences across a change of plan: which ones stay, and how layers that changed hands are rebuilt.

After a change of plan every stage reports, layer by layer, the keys and values that it holds of each sequence, and the
contents of its activation log. Layers that are behind the sequence's committed position are rebuilt from the nearest
log upstream of them. Without such a log they are rebuilt from the tokens, which the broker has; the tokens are the log
at boundary 0. No other layer computes anything: the survivors' keys and values stay as they are.

Sequences are rebuilt in the order of their cost, and each resumes as soon as all its layers are complete. For every
stage of the pipeline one chunk of a run is ordered at a time, and the next one when it is done: a step never waits for
more than one chunk of replay.

Keys and values are identified by their sequence's number, which is not enough: a worker may have served another
journal, or a journal that was replaced by a backup since. So the keys and values of a worker's Hello count only if they
belong to this broker's journal, and were computed from the tokens that this broker has. From the first plan on that
includes the worker, it holds what it was ordered to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.broker.actions import Dispatch, Outbox, SendToWorker
from swarm.broker.recovery.replay_speeds import ReplaySpeeds
from swarm.broker.state import Plan, Rebuild, Sequence, SequenceState, State, Worker
from swarm.broker.state.plans import Rebuilding
from swarm.broker.steps.kv_capacity import admission_blocks
from swarm.broker.steps.scheduler import build_open
from swarm.wire.digests import num_matching
from swarm.wire.messages import (
    NO_LINEAGE,
    REPLAY_STEP,
    Activated,
    HeldSequence,
    Hello,
    LayerRange,
    Replay,
    ReplayDone,
    ReplayMissing,
    Row,
    SequencePosition,
    Step,
    num_blocks,
    to_ranges,
)


@dataclass(frozen=True, slots=True)
class RebuildSettings:
    """Settings of replays. ``chunk``: positions of one order. ``from_tokens``: never use a log, for comparisons."""

    chunk: int = 256
    from_tokens: bool = False


# --- sequences that stay ---------------------------------------------------------------------------------------------


def evict_overflow(state: State) -> list[Sequence]:
    """Keep the running sequences that fit into the new plan, in order of rank; the others wait again. Returns the kept
    ones."""
    plans, blocks = state.plans, 0
    kept: list[tuple[Sequence, int]] = []
    evicted: list[Sequence] = []
    for sequence in sorted(state.running, key=lambda s: s.rank, reverse=True):
        needed = admission_blocks(state, sequence, headroom=0)
        # A sequence that can't reach its limit under this plan must wait for another one.
        can_end = num_blocks(sequence.limit) <= plans.kv_blocks
        if can_end and len(kept) < plans.max_sequences and blocks + needed <= plans.kv_blocks:
            blocks += needed
            kept.append((sequence, needed))
        else:
            evicted.append(sequence)
    state.running.clear()
    for sequence in evicted:
        sequence.requeue()
        sequence.mark_fitting()
        state.waiting.add(sequence)
    for sequence, needed in kept:
        sequence.truncate_to(sequence.kv)
        state.running.add(sequence, needed)
    return [sequence for sequence, _ in kept]


def trusted_positions(hello: Hello, state: State) -> dict[int, int] | None:
    """Return the number of trusted positions of each sequence that the worker holds, where there are any. None: the
    worker has served no broker yet, so that there is nothing to distrust."""
    if hello.lineage == NO_LINEAGE and not hello.held:
        return None
    if hello.lineage.journal != state.lineage.journal:
        return {}
    positions: dict[int, int] = {}
    for sequence_id, held in {held.sequence: held for held in hello.held}.items():
        sequence = state.sequences.get(sequence_id)
        position = max((part.position for part in held.kv), default=0)
        if sequence is None or held.limit != sequence.limit:
            continue  # two journals gave out the same number: this one replaced the other from a backup
        counts = num_matching(sequence.tokens, position, held.digests)
        if counts:
            positions[sequence_id] = counts
    return positions


def live_positions(worker: Worker, sequences: list[Sequence]) -> tuple[SequencePosition, ...]:
    """Return the positions that the worker is to keep of these sequences. It drops all other sequences."""
    believed = worker.trusted_positions
    if believed is None:
        return tuple(SequencePosition(s.id, s.kv) for s in sequences)
    return tuple(SequencePosition(s.id, min(s.kv, believed[s.id])) for s in sequences if s.id in believed)


# --- replays ---------------------------------------------------------------------------------------------------------


def find_rebuild_runs(
    sequence: Sequence, plan: Plan, reports: Mapping[str, Activated], *, from_tokens: bool = False
) -> list[Rebuild] | int:
    """Return the replays that are needed until every layer holds ``sequence.kv`` positions. If they would go through
    all layers, return instead the position from which the sequence is to be computed again like a prompt, in steps
    shared with others."""
    target = sequence.kv
    positions = _layer_positions(sequence.id, plan, reports)
    runs: list[Rebuild] = []
    for lost in to_ranges(layer for layer, position in enumerate(positions) if position < target):
        first, stop = lost.first, lost.stop
        source, boundary = (None, 0) if from_tokens else _find_nearest_log(sequence.id, target, first, plan, reports)
        num_lost, start = stop - first, min(positions[first:stop])
        # it would go through layers of the run before: merge both into one run
        if runs and boundary < runs[-1].through.stop:
            before = runs.pop()
            source, boundary = before.source, before.through.first
            num_lost, start = num_lost + before.num_lost, min(start, before.start)
        runs.append(Rebuild(source, LayerRange(boundary, stop), num_lost, target, start, start))
    if any(run.through == LayerRange(0, len(positions)) for run in runs):
        return min(positions)
    return runs


def _layer_positions(sequence: int, plan: Plan, reports: Mapping[str, Activated]) -> list[int]:
    """Return the position up to which each layer of the model holds the sequence."""
    positions: list[int] = []
    for stage in plan.stages:
        held = next((h for h in reports[stage.incarnation].held if h.sequence == sequence), None)
        positions.extend(_position(held, layer) for layer in range(stage.layers.first, stage.layers.stop))
    return positions


def _position(held: HeldSequence | None, layer: int) -> int:
    if held is None:
        return 0
    return next((r.position for r in held.kv if r.layers.first <= layer < r.layers.stop), 0)


def _find_nearest_log(
    sequence: int, target: int, layer: int, plan: Plan, reports: Mapping[str, Activated]
) -> tuple[str | None, int]:
    """Return the stage with the complete log of the inputs of ``layer``, or of a layer before it, that can send it
    there: a stage reaches the next stage, and its own layers. (None, 0): there is no such log, and the tokens must
    serve."""
    best: tuple[str | None, int] = (None, 0)
    for stage in plan.stages:
        for entry in reports[stage.incarnation].logs:
            reaches = stage.layers.first < entry.boundary <= stage.layers.stop
            whole = entry.sequence == sequence and entry.start == 0 and entry.stop >= target
            if reaches and whole and best[1] < entry.boundary <= layer:
                best = stage.incarnation, entry.boundary
    return best


@dataclass(slots=True)
class Rebuilder:
    """Orders replays and handles their results. Owns ``state.rebuilding``; appends actions to ``out``."""

    state: State
    settings: RebuildSettings
    out: Outbox
    rebuilding: Rebuilding = field(init=False)
    _speeds: ReplaySpeeds = field(init=False)

    def __post_init__(self) -> None:
        self._speeds = ReplaySpeeds(self.state)
        self.rebuilding = self.state.rebuilding
        self.rebuilding.chunk_positions = self.settings.chunk

    def begin(self, now: float) -> None:
        """Once all stages have reported what they hold, find the sequences that are behind, and start with the
        cheapest."""
        plan = self.state.plans.current
        assert plan is not None
        waiting: list[Sequence] = []
        for sequence in self.state.running:
            runs = find_rebuild_runs(sequence, plan, self.rebuilding.reports, from_tokens=self.settings.from_tokens)
            if isinstance(runs, int):
                self._count_as_prompt(sequence, plan, runs)
                sequence.recompute_from(runs)
            elif runs:
                sequence.start_rebuild(runs)
                waiting.append(sequence)
            self.state.running.refresh(sequence)
        self._speeds.reset()
        self.rebuilding.reports.clear()
        self.rebuilding.queue.extend(sorted(waiting, key=lambda s: (sum(run.cost for run in s.rebuilds), s.id)))
        self.rebuilding.began_at = now
        self.rebuilding.cost = sum(run.cost for sequence in waiting for run in sequence.rebuilds)
        if waiting:
            self._log_start(waiting)
        self._start_next(now)
        self._check_end(now)

    def on_answer(self, message: ReplayDone | ReplayMissing, now: float) -> None:
        if isinstance(message, ReplayDone):
            self.on_replay_done(message, now)
        else:
            self.on_replay_missing(message, now)

    def on_replay_done(self, message: ReplayDone, now: float) -> None:
        """Handle a replayed chunk."""
        sequence, run = self._find(message.sequence, message.epoch, message.layers)
        if sequence is None or run is None or message.kv != min(run.stop, run.done + self.rebuilding.chunk_positions):
            self.state.count("stale_replays")
            return
        self.state.count("replayed_positions", message.kv - run.done)
        self.state.count("replayed_layer_positions", (message.kv - run.done) * len(run.through))
        self.state.count("lost_layer_positions", (message.kv - run.done) * run.num_lost)
        self._speeds.on_done(sequence.id, run, message.kv, now)
        self.rebuilding.cost_done += (message.kv - run.done) * len(run.through)
        run.done = message.kv
        if run.done >= run.stop:
            sequence.finish_rebuild(run)
        if not sequence.rebuilds:
            self.rebuilding.in_progress.remove(sequence)
            self.rebuilding.completed_before = self.state.next_step
            self.state.running.refresh(sequence)
            self.state.count("sequences_rebuilt")
            self.out.note(
                "sequence_rebuilt", sequence=sequence.id, positions=run.stop, after_s=now - self.rebuilding.began_at
            )
        else:
            self._order_chunk(sequence, sequence.rebuilds[0], now)
        self._start_next(now)
        self._check_end(now)

    def on_replay_missing(self, message: ReplayMissing, now: float) -> None:
        """Replay from the tokens instead, through all layers up to the end of the run: the log is gone meanwhile."""
        sequence, run = self._find(message.sequence, message.epoch, None)
        if sequence is None or run is None or run.source is None or run.through.first != message.boundary:
            self.state.count("stale_replays")
            return
        self.state.count("replays_missing")
        run.source, run.through = None, LayerRange(0, run.through.stop)
        self._order_chunk(sequence, run, now)

    def tick(self, now: float) -> None:
        """Remove sequences that ended or were preempted, and start the next ones."""
        self._start_next(now)
        self._check_end(now)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _find(self, sequence_id: int, epoch: int, through: LayerRange | None) -> tuple[Sequence | None, Rebuild | None]:
        plan = self.state.plans.current
        sequence = next((s for s in self.rebuilding.in_progress if s.id == sequence_id), None)
        if sequence is None or plan is None or plan.epoch != epoch or not sequence.rebuilds:
            return None, None
        run = sequence.rebuilds[0]
        return (sequence, run) if through is None or run.through == through else (None, None)

    def _start_next(self, now: float) -> None:
        """Start queued replays, so that as many sequences are in progress as the plan has stages (one if the stages
        share cores)."""
        plan = self.state.plans.current
        for sequence in [
            s for s in self.rebuilding.in_progress if not s.rebuilds or s.state is not SequenceState.RUNNING
        ]:
            self.rebuilding.in_progress.remove(sequence)
        # Stages that share cores gain nothing from several replays.
        most = 1 if plan is None or plan.shares_cores else len(plan.stages)
        while self.rebuilding.queue and len(self.rebuilding.in_progress) < most:
            sequence = self.rebuilding.queue.popleft()
            if sequence.state is SequenceState.RUNNING and sequence.rebuilds:
                self.rebuilding.in_progress.append(sequence)
                self._order_chunk(sequence, sequence.rebuilds[0], now)

    def _check_end(self, now: float) -> None:
        if self.rebuilding.is_idle and self.state.plans.is_serving:
            self.state.recoveries.record_replayed(now)

    def _count_as_prompt(self, sequence: Sequence, plan: Plan, start: int) -> None:
        """Record the work of a sequence that all layers must compute again, whichever layers were lost."""
        positions = _layer_positions(sequence.id, plan, self.rebuilding.reports)
        least = sum(max(0, sequence.kv - position) for position in positions)
        self.state.recoveries.add_replay_work((sequence.kv - start) * len(positions), least)

    def _order_chunk(self, sequence: Sequence, run: Rebuild, now: float) -> None:
        plan = self.state.plans.current
        assert plan is not None
        stop = min(run.stop, run.done + self.rebuilding.chunk_positions)
        self.rebuilding.ordered_at = now
        self._speeds.on_ordered(sequence.id, now)
        alone = plan.shares_cores  # run the replay alone, since there are few steps meanwhile
        if run.source is not None:
            order = Replay(
                epoch=plan.epoch,
                sequence=sequence.id,
                boundary=run.through.first,
                start=run.done,
                stop=stop,
                through=run.through,
                alone=alone,
            )
            self.out.append(SendToWorker(run.source.encode(), order))
            return
        step = Step(
            epoch=plan.epoch,
            step=REPLAY_STEP,
            rows=(Row(sequence.id, run.done, stop - run.done, False),),
            tokens=tuple(sequence.tokens[run.done : stop]),
            open=(build_open(sequence),) if run.done == 0 else (),
            replay=True,
            through=run.through,
            alone=alone,
        )
        self.out.append(Dispatch(step))

    def _log_start(self, waiting: list[Sequence]) -> None:
        runs = [run for sequence in waiting for run in sequence.rebuilds]
        cost, least = sum(run.cost for run in runs), sum((run.stop - run.done) * run.num_lost for run in runs)
        self.state.recoveries.add_replay_work(cost, least)
        self.out.note(
            "replay_begins",
            sequences=len(waiting),
            layer_positions=cost,
            least=least,
            from_logs=sum(run.source is not None for run in runs),
            from_tokens=sum(run.source is None for run in runs),
        )

"""Sequences across a change of plan: which ones stay, and how layers that changed hands are rebuilt.

After a change of plan every stage reports what it holds of each sequence, layer by layer, and what its log has. Layers
that are behind the sequence's committed position are rebuilt from the nearest log upstream of them; without one, from
the tokens, which are the log at boundary 0, and the broker has them. No other layer computes anything: the survivors'
keys and values stay as they are.

Sequences are rebuilt in the order of the cost, and each resumes as soon as all its layers are complete. One chunk of a
run is ordered at a time for every stage of the pipeline, and the next when one is done: a step never waits for more
than one chunk of replay.

Keys and values are identified by their sequence's number, which is not enough: a worker may have served another
journal, or a journal that was replaced by a backup since. So the keys and values of a worker's Hello count only if they
are of this broker's journal, and were computed from the tokens that this broker has. From the first plan on that
includes the worker, it holds what it was ordered to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.broker.actions import Dispatch, OrderWorker, Outbox
from swarm.broker.state import Plan, Rebuild, Sequence, SequenceState, State, Worker
from swarm.broker.state.plans import Rebuilding
from swarm.broker.steps.room import entry_blocks
from swarm.broker.steps.scheduler import opening
from swarm.wire.digests import num_matching
from swarm.wire.messages import (
    NOBODYS,
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
    ranges_of,
)


@dataclass(frozen=True, slots=True)
class RebuildSettings:
    """Settings of replays. ``chunk``: positions of one order. ``from_tokens``: never use a log, for comparisons."""

    chunk: int = 256
    from_tokens: bool = False


# --- sequences that stay ---------------------------------------------------------------------------------------------


def keep_what_fits(state: State) -> list[Sequence]:
    """Keep the running sequences that fit into the new plan, in order of rank; the others wait again. Returns the kept
    ones."""
    book, blocks = state.book, 0
    kept: list[tuple[Sequence, int]] = []
    evicted: list[Sequence] = []
    for sequence in sorted(state.running, key=lambda s: s.rank, reverse=True):
        needed = entry_blocks(state, sequence, headroom=0)
        # A sequence that can't reach its limit under this plan must wait for another one.
        can_end = num_blocks(sequence.limit) <= book.kv_blocks
        if can_end and len(kept) < book.max_sequences and blocks + needed <= book.kv_blocks:
            blocks += needed
            kept.append((sequence, needed))
        else:
            evicted.append(sequence)
    state.running.clear()
    for sequence in evicted:
        sequence.wait_again()
        sequence.fit()
        state.waiting.add(sequence)
    for sequence, needed in kept:
        sequence.cut_to(sequence.kv)
        state.running.add(sequence, needed)
    return [sequence for sequence, _ in kept]


def what_counts(hello: Hello, state: State) -> dict[int, int] | None:
    """Return the number of trusted positions of each sequence that the worker holds, where there are any. None: the
    worker has served no broker yet, so that there is nothing to distrust."""
    if hello.lineage == NOBODYS and not hello.held:
        return None
    if hello.lineage.journal != state.lineage.journal:
        return {}
    found: dict[int, int] = {}
    for sequence_id, held in {held.sequence: held for held in hello.held}.items():
        sequence = state.sequences.get(sequence_id)
        position = max((part.position for part in held.kv), default=0)
        if sequence is None or held.limit != sequence.limit:
            continue  # two journals gave out the same number: this one replaced the other from a backup
        counts = num_matching(sequence.tokens, position, held.digests)
        if counts:
            found[sequence_id] = counts
    return found


def live_at(worker: Worker, kept: list[Sequence]) -> tuple[SequencePosition, ...]:
    """Return the positions that the worker is to keep of these sequences. It drops all other sequences."""
    believed = worker.believed
    if believed is None:
        return tuple(SequencePosition(s.id, s.kv) for s in kept)
    return tuple(SequencePosition(s.id, min(s.kv, believed[s.id])) for s in kept if s.id in believed)


# --- replays ---------------------------------------------------------------------------------------------------------


def runs_to_rebuild(
    sequence: Sequence, plan: Plan, said: Mapping[str, Activated], *, from_tokens: bool = False
) -> list[Rebuild] | int:
    """Return the replays that are needed until every layer holds ``sequence.kv`` positions. If they would go through
    all layers, return instead the position from which the sequence is to be computed again like a prompt, in steps
    shared with others."""
    target = sequence.kv
    positions = _positions(sequence.id, plan, said)
    found: list[Rebuild] = []
    for lost in ranges_of(layer for layer, position in enumerate(positions) if position < target):
        first, stop = lost.first, lost.stop
        source, boundary = (None, 0) if from_tokens else _nearest_log(sequence.id, target, first, plan, said)
        num_lost, start = stop - first, min(positions[first:stop])
        # it would go through layers of the run before: merge both into one run
        if found and boundary < found[-1].through.stop:
            before = found.pop()
            source, boundary = before.source, before.through.first
            num_lost, start = num_lost + before.num_lost, min(start, before.start)
        found.append(Rebuild(source, LayerRange(boundary, stop), num_lost, target, start, start))
    if any(run.through == LayerRange(0, len(positions)) for run in found):
        return min(positions)
    return found


def _positions(sequence: int, plan: Plan, said: Mapping[str, Activated]) -> list[int]:
    """Return the position up to which each layer of the model holds the sequence."""
    positions: list[int] = []
    for stage in plan.stages:
        held = next((h for h in said[stage.incarnation].held if h.sequence == sequence), None)
        positions.extend(_position(held, layer) for layer in range(stage.layers.first, stage.layers.stop))
    return positions


def _position(held: HeldSequence | None, layer: int) -> int:
    if held is None:
        return 0
    return next((r.position for r in held.kv if r.layers.first <= layer < r.layers.stop), 0)


def _nearest_log(
    sequence: int, target: int, layer: int, plan: Plan, said: Mapping[str, Activated]
) -> tuple[str | None, int]:
    """Return the stage with the complete log of the inputs of ``layer``, or of a layer before it, that can send it
    there: a stage reaches the next stage, and its own layers. (None, 0): there is no such log, and the tokens must
    serve."""
    best: tuple[str | None, int] = (None, 0)
    for stage in plan.stages:
        for entry in said[stage.incarnation].logs:
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
    book: Rebuilding = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.state.rebuilding
        self.book.chunk = self.settings.chunk

    def begin(self, now: float) -> None:
        """Once all stages have reported what they hold, find the sequences that are behind, and start with the
        cheapest."""
        plan = self.state.book.current
        assert plan is not None
        waiting: list[Sequence] = []
        for sequence in self.state.running:
            runs = runs_to_rebuild(sequence, plan, self.book.said, from_tokens=self.settings.from_tokens)
            if isinstance(runs, int):
                self._count_as_prompt(sequence, plan, runs)
                sequence.compute_from(runs)
            elif runs:
                sequence.lag(runs)
                waiting.append(sequence)
            self.state.running.refresh(sequence)
        self.book.said.clear()
        self.book.queue.extend(sorted(waiting, key=lambda s: (sum(run.cost for run in s.rebuilds), s.id)))
        self.book.began_at = now
        if waiting:
            self._note_plan(waiting)
        self._fill(now)
        self._notice_end(now)

    def answered(self, message: ReplayDone | ReplayMissing, now: float) -> None:
        if isinstance(message, ReplayDone):
            self.done(message, now)
        else:
            self.missing(message, now)

    def done(self, message: ReplayDone, now: float) -> None:
        """Handle a replayed chunk."""
        sequence, run = self._find(message.sequence, message.epoch, message.layers)
        if sequence is None or run is None or message.kv != min(run.stop, run.done + self.book.chunk):
            self.state.count("stale_replays")
            return
        self.state.count("replayed_positions", message.kv - run.done)
        self.state.count("replayed_layer_positions", (message.kv - run.done) * len(run.through))
        self.state.count("lost_layer_positions", (message.kv - run.done) * run.num_lost)
        run.done = message.kv
        if run.done >= run.stop:
            sequence.level(run)
        if not sequence.rebuilds:
            self.book.under_way.remove(sequence)
            self.state.running.refresh(sequence)
            self.state.count("sequences_rebuilt")
            self.out.note(
                "sequence_rebuilt", sequence=sequence.id, positions=run.stop, after_s=now - self.book.began_at
            )
        else:
            self._order(sequence, sequence.rebuilds[0], now)
        self._fill(now)
        self._notice_end(now)

    def missing(self, message: ReplayMissing, now: float) -> None:
        """Replay from the tokens instead, through all layers up to the end of the run: the log is gone meanwhile."""
        sequence, run = self._find(message.sequence, message.epoch, None)
        if sequence is None or run is None or run.source is None or run.through.first != message.boundary:
            self.state.count("stale_replays")
            return
        self.state.count("replays_missing")
        run.source, run.through = None, LayerRange(0, run.through.stop)
        self._order(sequence, run, now)

    def tick(self, now: float) -> None:
        """Remove sequences that ended or were preempted, and start the next ones."""
        self._fill(now)
        self._notice_end(now)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _find(self, sequence_id: int, epoch: int, through: LayerRange | None) -> tuple[Sequence | None, Rebuild | None]:
        plan = self.state.book.current
        sequence = next((s for s in self.book.under_way if s.id == sequence_id), None)
        if sequence is None or plan is None or plan.epoch != epoch or not sequence.rebuilds:
            return None, None
        run = sequence.rebuilds[0]
        return (sequence, run) if through is None or run.through == through else (None, None)

    def _fill(self, now: float) -> None:
        """Start replays up to one sequence per stage."""
        plan = self.state.book.current
        for sequence in [s for s in self.book.under_way if not s.rebuilds or s.state is not SequenceState.RUNNING]:
            self.book.under_way.remove(sequence)
        # Stages that share cores gain nothing from several replays.
        most = 1 if plan is None or plan.shares_cores else len(plan.stages)
        while self.book.queue and len(self.book.under_way) < most:
            sequence = self.book.queue.popleft()
            if sequence.state is SequenceState.RUNNING and sequence.rebuilds:
                self.book.under_way.append(sequence)
                self._order(sequence, sequence.rebuilds[0], now)

    def _notice_end(self, now: float) -> None:
        if self.book.is_idle and self.state.book.serving:
            self.state.recoveries.replayed(now)

    def _count_as_prompt(self, sequence: Sequence, plan: Plan, start: int) -> None:
        """Record the work of a sequence that goes through all layers again, whichever were lost."""
        positions = _positions(sequence.id, plan, self.book.said)
        least = sum(max(0, sequence.kv - position) for position in positions)
        self.state.recoveries.replays((sequence.kv - start) * len(positions), least)

    def _order(self, sequence: Sequence, run: Rebuild, now: float) -> None:
        plan = self.state.book.current
        assert plan is not None
        stop = min(run.stop, run.done + self.book.chunk)
        self.book.ordered_at = now
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
            self.out.append(OrderWorker(run.source.encode(), order))
            return
        step = Step(
            epoch=plan.epoch,
            step=REPLAY_STEP,
            rows=(Row(sequence.id, run.done, stop - run.done, False),),
            tokens=tuple(sequence.tokens[run.done : stop]),
            open=(opening(sequence),) if run.done == 0 else (),
            replay=True,
            through=run.through,
            alone=alone,
        )
        self.out.append(Dispatch(step))

    def _note_plan(self, waiting: list[Sequence]) -> None:
        runs = [run for sequence in waiting for run in sequence.rebuilds]
        cost, least = sum(run.cost for run in runs), sum((run.stop - run.done) * run.num_lost for run in runs)
        self.state.recoveries.replays(cost, least)
        self.out.note(
            "replay_begins",
            sequences=len(waiting),
            layer_positions=cost,
            least=least,
            from_logs=sum(run.source is not None for run in runs),
            from_tokens=sum(run.source is None for run in runs),
        )

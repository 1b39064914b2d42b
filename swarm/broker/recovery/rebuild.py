"""Sequences across a change of plan: which ones stay, and how layers that changed hands are rebuilt.

After a change of plan every stage reports, layer by layer, the keys and values that it holds of each sequence, and the
contents of its activation log. Layers that are behind the sequence's committed position are rebuilt from the nearest
log upstream of them. Without such a log they are rebuilt from the tokens, which the broker has; the tokens are the log
at boundary 0. No other layer computes anything: the survivors' keys and values stay as they are.

Sequences are rebuilt in the order of their cost, and each resumes as soon as all its layers are complete. For every
stage of the pipeline one chunk is ordered at a time, and the next one when it is done: a step never waits for more than
one chunk of replay. A chunk is a part of one sequence, or the rests of several sequences that go through the same
layers, as after a loss of layers of which there are copies.

Keys and values are identified by their sequence's number, which is not enough: a worker may have served another
journal, or a journal that was replaced by a backup since. So the keys and values of a worker's Hello count only if they
belong to this broker's journal, and were computed from the tokens that this broker has. From the first plan on that
includes the worker, it holds what it was ordered to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.broker.actions import Dispatch, Outbox, SendToWorker
from swarm.broker.recovery.rebuild_runs import find_rebuild_runs, layer_positions
from swarm.broker.recovery.replay_speeds import ReplaySpeeds
from swarm.broker.state import Plan, Rebuild, Sequence, SequenceState, State, Worker
from swarm.broker.state.rebuilding import Rebuilding
from swarm.broker.steps.images import awaits_images, replay_stop
from swarm.broker.steps.restoring import begin_restore
from swarm.broker.steps.scheduler import MAX_OPEN_BYTES, build_open, image_pixels, max_record_bytes
from swarm.wire.digests import num_matching
from swarm.wire.messages import (
    NO_LINEAGE,
    REPLAY_STEP,
    Activated,
    HeldSequence,
    Hello,
    LayerRange,
    RangePosition,
    Replay,
    ReplayDone,
    ReplayMissing,
    Row,
    SequencePosition,
    SequenceRange,
    Step,
)

SHARED_STEP_VERSION = 4  # of the protocol: the first with replays of several sequences in one step


@dataclass(frozen=True, slots=True)
class RebuildSettings:
    """Settings of replays. ``chunk``: positions of one order. ``from_tokens``: never use a log, for comparisons."""

    chunk: int = 256
    from_tokens: bool = False


# --- sequences that stay ---------------------------------------------------------------------------------------------


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
        counts = num_matching(sequence.tokens, position, held.digests, sequence.adapter, sequence.images)
        if counts:
            positions[sequence_id] = counts
    return positions


def live_positions(worker: Worker, sequences: list[Sequence]) -> tuple[SequencePosition, ...]:
    """Return the positions that the worker is to keep of these sequences. It drops all other sequences."""
    believed = worker.trusted_positions
    if believed is None:
        return tuple(SequencePosition(s.id, s.kv) for s in sequences)
    return tuple(SequencePosition(s.id, min(s.kv, believed[s.id])) for s in sequences if s.id in believed)


def trust_copied(report: Activated, state: State) -> Activated:
    """Lower the positions that a stage took over from copies only to those whose tokens are the sequence's: it has them
    from another worker. If it has reserved other memory than the sequence needs now, none count: the stage reserves it
    anew when the sequence is opened. Such sequences have digests."""
    return msgspec.structs.replace(report, held=tuple(_trust_digests(held, state) for held in report.held))


def _trust_digests(held: HeldSequence, state: State) -> HeldSequence:
    sequence = state.sequences.get(held.sequence)
    if not held.digests or sequence is None:
        return held
    position = max(part.position for part in held.kv)
    is_whole = held.limit == sequence.limit
    count = num_matching(sequence.tokens, position, held.digests, sequence.adapter, sequence.images) if is_whole else 0
    cut = count if state.manifest is None else state.manifest.floor_to_state(count)
    parts = (RangePosition(part.layers, part.position if part.position <= count else cut) for part in held.kv)
    return msgspec.structs.replace(held, kv=tuple(parts))


# --- replays ---------------------------------------------------------------------------------------------------------


def _is_waiting(sequence: Sequence) -> bool:
    """Whether a sequence still waits for its layers."""
    return bool(sequence.rebuilds) and sequence.state is SequenceState.RUNNING


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
        for sequence in list(self.state.running):
            shared = self._await_prefix(sequence, plan)
            runs = find_rebuild_runs(
                sequence,
                plan,
                self.rebuilding.reports,
                shared=shared or 0,
                from_tokens=self.settings.from_tokens,
                stride=self.state.state_stride,
            )
            is_needed_whole = isinstance(runs, int) and (shared or runs < self.state.shared.stop(sequence.id))
            if shared is None or is_needed_whole:  # it starts again, from the prefix of another one
                link = self.state.prefixes.links.get(sequence.id)
                self._count_as_prompt(sequence, plan, 0 if link is None else link.position)
                self._drop_prefix(sequence.id)
                self.state.send_back(sequence)
                continue
            if isinstance(runs, int):
                self._count_as_prompt(sequence, plan, runs)
                sequence.recompute_from(runs)
                begin_restore(self.state, sequence, now)
            elif runs:
                sequence.start_rebuild(runs)
                waiting.append(sequence)
            else:
                self.state.prefix.acknowledge(
                    sequence.id, sequence.tokens, sequence.kv, sequence.adapter, sequence.images
                )
            self.state.running.refresh(sequence)
        self._speeds.reset()
        self.rebuilding.reports.clear()
        self.rebuilding.queue.extend(waiting)
        self.rebuilding.began_at = now
        self.rebuilding.begin_work(sum(run.cost for sequence in waiting for run in sequence.rebuilds))
        if waiting:
            self._log_start(waiting)
        self._start_next(now)
        self._check_end(now)

    def _await_prefix(self, sequence: Sequence, plan: Plan) -> int | None:
        """Return how many positions the sequence gets from the one with which it shares a prefix, once the layers of
        that one are rebuilt; 0 if it holds its prefix, or shares none. None: it can't get them."""
        link = self.state.prefixes.links.get(sequence.id)
        if link is None or min(layer_positions(sequence, plan, self.rebuilding.reports)) >= link.position:
            return 0
        source = self.state.sequences.get(link.source)  # none if its request was cancelled while the stages reported
        if source is None or source.state is not SequenceState.RUNNING or not source.rebuilds:
            return None
        self.state.prefixes.await_source(sequence, source)
        self.state.prefix.pin(source.id)
        return link.position

    def _drop_prefix(self, sequence: int) -> None:
        """Note that a sequence waits for its prefix no longer."""
        source = self.state.prefixes.drop(sequence)
        if source is not None:
            self.state.prefix.unpin(source.id)

    def _drop_prefixes(self) -> None:
        """Send back the sequences whose prefix is gone with its source before its layers were rebuilt."""
        for sequence_id, source, residency in self.state.prefixes.sources():
            sequence = self.state.sequences.get(sequence_id)
            if sequence is None or not _is_waiting(sequence):
                self._drop_prefix(sequence_id)
            elif (source.id not in self.state.prefix.retired) and (
                source.state is not SequenceState.RUNNING or source.residency != residency
            ):
                self._drop_prefix(sequence_id)
                self.state.send_back(sequence)

    def on_answer(self, message: ReplayDone | ReplayMissing, now: float) -> None:
        if isinstance(message, ReplayDone):
            self.on_replay_done(message, now)
        else:
            self.on_replay_missing(message, now)

    def on_replay_done(self, message: ReplayDone, now: float) -> None:
        """Handle a replayed chunk, of one sequence or of several."""
        done: list[tuple[Sequence, Rebuild]] = []
        for reached in (SequencePosition(message.sequence, message.kv), *message.more):
            sequence, run = self._find(reached.sequence, message.epoch, message.layers)
            if sequence is None or run is None or reached.position != run.ordered:
                self.state.count("stale_replays")
            else:
                done.append((sequence, run))
        self._speeds.on_done([run for _, run in done], now)
        for sequence, run in done:
            self._record_chunk(sequence, run, now)
        self._start_next(now)
        self._check_end(now)

    def _record_chunk(self, sequence: Sequence, run: Rebuild, now: float) -> None:
        num_positions = run.ordered - run.done
        self.state.count("replayed_positions", num_positions)
        self.state.count("replayed_layer_positions", num_positions * len(run.through))
        self.state.count("lost_layer_positions", num_positions * run.num_lost)
        self.rebuilding.record_work(num_positions * len(run.through))
        run.done = run.ordered
        self.rebuilding.in_progress.remove(sequence)
        if run.done >= run.stop:
            sequence.finish_rebuild(run)
        if sequence.rebuilds:
            self.rebuilding.queue.append(sequence)
            return
        self._drop_prefix(sequence.id)
        self.state.prefix.acknowledge(sequence.id, sequence.tokens, sequence.kv, sequence.adapter, sequence.images)
        self.rebuilding.record_complete(self.state.next_step)
        self.state.running.refresh(sequence)
        self.state.count("sequences_rebuilt")
        self.out.note(
            "sequence_rebuilt", sequence=sequence.id, positions=run.stop, after_s=now - self.rebuilding.began_at
        )

    def on_replay_missing(self, message: ReplayMissing, now: float) -> None:
        """Replay from the tokens instead, through all layers up to the end of the run: the log is gone meanwhile. So do
        the sequence's later runs through these layers, which must be level in the end."""
        sequence, run = self._find(message.sequence, message.epoch, None)
        if sequence is None or run is None or run.source is None or run.through.first != message.boundary:
            self.state.count("stale_replays")
            return
        self.state.count("replays_missing")
        for later in [later for later in sequence.rebuilds if later.through.first <= message.boundary]:
            later.source, later.through = None, LayerRange(0, later.through.stop)
        if stride := self.state.state_stride:  # layers that have passed this position hold no state here
            run.done = run.ordered = run.done // stride * stride
        self.rebuilding.in_progress.remove(sequence)
        self.rebuilding.queue.append(sequence)
        self._start_next(now)

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
        """Start queued replays, so that as many steps with replays are in progress as the plan has stages (one if the
        stages share cores). The sequence with the least work goes first."""
        plan, rebuilding = self.state.plans.current, self.rebuilding
        self._drop_prefixes()
        for sequence in [s for s in rebuilding.in_progress if not _is_waiting(s)]:
            rebuilding.in_progress.remove(sequence)
        if rebuilding.queue:
            waiting = sorted(filter(_is_waiting, rebuilding.queue), key=self._turn)
            rebuilding.queue.clear()
            rebuilding.queue.extend(waiting)
        if not self.state.plans.is_serving:
            return  # the plan is about to be replaced, and the next one may need other replays
        # Stages that share cores gain nothing from several replays.
        most = 1 if plan is None or plan.shares_cores else len(plan.stages)
        while self._is_next_ready() and len({s.rebuilds[0].group for s in rebuilding.in_progress}) < most:
            self._order_chunks(self._take_group(), now)

    def _turn(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Return a sort key: the sequence with the least work left comes first, unless it waits."""
        return self._is_blocked(sequence), sum(run.cost for run in sequence.rebuilds), sequence.id

    def _is_next_ready(self) -> bool:
        queue = self.rebuilding.queue
        return bool(queue) and not self._is_blocked(queue[0])

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for another one, or for images that steps compute."""
        return self.state.prefixes.is_blocked(sequence) or awaits_images(self.state, sequence)

    def _take_group(self) -> list[Sequence]:
        """Take the next sequence from the queue, and those whose last chunk goes through the same layers and still fits
        into the step: a step reads all weights, however few positions it has."""
        rebuilding = self.rebuilding
        first = rebuilding.queue.popleft()
        run, group = first.rebuilds[0], [first]
        left = rebuilding.chunk_positions - (run.stop - run.done)
        open_bytes = self._open_bytes(first)
        for sequence in list(rebuilding.queue) if self._can_share_step(first) else ():
            other = sequence.rebuilds[0]
            is_alike = (other.source, other.through) == (run.source, run.through)
            is_blocked = self._is_blocked(sequence)
            fits = other.stop - other.done <= left and open_bytes + self._open_bytes(sequence) <= MAX_OPEN_BYTES
            if is_alike and not is_blocked and fits and self._can_share_step(sequence):
                rebuilding.queue.remove(sequence)
                group.append(sequence)
                left -= other.stop - other.done
                open_bytes += self._open_bytes(sequence)
        return group

    def _is_opened_at(self, sequence: int, start: int) -> bool:
        """Whether a chunk that begins at this position is a sequence's first one, which carries its record: a stage may
        not have opened it."""
        return start in (0, self.state.prefixes.position(sequence))

    def _open_bytes(self, sequence: Sequence) -> int:
        """Return the maximum size of the record that the sequence's next chunk carries."""
        is_opened = self._is_opened_at(sequence.id, sequence.rebuilds[0].done)
        return max_record_bytes(sequence) if is_opened else 0

    def _can_share_step(self, sequence: Sequence) -> bool:
        """Whether a sequence may be replayed in a step with others: not if it has images, is suspected of a failure, or
        if a worker is too old."""
        plan = self.state.plans.current
        is_suspect = sequence.id in self.state.evidence.suspects or sequence.num_deaths > 1
        members = () if plan is None else (self.state.workers[incarnation] for incarnation in plan.members)
        return (
            not is_suspect
            and not sequence.images
            and all(max(worker.hello.wire_versions) >= SHARED_STEP_VERSION for worker in members)
        )

    def _check_end(self, now: float) -> None:
        if self.rebuilding.is_idle and self.state.plans.is_serving:
            self.state.recoveries.record_replayed(now)

    def _count_as_prompt(self, sequence: Sequence, plan: Plan, start: int) -> None:
        """Record the work of a sequence that all layers must compute again from position ``start`` on, whichever layers
        were lost."""
        positions = layer_positions(sequence, plan, self.rebuilding.reports)
        least = sum(max(0, sequence.kv - max(start, position)) for position in positions)
        self.state.recoveries.add_recomputed(sequence.id, start, sequence.kv, len(positions), least=least)

    def _order_chunks(self, group: list[Sequence], now: float) -> None:
        """Order one step with the next chunk of each of these sequences."""
        plan, rebuilding = self.state.plans.current, self.rebuilding
        assert plan is not None
        rebuilding.ordered_at = now
        group_number = rebuilding.next_group()
        rebuilding.in_progress.extend(group)
        self._speeds.on_ordered(group_number, now)
        ranges: list[SequenceRange] = []
        for sequence in group:
            run = sequence.rebuilds[0]
            run.group, run.ordered = group_number, replay_stop(self.state, sequence)
            ranges.append(SequenceRange(sequence.id, run.done, run.ordered))
        first, first_sequence = ranges[0], group[0]
        source, through = first_sequence.rebuilds[0].source, first_sequence.rebuilds[0].through
        alone = plan.shares_cores  # run the replay alone, since there are few steps meanwhile
        if source is not None:
            order = Replay(
                epoch=plan.epoch,
                sequence=first.sequence,
                boundary=through.first,
                start=first.start,
                stop=first.stop,
                through=through,
                alone=alone,
                more=tuple(ranges[1:]),
            )
            self.out.append(SendToWorker(source.encode(), order))
            return
        step = Step(
            epoch=plan.epoch,
            step=REPLAY_STEP,
            rows=tuple(Row(part.sequence, part.start, part.stop - part.start, False) for part in ranges),
            tokens=tuple(
                token
                for sequence, part in zip(group, ranges, strict=True)
                for token in sequence.tokens[part.start : part.stop]
            ),
            open=tuple(
                build_open(sequence)
                for sequence, part in zip(group, ranges, strict=True)
                if self._is_opened_at(sequence.id, part.start)
            ),
            replay=True,
            through=through,
            alone=alone,
            pixels=image_pixels(first_sequence.pixels(first.start, first.stop)),
        )
        self.out.append(Dispatch(step))

    def _log_start(self, waiting: list[Sequence]) -> None:
        runs = [run for sequence in waiting for run in sequence.rebuilds]
        cost, least = sum(run.cost for run in runs), sum(run.least for run in runs)
        self.state.recoveries.begin_replays(cost, least)
        self.out.note(
            "replay_begins",
            sequences=len(waiting),
            layer_positions=cost,
            least=least,
            from_logs=sum(run.source is not None for run in runs),
            from_tokens=sum(run.source is None for run in runs),
        )

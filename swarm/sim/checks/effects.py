"""Rules about the effects of single events, by comparing the state before and after: messages of an older epoch have no
effect (I5), survivors keep their positions, and replays go through lost layers only (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.broker import events as broker_event
from swarm.broker.state import Rebuild, Sequence, SequenceState, State
from swarm.sim.checks.audit import Violation
from swarm.stage import actions as stage_act
from swarm.stage import events as stage_event
from swarm.wire.messages import Activate, Activated, DataPathError, Prepared, Refused, ReplayDone, ReplayMissing

if TYPE_CHECKING:
    from swarm.sim.views import WorkerView

LARGE_LOG_BYTES = 1 << 20  # bytes; nothing is ever evicted from such a log here
LayerPositions = dict[int, dict[int, int]]  # sequence -> layer -> positions held
# messages that carry an epoch
_EPOCH_MESSAGES = (Prepared, Refused, Activated, ReplayDone, ReplayMissing, DataPathError)


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """The broker's state before an event."""

    is_stale: bool  # the event must have no effect
    epoch: int
    phase: str
    num_awaited: int
    running: tuple[tuple[int, int, int, int], ...]  # sequence, number of tokens, acknowledged positions, residency
    stepped: tuple[tuple[int, int, int], ...] = ()  # sequences of a finished step: acknowledged positions, residency
    replayed: tuple[int, Rebuild] | None = None  # a sequence and the run of layers whose rebuild has just finished

    @classmethod
    def from_state(
        cls,
        state: State,
        *,
        is_stale: bool,
        stepped: tuple[tuple[int, int, int], ...] = (),
        replayed: tuple[int, Rebuild] | None = None,
    ) -> BrokerSnapshot:
        book = state.plans
        under_way = () if stepped else tuple((s.id, len(s.tokens), s.kv, s.residency) for s in state.running)
        return cls(is_stale, book.epoch, book.phase.value, len(book.awaited), under_way, stepped, replayed)


def take_snapshot(event: broker_event.Event, state: State) -> BrokerSnapshot | None:
    """Return the broker's state that the check after the event needs, or None."""
    match event:
        case broker_event.StepFinished(done):
            current = state.plans.current
            if current is None or done.epoch != current.epoch or done.lineage != state.lineage:
                return BrokerSnapshot.from_state(state, is_stale=True)
            sequences = [state.sequences[item.sequence] for item in done.kv if item.sequence in state.sequences]
            # A sequence preempted since the step was sent may be admitted again with the positions that it is going to
            # copy.
            run = [sequence for sequence in sequences if sequence.state is SequenceState.RUNNING]
            return BrokerSnapshot.from_state(
                state, is_stale=False, stepped=tuple((s.id, s.kv, s.residency) for s in run)
            )
        case broker_event.WorkerMessageReceived(_, message) if isinstance(message, _EPOCH_MESSAGES):
            plans = (state.plans.current, state.plans.upcoming)
            is_current_lineage = message.lineage == state.lineage
            if not is_current_lineage or all(plan is None or plan.epoch != message.epoch for plan in plans):
                return BrokerSnapshot.from_state(state, is_stale=True)
            if isinstance(message, Activated):
                return BrokerSnapshot.from_state(state, is_stale=False)
            if isinstance(message, ReplayDone):
                return BrokerSnapshot.from_state(state, is_stale=False, replayed=_finished_rebuild(state, message))
        case _:
            pass
    return None


def is_in_force(epoch: int, node: WorkerView, state: State) -> bool:
    """Whether the stage serves this epoch of the current broker."""
    return node.core.active == epoch and node.core.lineage == state.lineage


def check_effects(snapshot: BrokerSnapshot | None, state: State, workers: Mapping[str, WorkerView]) -> None:
    """Compare the broker's state with the one before the event."""
    if snapshot is None:
        return
    if snapshot.is_stale:
        _check_stale(snapshot, state)
    elif snapshot.stepped:
        _check_acknowledged(snapshot, state, workers)
    elif snapshot.replayed is not None:
        _check_logged(*snapshot.replayed, state, workers)
    elif snapshot.phase == "activating" and state.plans.phase.value == "serving":
        _check_replays(snapshot, state, workers)


def _finished_rebuild(state: State, message: ReplayDone) -> tuple[int, Rebuild] | None:
    """Return the run of layers whose rebuild the message finishes, if it was rebuilt from position 0."""
    sequence = state.sequences.get(message.sequence)
    run = sequence.rebuilds[0] if sequence is not None and sequence.rebuilds else None
    if run is None or run.start or message.kv != run.stop or message.layers != run.through:
        return None
    return message.sequence, run


def _check_logged(sequence: int, run: Rebuild, state: State, workers: Mapping[str, WorkerView]) -> None:
    """Demand that a replay's output is in the logs that the next death will need, if they have room."""
    plan = state.plans.current
    for stage in plan.stages[:-1] if plan is not None else ():
        node = workers.get(stage.incarnation)
        boundary = stage.layers.stop
        if node is None or not is_in_force(state.plans.epoch, node, state):
            continue
        if not run.through.first < boundary <= run.through.stop:
            continue
        if sequence in node.core.sequences and node.core.settings.log_bytes >= LARGE_LOG_BYTES:
            whole = [e for e in node.core.log.ranges() if (e.sequence, e.boundary) == (sequence, boundary)]
            if not whole or whole[0].stop < run.stop:
                raise Violation(f"I8: {stage.incarnation} did not log what was replayed of sequence {sequence}")


def _check_acknowledged(snapshot: BrokerSnapshot, state: State, workers: Mapping[str, WorkerView]) -> None:
    """Demand that acknowledged positions are held by every stage."""
    plan = state.plans.current
    for sequence_id, counted, stay in snapshot.stepped:
        sequence = state.sequences.get(sequence_id)
        if sequence is None or plan is None or sequence.rebuilds or sequence.state is not SequenceState.RUNNING:
            continue
        if not sequence.is_open_in_stages or sequence.residency != stay:
            continue  # preempted and admitted again: the positions to be copied count, and no stage has received it yet
        for stage in plan.stages if sequence.kv > counted else ():
            node = workers.get(stage.incarnation)
            if node is None or not is_in_force(plan.epoch, node, state):
                continue
            held = node.executor.chains.get(sequence_id, {})
            if any(len(held.get(i, ())) < sequence.kv for i in range(stage.layers.first, stage.layers.stop)):
                raise Violation(f"I8: {sequence.kv} positions of {sequence_id} count, {stage.incarnation} has fewer")


def _check_stale(snapshot: BrokerSnapshot, state: State) -> None:
    """Demand that a message of an older epoch has moved neither a plan nor a sequence."""
    book = state.plans
    if (book.epoch, book.phase.value, len(book.awaited)) != (snapshot.epoch, snapshot.phase, snapshot.num_awaited):
        raise Violation("I5: a message of an older epoch moved the plan")
    for sequence_id, num_tokens, kv, _ in snapshot.running:
        sequence = state.sequences[sequence_id]
        if len(sequence.tokens) != num_tokens or sequence.kv > kv:
            raise Violation(f"I5: a message of an older epoch moved sequence {sequence_id}")


def _check_replays(snapshot: BrokerSnapshot, state: State, workers: Mapping[str, WorkerView]) -> None:
    """Demand that each run of lost layers with logged inputs is replayed from the log, through no other layers.

    Excepted are sequences that have just been preempted and are already back, and recurrent models, whose other layers
    may have fallen back as well.
    """
    if state.state_stride:
        return
    targets = {(sequence, stay): kv for sequence, _, kv, stay in snapshot.running}
    for sequence in state.running:
        target = targets.get((sequence.id, sequence.residency), 0)
        for first, stop in _lost_layers(sequence, target, state, workers):
            if first and _is_logged(sequence, first, target, state, workers):
                if sequence.kv < target:
                    raise Violation(f"I8: sequence {sequence.id} is computed again although layer {first} is logged")
                _check_runs(sequence, first, stop)


def _check_runs(sequence: Sequence, first: int, stop: int) -> None:
    def touches(run: Rebuild) -> bool:
        return run.through.first < stop and first < run.through.stop

    runs = [run for run in sequence.rebuilds if touches(run)]
    exact = [run for run in runs if (run.through.first, run.through.stop) == (first, stop)]
    covered = any(run.through.stop > stop for run in runs)  # a run that starts further up, for layers behind
    if not exact and not covered:
        raise Violation(f"I8: sequence {sequence.id} lost layers {first} to {stop}, {runs} goes through others")


def _lost_layers(
    sequence: Sequence, target: int, state: State, workers: Mapping[str, WorkerView]
) -> list[tuple[int, int]]:
    """Return the ranges of layers that really hold less than ``target``."""
    plan = state.plans.current
    lags: list[bool] = []
    for stage in plan.stages if plan is not None else ():
        node = workers.get(stage.incarnation)
        if node is None or not is_in_force(state.plans.epoch, node, state):
            return []  # the worker is gone or fenced, and the broker has not noticed yet
        chains = node.executor.chains.get(sequence.id, {})
        lags += [len(chains.get(layer, ())) < target for layer in range(stage.layers.first, stage.layers.stop)]
    ranges = []
    for layer, lagging in enumerate(lags):
        if lagging and (layer == 0 or not lags[layer - 1]):
            ranges.append((layer, next((i for i in range(layer, len(lags)) if not lags[i]), len(lags))))
    return ranges


def _is_logged(sequence: Sequence, layer: int, target: int, state: State, workers: Mapping[str, WorkerView]) -> bool:
    """Whether a stage has logged all inputs of this layer and can send them there."""
    plan = state.plans.current
    for stage in plan.stages if plan is not None else ():
        if stage.layers.first < layer <= stage.layers.stop:
            for entry in workers[stage.incarnation].core.log.ranges():
                if (entry.sequence, entry.boundary, entry.start) == (sequence.id, layer, 0) and entry.stop >= target:
                    return True
    return False


# --- at the stages ----------------------------------------------------------------------------------------------------


def snapshot_held(event: stage_event.Event, node: WorkerView) -> tuple[Activate, LayerPositions] | None:
    """Return the positions that a stage holds when it is ordered to activate a plan.

    Retired sequences do not count: a broker that has no record of the retirement, since its machine lost power before
    it was written, gets none of their positions.
    """
    match event:
        case stage_event.OrderArrived(Activate() as order) if order.epoch != node.core.active and (
            order.lineage == node.core.lineage
        ):
            return order, {
                sequence: held for sequence, held in _layer_positions(node).items() if _counts(sequence, node)
            }
        case _:
            return None


def _counts(sequence: int, node: WorkerView) -> bool:
    """Whether a stage that activates its prepared plan must keep what it holds of a sequence, if that lives."""
    held, prepared = node.core.sequences.get(sequence), node.core.pending_plan.wanted
    if held is not None:
        return not held.is_retired
    copy = node.core.store.copies.sequences[sequence]
    return prepared is not None and any(prepared.layers.first <= i < prepared.layers.stop for i in copy.positions)


def check_held(snapshot: tuple[Activate, LayerPositions] | None, node: WorkerView) -> None:
    """Check that a stage kept live sequences up to their acknowledged positions when it activated a plan, and dropped
    the others. What it took over from copies counts like what it had computed. A recurrent model's layers may fall back
    to the last position at which states are always held."""
    if snapshot is None or node.core.active != snapshot[0].epoch or node.core.layers is None:
        return
    order, earlier = snapshot
    live = {item.sequence: item.position for item in order.live}
    layers = node.core.layers
    now = _layer_positions(node)
    shared = {link.sequence: link for link in order.shared}
    for sequence, by_layer in now.items():
        for layer in range(layers.first, layers.stop):
            had = earlier.get(sequence, {}).get(layer, 0)
            has, counts = by_layer.get(layer, 0), live.get(sequence, 0)
            is_given = sequence in shared and has == shared[sequence].position
            is_given = is_given and now.get(shared[sequence].source, {}).get(layer, 0) >= has > had
            has_fallen_back = had > counts >= has >= node.executor.manifest.floor_to_state(counts)
            if has != min(had, counts) and not (is_given or has_fallen_back) and order.epoch == node.core.fence:
                text = f"sequence {sequence} layer {layer}: {had} were held, {counts} count, {has} are held now"
                raise Violation(f"I8: {node.incarnation} {text}")
    held_here = node.core.sequences.keys() | node.core.store.copies.sequences.keys()
    lost = [sequence for sequence in live if sequence in earlier and sequence not in held_here]
    if lost:
        raise Violation(f"I8: {node.incarnation} let go of {lost}, which live")


def _layer_positions(node: WorkerView) -> LayerPositions:
    chains = node.executor.chains
    return {sequence: {layer: len(chain) for layer, chain in held.items()} for sequence, held in chains.items()}


def check_epoch(action: stage_act.Compute, node: WorkerView) -> None:
    """Check that a stage computes only in the epoch in force."""
    core = node.core
    if action.epoch != core.active or action.epoch < core.fence:
        raise Violation(f"I5: {node.incarnation} computes for epoch {action.epoch}, and {core.fence} has begun")

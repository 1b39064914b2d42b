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
from swarm.wire.messages import Activate, Activated, Prepared, Refused, ReplayDone, ReplayMissing, Trouble

if TYPE_CHECKING:
    from swarm.sim.roles import Worker

ROOMY_LOG = 1 << 20  # bytes; nothing is ever evicted from such a log here
Lengths = dict[int, dict[int, int]]  # sequence -> layer -> positions held
_EPOCHAL = (Prepared, Refused, Activated, ReplayDone, ReplayMissing, Trouble)  # messages that carry an epoch


@dataclass(frozen=True, slots=True)
class Before:
    """The broker's state before an event."""

    is_stale: bool  # the event must have no effect
    epoch: int
    phase: str
    num_awaited: int
    under_way: tuple[tuple[int, int, int, int], ...]  # sequence, number of tokens, acknowledged positions, residency
    stepped: tuple[tuple[int, int, int], ...] = ()  # sequences of a finished step: acknowledged positions, residency
    replayed: tuple[int, Rebuild] | None = None  # a sequence and the run of layers whose rebuild has just finished

    @classmethod
    def of(
        cls,
        state: State,
        *,
        is_stale: bool,
        stepped: tuple[tuple[int, int, int], ...] = (),
        replayed: tuple[int, Rebuild] | None = None,
    ) -> Before:
        book = state.book
        under_way = () if stepped else tuple((s.id, len(s.tokens), s.kv, s.stay) for s in state.running)
        return cls(is_stale, book.epoch, book.phase.value, len(book.awaited), under_way, stepped, replayed)


def before(event: broker_event.Event, state: State) -> Before | None:
    """Return the broker's state that the check after the event needs, or None."""
    match event:
        case broker_event.StepFinished(done):
            current = state.book.current
            if current is None or done.epoch != current.epoch or done.lineage != state.lineage:
                return Before.of(state, is_stale=True)
            known = [state.sequences[item.sequence] for item in done.kv if item.sequence in state.sequences]
            # A sequence preempted since the step was sent may be admitted again with the positions that it is going to
            # copy.
            run = [sequence for sequence in known if sequence.state is SequenceState.RUNNING]
            return Before.of(state, is_stale=False, stepped=tuple((s.id, s.kv, s.stay) for s in run))
        case broker_event.WorkerSaid(_, message) if isinstance(message, _EPOCHAL):
            plans = (state.book.current, state.book.coming)
            is_ours = message.lineage == state.lineage
            if not is_ours or all(plan is None or plan.epoch != message.epoch for plan in plans):
                return Before.of(state, is_stale=True)
            if isinstance(message, Activated):
                return Before.of(state, is_stale=False)
            if isinstance(message, ReplayDone):
                return Before.of(state, is_stale=False, replayed=_ended_run(state, message))
        case _:
            pass
    return None


def is_in_force(epoch: int, node: Worker, state: State) -> bool:
    """Whether the stage serves this epoch of the current broker."""
    return node.core.active == epoch and node.core.lineage == state.lineage


def after(was: Before | None, state: State, workers: Mapping[str, Worker]) -> None:
    """Compare the broker's state with the one before the event."""
    if was is None:
        return
    if was.is_stale:
        _check_stale(was, state)
    elif was.stepped:
        _check_acknowledged(was, state, workers)
    elif was.replayed is not None:
        _check_logged(*was.replayed, state, workers)
    elif was.phase == "activating" and state.book.phase.value == "serving":
        _check_replays(was, state, workers)


def _ended_run(state: State, message: ReplayDone) -> tuple[int, Rebuild] | None:
    """Return the run of layers whose rebuild the message finishes, if it was rebuilt from position 0."""
    sequence = state.sequences.get(message.sequence)
    run = sequence.rebuilds[0] if sequence is not None and sequence.rebuilds else None
    if run is None or run.start or message.kv != run.stop or message.layers != run.through:
        return None
    return message.sequence, run


def _check_logged(sequence: int, run: Rebuild, state: State, workers: Mapping[str, Worker]) -> None:
    """Demand that a replay's output is in the logs that the next death will need, if they have room."""
    plan = state.book.current
    for stage in plan.stages[:-1] if plan is not None else ():
        node = workers.get(stage.incarnation)
        boundary = stage.layers.stop
        if node is None or not is_in_force(state.book.epoch, node, state):
            continue
        if not run.through.first < boundary <= run.through.stop:
            continue
        if sequence in node.core.sequences and node.core.settings.log_bytes >= ROOMY_LOG:
            whole = [e for e in node.core.log.ranges() if (e.sequence, e.boundary) == (sequence, boundary)]
            if not whole or whole[0].stop < run.stop:
                raise Violation(f"I8: {stage.incarnation} did not log what was replayed of sequence {sequence}")


def _check_acknowledged(was: Before, state: State, workers: Mapping[str, Worker]) -> None:
    """Demand that acknowledged positions are held by every stage."""
    plan = state.book.current
    for sequence_id, counted, stay in was.stepped:
        sequence = state.sequences.get(sequence_id)
        if sequence is None or plan is None or sequence.rebuilds or sequence.state is not SequenceState.RUNNING:
            continue
        if not sequence.told or sequence.stay != stay:
            continue  # preempted and admitted again: the positions to be copied count, and no stage has received it yet
        for stage in plan.stages if sequence.kv > counted else ():
            node = workers.get(stage.incarnation)
            if node is None or not is_in_force(plan.epoch, node, state):
                continue
            held = node.executor.chains.get(sequence_id, {})
            if any(len(held.get(i, ())) < sequence.kv for i in range(stage.layers.first, stage.layers.stop)):
                raise Violation(f"I8: {sequence.kv} positions of {sequence_id} count, {stage.incarnation} has fewer")


def _check_stale(was: Before, state: State) -> None:
    """Demand that a message of an older epoch has moved neither a plan nor a sequence."""
    book = state.book
    if (book.epoch, book.phase.value, len(book.awaited)) != (was.epoch, was.phase, was.num_awaited):
        raise Violation("I5: a message of an older epoch moved the plan")
    for sequence_id, num_tokens, kv, _ in was.under_way:
        sequence = state.sequences[sequence_id]
        if len(sequence.tokens) != num_tokens or sequence.kv > kv:
            raise Violation(f"I5: a message of an older epoch moved sequence {sequence_id}")


def _check_replays(was: Before, state: State, workers: Mapping[str, Worker]) -> None:
    """Demand that each run of lost layers with logged inputs is replayed from the log, through no other layers.

    Excepted are sequences that have just been preempted and are already back.
    """
    targets = {(sequence, stay): kv for sequence, _, kv, stay in was.under_way}
    for sequence in state.running:
        target = targets.get((sequence.id, sequence.stay), 0)
        for first, stop in _lost(sequence, target, state, workers):
            if first and _is_logged(sequence, first, target, state, workers):
                if sequence.kv < target:
                    raise Violation(f"I8: sequence {sequence.id} is computed anew though layer {first} is logged")
                _check_runs(sequence, first, stop)


def _check_runs(sequence: Sequence, first: int, stop: int) -> None:
    def touches(run: Rebuild) -> bool:
        return run.through.first < stop and first < run.through.stop

    runs = [run for run in sequence.rebuilds if touches(run)]
    exact = [run for run in runs if (run.through.first, run.through.stop) == (first, stop)]
    covered = any(run.through.stop > stop for run in runs)  # a run that starts further up, for layers behind
    if not exact and not covered:
        raise Violation(f"I8: sequence {sequence.id} lost layers {first} to {stop}, {runs} goes through others")


def _lost(sequence: Sequence, target: int, state: State, workers: Mapping[str, Worker]) -> list[tuple[int, int]]:
    """Return the ranges of layers that really hold less than ``target``."""
    plan = state.book.current
    lags: list[bool] = []
    for stage in plan.stages if plan is not None else ():
        node = workers.get(stage.incarnation)
        if node is None or not is_in_force(state.book.epoch, node, state):
            return []  # the worker is gone or fenced, and the broker has not noticed yet
        chains = node.executor.chains.get(sequence.id, {})
        lags += [len(chains.get(layer, ())) < target for layer in range(stage.layers.first, stage.layers.stop)]
    found = []
    for layer, lagging in enumerate(lags):
        if lagging and (layer == 0 or not lags[layer - 1]):
            found.append((layer, next((i for i in range(layer, len(lags)) if not lags[i]), len(lags))))
    return found


def _is_logged(sequence: Sequence, layer: int, target: int, state: State, workers: Mapping[str, Worker]) -> bool:
    """Whether a stage has logged all inputs of this layer and can send them there."""
    plan = state.book.current
    for stage in plan.stages if plan is not None else ():
        if stage.layers.first < layer <= stage.layers.stop:
            for entry in workers[stage.incarnation].core.log.ranges():
                if (entry.sequence, entry.boundary, entry.start) == (sequence.id, layer, 0) and entry.stop >= target:
                    return True
    return False


# --- at the stages ----------------------------------------------------------------------------------------------------


def held_before(event: stage_event.Event, node: Worker) -> tuple[Activate, Lengths] | None:
    """Return the positions that a stage holds when it is ordered to activate a plan.

    Retired sequences do not count: a broker that has no record of the retirement, since its machine lost power before
    it was written, gets none of their positions.
    """
    match event:
        case stage_event.OrderArrived(Activate() as order) if order.epoch != node.core.active and (
            order.lineage == node.core.lineage
        ):
            retired = {sequence for sequence, held in node.core.sequences.items() if held.is_retired}
            return order, {sequence: held for sequence, held in _lengths(node).items() if sequence not in retired}
        case _:
            return None


def held_after(held: tuple[Activate, Lengths] | None, node: Worker) -> None:
    """Check that a stage kept live sequences up to their acknowledged positions when it activated a plan, and dropped
    the others."""
    if held is None or node.core.active != held[0].epoch or node.core.layers is None:
        return
    order, earlier = held
    live = {item.sequence: item.position for item in order.live}
    layers = node.core.layers
    for sequence, by_layer in _lengths(node).items():
        for layer in range(layers.first, layers.stop):
            had = earlier.get(sequence, {}).get(layer, 0)
            has, counts = by_layer.get(layer, 0), live.get(sequence, 0)
            if has != min(had, counts) and order.epoch == node.core.fence:
                text = f"sequence {sequence} layer {layer}: {had} were held, {counts} count, {has} are held now"
                raise Violation(f"I8: {node.incarnation} {text}")
    lost = [sequence for sequence in live if sequence in earlier and sequence not in node.core.sequences]
    if lost:
        raise Violation(f"I8: {node.incarnation} let go of {lost}, which live")


def _lengths(node: Worker) -> Lengths:
    chains = node.executor.chains
    return {sequence: {layer: len(chain) for layer, chain in held.items()} for sequence, held in chains.items()}


def computes(action: stage_act.Compute, node: Worker) -> None:
    """Check that a stage computes only in the epoch in force."""
    core = node.core
    if action.epoch != core.active or action.epoch < core.fence:
        raise Violation(f"I5: {node.incarnation} computes for epoch {action.epoch}, and {core.fence} has begun")

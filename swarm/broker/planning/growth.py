"""Growth: whether a change of a whole plan for speed alone pays for itself.

Another plan is quicker by more than the margin, for example because a worker has joined. The change costs time: layers
are loaded in the background, which slows steps down a little; keys and values are copied; and dispatching pauses. It is
made if the quicker steps save more within ``HORIZON`` cooldowns. Both sides are shares of busy time, so they compare
alike however busy the swarm is.

* After a change, the next one for speed alone is a cooldown away, so that several workers that join one after the other
  lead to one change for all of them. For a cooldown after a loss this does not hold: workers come back.
* While no request is under way, a change disturbs none: it is made immediately.
* Neither rule holds for a plan that can't go on (a worker leaves or is drained) or that an operator asks for.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm.broker.planner.explain import describe_speedup
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.measurements import load_rate
from swarm.broker.state import Plan, State
from swarm.broker.state.moves import MovePrediction, PlanMove
from swarm.wire.messages import LayerRange, layers_of, loaded_layers, to_ranges

HORIZON = 20.0  # cooldowns within which the change must pay for itself
LOAD_COST = 0.05  # share of a step's time by which a load in the background slows steps down
COPY_COST = 0.2  # the same while keys and values are copied
REST_FACTOR = 20.0  # how much longer a load takes beside steps, until …
MAX_REST_S = 60.0  # … it has paused this long in total
COPY_BYTES_PER_S = 100e6  # assumed rate of copies
FRESH = 2.0  # cooldowns for which a worker counts as new
PAUSE_STEPS = 2.0  # steps for which dispatching pauses: one ends, and the first one of the next plan begins
PAUSE_S = 0.03  # in addition: the last positions, and the stages' orders and answers


def predict_move(state: State, proposal: Proposal) -> MovePrediction:
    """Predict what the change from the active plan to this proposal gains and costs."""
    assert state.manifest is not None
    workers = list(state.workers.values())
    loads = (
        state.manifest.weight_bytes(missing) / max(1.0, load_rate(state.workers[incarnation], workers))
        for incarnation, missing in _find_missing(state, proposal)
    )
    load_s = max(loads, default=0.0)
    if state.running:
        load_s += min(MAX_REST_S, (REST_FACTOR - 1) * load_s)
    copied = sum(s.kv for s in state.running) * sum(_moved_bytes(state, proposal))
    return MovePrediction(
        before_s=proposal.now_s,
        after_s=proposal.forecast.step_s,
        load_s=load_s,
        copy_s=copied / COPY_BYTES_PER_S,
        pause_s=PAUSE_S + PAUSE_STEPS * state.costs.usual_step_s,
    )


def pays_for_itself(predicted: MovePrediction, cooldown_s: float) -> bool:
    """Whether the quicker steps save more time than the change costs."""
    if predicted.before_s is None:
        return True
    saved_s = HORIZON * cooldown_s * (1 - predicted.after_s / predicted.before_s)
    return saved_s > predicted.pause_s + LOAD_COST * predicted.load_s + COPY_COST * predicted.copy_s


def is_due(state: State, proposal: Proposal, margin: float, cooldown_s: float) -> bool:
    """Whether to change to a proposal that is worth it, now."""
    is_asked_for = state.constraints.margin is not None
    if proposal.now_s is None or is_asked_for or not (state.running or len(state.waiting)):
        return True
    if state.now < state.moves.quiet_until:
        return False
    is_for_speed = proposal.now_s > proposal.forecast.step_s * (1 + margin)
    return not is_for_speed or pays_for_itself(predict_move(state, proposal), cooldown_s)


def describe_cause(state: State, current: Plan, proposal: Proposal, cooldown_s: float) -> tuple[str, float]:
    """Return what changes, as text, and since when this is wanted: since the newest worker joined, if that has led to
    the change."""
    chosen = [incarnation for incarnation, _ in proposal.shares]
    new = [state.workers[incarnation] for incarnation in chosen if incarnation not in current.members]
    gone = [stage.name for stage in current.stages if stage.incarnation not in chosen]
    text = f"with {', '.join(worker.name for worker in new)}" if new else ""
    text += f"{' ' if new else ''}without {', '.join(gone)}" if gone else ""
    joined_at = max((worker.joined_at for worker in new), default=state.now)
    is_cause = proposal.now_s is not None and state.now - joined_at < FRESH * cooldown_s
    return text or "another cut of the same workers", joined_at if is_cause else state.now


def describe_move(move: PlanMove, achieved: tuple[int, float] | None, now: float) -> str:
    """Return the predicted and the achieved effect of the last change in one sentence."""
    predicted, measured = move.predicted, "not measured yet"
    if achieved is not None:
        sequences = f"{achieved[0]} sequence{'s' if achieved[0] != 1 else ''}"
        measured = f"measured {_describe_gain(achieved[1])} with {sequences}"
    gain = "" if predicted.gain is None else f"predicted {_describe_gain(predicted.gain)}, {measured}; "
    ago_s = now - (move.served_at or now)
    pause = "" if move.pause_s is None else f", and steps paused for {move.pause_s:.3g} s"
    return f"changed {ago_s:.0f} s ago ({move.cause}): {gain}it took {move.reached_s or 0.0:.3g} s{pause}"


def _describe_gain(gain: float) -> str:
    if faster := describe_speedup(1.0, gain):
        return faster
    slower = describe_speedup(gain, 1.0)
    return f"{1 - gain:.0%} slower" if slower else "equally fast"


def _find_missing(state: State, proposal: Proposal) -> Iterator[tuple[str, LayerRange]]:
    """Yield the layers that each worker would have to load."""
    for incarnation, layers in proposal.shares:
        worker = state.workers[incarnation]
        for missing in to_ranges(layers_of((layers,)) - loaded_layers(worker.layers, worker.warm_layers)):
            yield incarnation, missing


def _moved_bytes(state: State, proposal: Proposal) -> Iterator[int]:
    """Yield for each moved layer the bytes of one position's keys and values."""
    assert state.manifest is not None
    assert state.plans.current is not None
    holders = {layer: s.incarnation for s in state.plans.current.stages for layer in layers_of((s.layers,))}
    for incarnation, layers in proposal.shares:
        for layer in layers_of((layers,)):
            if holders.get(layer) != incarnation:
                yield state.manifest.kv_bytes_per_token[layer]

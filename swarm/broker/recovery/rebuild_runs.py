"""Which layers of a sequence must be rebuilt after a change of plan, from which positions, and from whose log.

Layers that changed hands begin at the position that their new holder has copies for, or at 0. They are rebuilt from the
nearest log before them, through all layers between. Layers that lag differently are rebuilt together from the lowest
of their positions, unless that would compute many positions again in layers that hold them: then the first positions go
through the deepest layer that lacks them only, and the others follow.

A log may end before the last positions: its boundary lies within a stage that has taken over the layers behind it since
then. The log behind that stage begins only where the stage continued, if it had copies. So the first positions come
from the log that ends too early, and the others from an earlier boundary or the tokens, through more layers: those that
the first positions went through again must be level with the others in the end.

A layer that keeps a state, and has passed a position, can go on from there only where states are kept
(``Manifest.state_stride``). For a model with such layers, every part begins and ends there; but the last one ends at
the target, and the first one may begin where all of its layers stand, as after a loss of layers of which there are
copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swarm.broker.state import Plan, Rebuild, Sequence
from swarm.wire.messages import Activated, HeldSequence, LayerRange, SequenceRange, to_ranges

# Fewest positions for which a run is split: each part reads all its weights at least once.
MIN_SPLIT = 256


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of the layer ``boundary`` up to position ``stop``: a stage's log, or the tokens if ``source`` is None."""

    source: str | None
    boundary: int
    stop: int


def find_rebuild_runs(
    sequence: Sequence,
    plan: Plan,
    reports: Mapping[str, Activated],
    *,
    shared: int = 0,
    from_tokens: bool = False,
    stride: int = 0,
) -> list[Rebuild] | int:
    """Return the replays that are needed until every layer holds ``sequence.kv`` positions, in their order. If most of
    that work would go through all layers, return instead the position from which the sequence is to be computed again
    like a prompt, in steps shared with others. ``shared``: positions that every layer gets from another sequence.
    ``stride``: positions between states; 0: layers keep none."""
    positions = [max(shared, position) for position in layer_positions(sequence, plan, reports)]
    runs = _find_runs(sequence, positions, plan, reports, from_tokens=from_tokens, stride=stride)
    if not stride or _can_begin(runs, positions, stride):
        return runs
    target = sequence.kv
    floors = [position if position >= target else position // stride * stride for position in positions]
    return _find_runs(sequence, floors, plan, reports, from_tokens=from_tokens, stride=stride)


def _can_begin(runs: list[Rebuild] | int, positions: list[int], stride: int) -> bool:
    """Return whether every layer holds a state where it is to go on. ``positions``: of each layer."""
    if isinstance(runs, int):
        moves = [(LayerRange(0, len(positions)), runs, runs)]
    else:
        moves = [(run.through, run.start, run.stop) for run in runs]
    levels = list(positions)
    for through, start, stop in moves:
        for layer in range(through.first, through.stop):
            if levels[layer] != start and (levels[layer] < start or start % stride):
                return False
            levels[layer] = stop
    return True


def _find_runs(
    sequence: Sequence,
    positions: list[int],
    plan: Plan,
    reports: Mapping[str, Activated],
    *,
    from_tokens: bool,
    stride: int,
) -> list[Rebuild] | int:
    """Return what ``find_rebuild_runs`` returns for layers at these positions."""
    target = sequence.kv
    lacking = [layer for layer, position in enumerate(positions) if position < target]
    start = min((positions[layer] for layer in lacking), default=target)
    wanted = SequenceRange(sequence.id, start, target)
    parts: list[tuple[list[_Inputs], int]] = []  # where inputs come from, and the layer behind the last one
    for lost in to_ranges(lacking):
        inputs = [_Inputs(None, 0, target)]
        if not from_tokens:
            inputs = list(_find_inputs(wanted, lost.first, plan, reports, stride))
        # it would go through layers of the part before: merge both
        if parts and inputs[-1].boundary < parts[-1][1]:
            inputs, _ = parts.pop()
        parts.append((inputs, lost.stop))
    runs = [run for inputs, last in parts for run in _plan_part(inputs, last, positions)]
    whole = sum(run.cost for run in runs if run.through == LayerRange(0, len(positions)))
    return start if 2 * whole > sum(run.cost for run in runs) else runs


def _plan_part(inputs: list[_Inputs], last: int, positions: list[int]) -> list[Rebuild]:
    """Return the runs that rebuild the lagging layers before layer ``last`` from these inputs."""
    runs: list[Rebuild] = []
    for each in inputs:
        through = LayerRange(each.boundary, last)
        if not runs:
            runs = _split(each.source, through, positions, each.stop)
            continue
        start = runs[-1].stop
        num_lost = sum(position < each.stop for position in positions[through.first : last])
        runs.append(Rebuild(each.source, through, num_lost, each.stop, start, start))
    return runs


def _split(source: str | None, through: LayerRange, positions: list[int], target: int) -> list[Rebuild]:
    """Return the runs that rebuild the layers in ``through`` that lag behind the target. The log enters the first
    one."""
    held = {layer: positions[layer] for layer in range(through.first, through.stop)}
    lacking = {layer: position for layer, position in held.items() if position < target}
    runs: list[Rebuild] = []
    if not lacking:
        return runs
    start = min(lacking.values())
    while start < target:
        # a position from which on deeper layers are needed than before it
        cuts = [p for p in lacking.values() if p >= start + MIN_SPLIT and _deepest(lacking, p) < max(lacking)]
        stop = min(cuts, default=target)
        needed = LayerRange(through.first, _deepest(lacking, stop) + 1)
        num_lost = sum(position < stop for position in lacking.values())
        runs.append(Rebuild(source, needed, num_lost, stop, start, start))
        start = stop
    return runs


def _deepest(lacking: Mapping[int, int], position: int) -> int:
    """Return the deepest layer that lacks positions before ``position``."""
    return max(layer for layer, held in lacking.items() if held < position)


def layer_positions(sequence: Sequence, plan: Plan, reports: Mapping[str, Activated]) -> list[int]:
    """Return the position up to which each layer of the model holds the sequence."""
    positions: list[int] = []
    for stage in plan.stages:
        held = next((h for h in reports[stage.incarnation].held if h.sequence == sequence.id), None)
        positions.extend(_position(held, layer) for layer in range(stage.layers.first, stage.layers.stop))
    return positions


def _position(held: HeldSequence | None, layer: int) -> int:
    if held is None:
        return 0
    return next((r.position for r in held.kv if r.layers.first <= layer < r.layers.stop), 0)


def _find_inputs(
    wanted: SequenceRange, layer: int, plan: Plan, reports: Mapping[str, Activated], stride: int
) -> Iterator[_Inputs]:
    """Yield where the inputs of ``layer``, or of layers before it, come from, for one part of these positions after the
    other. Later parts come from the same boundary or an earlier one."""
    start = wanted.start
    while start < wanted.stop:
        inputs = _find_nearest_log(SequenceRange(wanted.sequence, start, wanted.stop), layer, plan, reports, stride)
        yield inputs
        start, layer = inputs.stop, inputs.boundary


def _find_nearest_log(
    wanted: SequenceRange, layer: int, plan: Plan, reports: Mapping[str, Activated], stride: int
) -> _Inputs:
    """Return the stage whose log has the inputs of ``layer``, or of a layer before it, at all these positions or enough
    of the first ones, and can send them there: a stage reaches the next stage, and its own layers. If there is no such
    log, the tokens must serve."""
    best = _Inputs(None, 0, wanted.stop)
    enough = min(wanted.stop, wanted.start + max(MIN_SPLIT, stride))
    for stage in plan.stages:
        for entry in reports[stage.incarnation].logs:
            reaches = stage.layers.first < entry.boundary <= stage.layers.stop
            serves = entry.sequence == wanted.sequence and entry.start <= wanted.start and enough <= entry.stop
            if reaches and serves and best.boundary < entry.boundary <= layer:
                stop = entry.stop // stride * stride if stride and entry.stop < wanted.stop else entry.stop
                best = _Inputs(stage.incarnation, entry.boundary, min(stop, wanted.stop))
    return best
